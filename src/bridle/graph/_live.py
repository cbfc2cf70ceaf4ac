"""What is alive in this process: looked for only after something has gone wrong, since the walk is long."""

import gc

from torch import Tensor, nn


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python holds."""
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


def live_models() -> list[nn.Module]:
    """Return every module that is part of no other, the largest first."""
    # The type is asked, not isinstance: that would wake lazy proxies. A module still in its __init__ has no
    # children yet.
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in vars(o)]
    inside = {id(child) for module in modules for child in module.children()}
    outermost = [module for module in modules if id(module) not in inside]
    return sorted(outermost, key=lambda model: -sum(1 for _ in model.modules()))
