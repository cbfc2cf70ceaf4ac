"""Versions: torch counts how often the memory of a tensor was changed in place."""

from torch import Tensor


def changed_since_viewed(view: Tensor) -> bool | None:
    """Return whether the memory of a view was changed in place since the view was made; None if torch does not tell.

    torch notes the version at which a view was made. It looks there when it is asked for the history of the view, if
    the tensor that was viewed needs a gradient: it then makes a new history, or says that it cannot.

    Args:
        view: a view that was made without recording, as in the forward of a Function.
    """
    base = view._base
    if view._version == 0 or base is None or base.is_inference():
        return False
    if not base.is_floating_point() and not base.is_complex():
        return None
    needed = base.requires_grad
    try:
        if not needed:
            base.requires_grad_(True)
        return view.grad_fn is not None
    except RuntimeError:
        return True
    finally:
        if not needed:
            base.requires_grad_(False)
