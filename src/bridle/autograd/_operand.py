"""Which of the values a node saved made its gradient non-finite."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from ..graph import State
from ._stats import plain_values
from ._torch import local_part


class Operand(NamedTuple):
    """What was found about the operands of one node.

    Attributes:
        text: what to tell.
        name: torch's name of the saved value that did it, None if none stands out.
        rows: where in its first dimension, which for most data is the number of the sample.
    """

    text: str
    name: str | None
    rows: tuple[int, ...]


def bad_places(values: Tensor) -> Tensor:
    """Return where values are NaN or infinite."""
    plain = plain_values(local_part(values.detach()))
    return torch.zeros((), dtype=torch.bool) if plain is None else ~torch.isfinite(plain)


def saved_tensors(node: Node) -> dict[str, Tensor]:
    """Return the floating-point values a node saved, by torch's names, also those packed by hooks."""
    try:
        entries = graph.saved(node, unpack=True)
    except RuntimeError:
        return {}
    tensors = {e.name: e.value for e in entries if e.state is State.READY and isinstance(e.value, Tensor)}
    return {name: value.detach() for name, value in tensors.items() if value.dtype.is_floating_point}


def guilty_operand(node: Node, bad: Tensor, incoming: Sequence[Tensor]) -> Operand:
    """Find the saved value that is not finite, or zero, exactly where the gradient went bad.

    Args:
        node: the node that turned a finite gradient into a non-finite one.
        bad: where it did.
        incoming: the gradients it was given.
    """
    operands = saved_tensors(node)
    for name, value in operands.items():
        wrong = _that_explain(bad_places(value), bad)
        if wrong is not None:
            text = f"Its saved operand `{name}` is NaN or infinite {describe(wrong)}: look for what computed it."
            return Operand(text, name, rows_of(wrong))
    for name, value in operands.items():
        zero = _that_explain(value == 0, bad)
        if zero is not None:
            text = (
                f"Its saved operand `{name}` is zero {describe(zero)}. Keep it away from zero before this "
                "op, by a clamp or a small constant; masking the result does not help, because 0 * inf is "
                "NaN."
            )
            return Operand(text, name, rows_of(zero))
    largest = max((gradient.abs().max().item() for gradient in incoming if gradient.numel()), default=0.0)
    seen = [f"`{name}` {_range(value, bad)}" for name, value in operands.items() if value.numel()]
    text = (
        "No saved operand is zero or non-finite there, so a value left the range of its dtype, or the op has "
        f"no finite derivative there: {', '.join([*seen, f'incoming gradient up to {largest:.3g}'])}; "
        f"{describe(bad)}."
    )
    return Operand(text, None, rows_of(bad))


def rows_of(places: Tensor) -> tuple[int, ...]:
    """Return the indices in the first dimension that hold a marked place."""
    if places.dim() == 0:
        return ()
    return tuple(places.reshape(places.shape[0], -1).any(1).nonzero().flatten().tolist())


def describe(places: Tensor) -> str:
    """Return for example "(2 of 8 values, first at (3, 0), rows 3, 7)"."""
    rows = rows_of(places)
    listed = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    tail = f", row{'s' if len(rows) > 1 else ''} {listed}" if rows else ""
    first = tuple(places.nonzero()[0].tolist())
    return f"({int(places.sum())} of {places.numel()} values, first at {first}{tail})"


def _that_explain(special: Tensor, bad: Tensor) -> Tensor | None:
    """Return which of the special places lie where the gradient is bad, if they account for all of it.

    Where an op mixes places, as a matrix product does, indices say nothing; None then, too.
    """
    shape = _common_shape(special, bad)
    if shape is None:
        return None
    both = special.expand(shape) & bad.expand(shape)
    if not special.any() or (bad.expand(shape) & ~both).any():
        return None
    return both.int().sum_to_size(special.shape) > 0


def _common_shape(value: Tensor, bad: Tensor) -> torch.Size | None:
    """Return the shape both broadcast to, if it is that of one of them."""
    try:
        shape: torch.Size = torch.broadcast_shapes(value.shape, bad.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return shape if shape in (value.shape, bad.shape) else None


def _range(value: Tensor, bad: Tensor) -> str:
    shape = _common_shape(value, bad)
    there = value if shape is None else value.expand(shape)[bad.expand(shape)]
    return f"from {there.min().item():.3g} to {there.max().item():.3g}"
