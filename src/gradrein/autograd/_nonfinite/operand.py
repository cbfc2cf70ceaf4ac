"""The saved value that made a node's gradient non-finite."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from .._values import nonfinite_mask


class Origin(NamedTuple):
    """Where a NaN or infinity began, with the attributes of `NonFiniteGradientError`; `text` is for its message."""

    text: str
    node: str | None = None
    module: str | None = None
    operand: str | None = None
    rows: tuple[int, ...] = ()


def saved_floats(node: Node) -> dict[str, Tensor]:
    """Return the floating-point values a node saved, by torch's names, also those packed by hooks."""
    try:
        entries = graph.saved(node, unpack=True)
    except RuntimeError:
        return {}
    tensors = {e.name: e.value for e in entries if e.state == "ready" and isinstance(e.value, Tensor)}
    return {name: value.detach() for name, value in tensors.items() if value.dtype.is_floating_point}


def find_operand(node: Node, bad: Tensor, incoming: Sequence[Tensor]) -> Origin:
    """Find the saved value that is non-finite, or zero, exactly where the gradient is non-finite.

    Args:
        node: the node that turned a finite gradient into a non-finite one.
        bad: where it did.
        incoming: the gradients that arrived at it.
    """
    operands = saved_floats(node)
    for name, value in operands.items():
        wrong = _matching(nonfinite_mask(value), bad)
        if wrong is not None:
            text = f"Its saved operand `{name}` is NaN or infinite {mask_label(wrong)}: look for what computed it."
            return Origin(text, operand=name, rows=rows_of(wrong))
    for name, value in operands.items():
        zero = _matching(value == 0, bad)
        if zero is not None:
            text = (
                f"Its saved operand `{name}` is zero {mask_label(zero)}. Keep it away from zero before this "
                "op, by a clamp or a small constant; masking the result does not help, because 0 * inf is "
                "NaN."
            )
            return Origin(text, operand=name, rows=rows_of(zero))
    largest = max((gradient.abs().max().item() for gradient in incoming if gradient.numel()), default=0.0)
    seen = [f"`{name}` {_range(value, bad)}" for name, value in operands.items() if value.numel()]
    text = (
        "No saved operand is zero or non-finite there, so a value left the range of its dtype, or the op has "
        f"no finite derivative there: {', '.join([*seen, f'incoming gradient up to {largest:.3g}'])}; "
        f"{mask_label(bad)}."
    )
    return Origin(text, rows=rows_of(bad))


def rows_of(mask: Tensor) -> tuple[int, ...]:
    """Return the indices in the first dimension at which the mask is set."""
    if mask.dim() == 0:
        return ()
    return tuple(mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist())


def mask_label(mask: Tensor) -> str:
    """Return for example "(2 of 8 values, first at (3, 0), rows 3, 7)"."""
    rows = rows_of(mask)
    listed = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    tail = f", row{'s' if len(rows) > 1 else ''} {listed}" if rows else ""
    first = tuple(mask.nonzero()[0].tolist())
    return f"({int(mask.sum())} of {mask.numel()} values, first at {first}{tail})"


def _matching(special: Tensor, bad: Tensor) -> Tensor | None:
    """Return where `special` and `bad` overlap, if that accounts for all of `bad`, else None.

    None also where an op mixes indices, as a matrix product does.
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
