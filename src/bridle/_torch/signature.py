"""What there is of a recorded graph besides the values of its tensors."""

from collections.abc import Sequence
from typing import Any

from torch.autograd.graph import Node


def signature(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """Return ops, edges, shapes, dtypes, sizes and flags of a graph, given its nodes in order."""
    number: dict[Node | None, int] = {node: i for i, node in enumerate(nodes)}
    number[None] = -1
    rows = []
    for node in nodes:
        kind = type(node)
        edges = tuple([(number[below], nr) for below, nr in node.next_functions])
        outputs = tuple([(tuple(out.shape), out.dtype) for out in node._input_metadata])
        values = tuple([_hashable(getattr(node, name)) for name in fields(kind)[1]])
        rows.append((kind, edges, outputs, values))
    return tuple(rows)


def sequence_range(nodes: Sequence[Node]) -> tuple[int, int]:
    """Return the numbers of the first and the last op; each thread counts for itself, and leaves do not count."""
    numbers = [number for node in nodes if (number := node._sequence_nr()) != _LEAF]
    return min(numbers, default=0), max(numbers, default=0)


# The largest number of a 64-bit counter: torch gives it to leaves.
_LEAF = 2**64 - 1


_FIELDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}


def fields(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of what nodes of a kind save: tensors, and everything else."""
    if kind not in _FIELDS:
        names = dir(kind)
        raw = tuple(name for name in names if name.startswith("_raw_saved_"))
        plain = tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in raw)
        _FIELDS[kind] = raw, plain
    return _FIELDS[kind]


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list | tuple) else value
