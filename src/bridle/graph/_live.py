"""What is alive in this process: looked for only after something has gone wrong, since the walk is long.

Anybody's module may be met here, so modules are read from their own dicts: a method that somebody has overridden may
take other arguments, raise, or take long.
"""

import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python holds and that can be asked where it comes from."""
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor) and _answers(o)]


def live_models() -> list[nn.Module]:
    """Return every module that is part of no other, the largest first."""
    # The type is asked, not isinstance: that would wake lazy proxies.
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    inside = {id(child) for module in modules for _, child in _held(module, "_modules", nn.Module)}
    outermost = [module for module in modules if id(module) not in inside]
    return sorted(outermost, key=lambda model: -sum(1 for _ in walk(model)))


def walk(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and every module inside it, each once and by its first path, the owner before the owned."""
    seen: set[int] = set()
    stack = [(prefix, model)]
    while stack:
        path, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            stack += [(_join(path, name), child) for name, child in reversed(_held(module, "_modules", nn.Module))]


def tensors_of(model: nn.Module, kind: str, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model and of every module inside it: `kind` is "_parameters" or "_buffers"."""
    for path, module in walk(model, prefix):
        for name, tensor in _held(module, kind, Tensor):
            yield _join(path, name), tensor


def _answers(tensor: Tensor) -> bool:
    """Tell whether these can be read; torch refuses for some views, and a subclass may do anything."""
    try:
        _ = tensor.grad_fn, tensor.requires_grad, tensor.output_nr, tensor.shape
    except Exception:
        return False
    return True


def _held(module: nn.Module, kind: str, wanted: type) -> list[tuple[str, Any]]:
    try:
        entries = object.__getattribute__(module, "__dict__")[kind].items()
        return [(str(name), value) for name, value in entries if issubclass(type(value), wanted)]
    except Exception:  # still in its __init__, or these are no dicts of torch's
        return []


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
