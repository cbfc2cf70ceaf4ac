"""Hand the coefficient to a fused optimizer, which applies it in its own pass over the gradients.

torch's fused optimizers read two attributes that `torch.amp.GradScaler` sets: `grad_scale` (gradients are divided
by it) and `found_inf` (1 skips the step). They are torch's private agreement; checked on torch 2.13.0 and 2.15.0.
With a scaler that has unscaled already, it keeps our `grad_scale` and puts its own `found_inf`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import FoldError
from . import _measure
from ._decision import Decision, Policy, Scale
from ._gradients import Gradients

__all__ = ["check_fold", "fold"]

_FLOAT32 = torch.finfo(torch.float32)
_HOOKED = "_bridle_unfold"


def check_fold(
    optimizer: torch.optim.Optimizer, groups: list[tuple[str, Policy | None, Gradients]], grads: Gradients
) -> None:
    """Refuse, before anything is done, what would not give the same step as clipping first."""
    name = type(optimizer).__name__
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise FoldError(
            f"{name} cannot take a coefficient into its step: only torch's fused optimizers can. Build it with "
            "fused=True (SGD, Adam, AdamW, Adagrad), or leave fold_into out."
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    clipped = {id(p) for p in grads.parameters if p.grad is not None}
    if stepped != clipped or len(groups) != 1:
        raise FoldError(
            f"fold_into needs one policy over exactly the parameters that {name} steps, for it multiplies all of them "
            f"by one coefficient. It steps {len(stepped)}; {len(stepped & clipped)} of these are among the "
            f"{len(clipped)} to be clipped, in {len(groups)} group(s)."
        )


def fold(optimizer: Any, decision: Decision, skipped: bool | Tensor) -> None:
    """Leave the coefficient and the skip with the optimizer, for its next step only."""
    if not isinstance(decision, Scale) or not isinstance(decision.by, Tensor) or decision.by.dim() != 0:
        raise FoldError("fold_into needs a policy with one coefficient for all gradients, such as by_norm.")
    coefficient = decision.by
    if _measure.readable_now([coefficient]) and not _holds(1.0 / coefficient.item() if coefficient else 0.0):
        raise FoldError(
            f"the optimizer takes the inverse of the coefficient as a float32, and no float32 holds that of "
            f"{coefficient.item():g}. Leave fold_into out for this step. No gradient was changed."
        )
    optimizer.grad_scale = (1.0 / coefficient).to(torch.float32)
    optimizer.found_inf = torch.as_tensor(skipped, device=coefficient.device).to(torch.float32)
    optimizer._bridle_folded = optimizer.found_inf
    if not hasattr(optimizer, _HOOKED):
        setattr(optimizer, _HOOKED, optimizer.register_step_post_hook(_unfold))


def _holds(inverse: float) -> bool:
    """Is this in the normal range of float32? That of 0 comes as 0: it is infinite, which does what 0 would."""
    return inverse == 0 or _FLOAT32.tiny <= inverse <= _FLOAT32.max


def _unfold(optimizer: Any, args: object, kwargs: object) -> None:  # noqa: ARG001  # a torch hook's signature
    # A GradScaler that drove this step has put its own `found_inf` there and removes both itself.
    ours = optimizer.__dict__.pop("_bridle_folded", None)
    if ours is not None and getattr(optimizer, "found_inf", None) is ours:
        del optimizer.grad_scale, optimizer.found_inf
