"""Modules and nested containers, read without calling what they override."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

# For all modules there are. Those that run when something is registered are no part of a step.


def submodules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and every module inside it, each once and by its first path, parents before children."""
    seen: set[int] = set()
    stack = [(prefix, model)]
    while stack:
        path, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            stack += [(_join(path, name), child) for name, child in reversed(children(module))]


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the direct submodules with their names."""
    return _entries(module, "_modules", nn.Module)


def parameters(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model and of every module inside it."""
    return _tensors(model, "_parameters", prefix)


def buffers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model and of every module inside it."""
    return _tensors(model, "_buffers", prefix)


def _tensors(model: nn.Module, kind: str, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for path, module in submodules(model, prefix):
        for name, tensor in _entries(module, kind, Tensor):
            yield _join(path, name), tensor


def _entries(module: nn.Module, kind: str, wanted: type) -> list[tuple[str, Any]]:
    try:
        entries = object.__getattribute__(module, "__dict__")[kind].items()
        return [(str(name), value) for name, value in entries if issubclass(type(value), wanted)]
    except Exception:  # still in its __init__, or its dicts are not torch's
        return []


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return what nested containers hold, and a function that puts other things into their places."""
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=lambda part: isinstance(part, PackedSequence))
    return leaves, lambda others: _pytree.tree_unflatten(others, spec)
