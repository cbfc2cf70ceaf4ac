"""Nested containers of what a call is given and returns."""

from collections.abc import Callable
from typing import Any

from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return what nested containers hold, and a function that puts other things into their places."""
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=lambda part: isinstance(part, PackedSequence))
    return leaves, lambda others: _pytree.tree_unflatten(others, spec)
