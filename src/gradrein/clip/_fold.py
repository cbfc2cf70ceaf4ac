"""Hand the coefficient to a fused optimizer, which applies it in its own pass over the gradients."""

from typing import Any

import torch
from torch import Tensor

from .. import _devices
from .._torch.amp import scale_next_step, takes_grad_scale
from ..errors import FoldError
from ..policies import Decision, Policy, Scale
from ._gradients import Gradients

_FLOAT32 = torch.finfo(torch.float32)


def check_fold(
    optimizer: torch.optim.Optimizer, parts: list[tuple[str, Policy | None, Gradients]], grads: Gradients
) -> None:
    """Refuse, before anything is done, what would not give the same step as clipping first."""
    name = type(optimizer).__name__
    if not takes_grad_scale(optimizer):
        raise FoldError(
            f"{name} cannot apply a coefficient in its step: only torch's fused optimizers can. Build it with "
            "fused=True (SGD, Adam, AdamW, Adagrad), or leave fold_into out."
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    clipped = {id(p) for p in grads.parameters if p.grad is not None}
    if stepped != clipped or len(parts) != 1:
        raise FoldError(
            f"fold_into needs one policy over exactly the parameters that {name} steps, because it multiplies all of "
            f"them by one coefficient. It steps {len(stepped)}; {len(stepped & clipped)} of these are among the "
            f"{len(clipped)} to be clipped, in {len(parts)} group(s)."
        )


def fold(optimizer: Any, decision: Decision, skipped: bool | Tensor) -> None:
    """Hand the coefficient and the skip to the optimizer, for its next step only."""
    if not isinstance(decision, Scale) or not isinstance(decision.by, Tensor) or decision.by.dim() != 0:
        raise FoldError("fold_into needs a policy with one coefficient for all gradients, such as by_norm.")
    coefficient = decision.by
    if _devices.readable_now([coefficient]) and not _fits_float32(1.0 / coefficient.item() if coefficient else 0.0):
        raise FoldError(
            f"the optimizer takes the inverse of the coefficient as a float32, and no float32 holds that of "
            f"{coefficient.item():g}. Leave fold_into out for this step. No gradient was changed."
        )
    found_inf = torch.as_tensor(skipped, device=coefficient.device).to(torch.float32)
    scale_next_step(optimizer, (1.0 / coefficient).to(torch.float32), found_inf)


def _fits_float32(inverse: float) -> bool:
    """Return whether this is in the normal range of float32. 0 stands for the inverse of 0, which folds right."""
    return inverse == 0 or _FLOAT32.tiny <= inverse <= _FLOAT32.max
