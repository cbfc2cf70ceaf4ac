"""The agreement between `torch.amp.GradScaler` and torch's fused optimizers, which `fold_into` uses too.

A fused optimizer reads two attributes that a scaler sets: `grad_scale` (gradients are divided by it) and `found_inf`
(1 skips the step). A scaler that has unscaled already keeps our `grad_scale` and sets its own `found_inf`.
"""

from typing import Any

from torch import Tensor

_FOLDED = "_gradrein_folded"
_HOOK = "_gradrein_unfold"


def takes_grad_scale(optimizer: Any) -> bool:
    """Return whether the optimizer divides by `grad_scale` inside its step."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def scale_next_step(optimizer: Any, grad_scale: Tensor, found_inf: Tensor) -> None:
    """Make the next step, and only that one, divide by `grad_scale`, or skip where `found_inf` is 1."""
    optimizer.grad_scale = grad_scale
    optimizer.found_inf = found_inf
    setattr(optimizer, _FOLDED, found_inf)
    if not hasattr(optimizer, _HOOK):
        setattr(optimizer, _HOOK, optimizer.register_step_post_hook(_clear))


def _clear(optimizer: Any, args: object, kwargs: object) -> None:  # noqa: ARG001  # a torch hook's signature
    # A GradScaler that drove this step has put its own `found_inf` there and removes both itself.
    ours = optimizer.__dict__.pop(_FOLDED, None)
    if ours is not None and getattr(optimizer, "found_inf", None) is ours:
        del optimizer.grad_scale, optimizer.found_inf
