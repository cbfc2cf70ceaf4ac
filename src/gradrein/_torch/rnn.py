"""What the fused LSTM layer of the CPU keeps for its backward pass: its gates, among other things.

The layer hands out one block of bytes that is oneDNN's own. How it is laid out follows from the sizes and settings of
a layer, and is found once for each of these: the layer is run on numbers that are known, and its block must hold every
gate of them. A block laid out otherwise, in this version of torch or on this machine, is not read.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Gates from the input, the hidden states before each step, two weights and two biases: (time, column, gate, h).
Gates = Callable[..., Tensor]

SETTINGS = (
    *("reverse", "batch_sizes", "mode", "hidden_size", "num_layers"),
    *("has_biases", "bidirectional", "batch_first", "train"),
)
# Rows of gates are as far apart as they are long, or some numbers further.
_LONGEST_GAP = 64
# To find out about a larger block, in bytes, takes more memory than reading it is worth.
_LARGEST_BLOCK = 1 << 28


def kept_gates(block: Tensor, shapes: tuple[torch.Size, ...], settings: tuple[Any, ...], gates: Gates) -> Tensor | None:
    """Return the gates of a layer as it computed them, (time, column, gate, h) in the order of steps, to be read only.

    Args:
        block: what the layer keeps.
        shapes: those of the input, the two weights and the two biases.
        settings: those of the layer, in the order of `SETTINGS`.
        gates: computes the gates.

    Returns:
        The gates; None where it is not known where they are.
    """
    if block.dtype != torch.uint8 or block.device.type != "cpu" or not 0 < block.numel() <= _LARGEST_BLOCK:
        return None
    if not block.is_contiguous() or block.storage_offset() % 4 or 0 in shapes[0][:2]:
        return None
    row = _length_of_row(shapes, settings, block.numel(), torch.get_num_threads(), gates)
    return None if row is None else _view(block, shapes, row)


@lru_cache(64)
def _length_of_row(
    shapes: tuple[torch.Size, ...],
    settings: tuple[Any, ...],
    size: int,
    threads: int,  # noqa: ARG001
    gates: Gates,
) -> int | None:
    """Return how far apart rows of gates are in a block of such a layer; None if they are not there."""
    columns, width = shapes[0][1], shapes[2][1]
    x, *weights = (_some_numbers(shape) for shape in shapes)
    weights = [weight.div_(sum(shapes[1]) ** 0.5) for weight in weights]  # no gate is to be all open or closed
    first = _some_numbers((columns, width))
    with torch.enable_grad():  # without it nothing is kept
        out, _, _, block = torch.ops.aten.mkldnn_rnn_layer(x, *weights, first, first, *settings)
    if block is None or block.numel() != size:
        return None
    if settings[SETTINGS.index("reverse")]:
        x, out = x.flip(0), out.flip(0)
    expected = gates(x, torch.cat([first[None], out[:-1]]), *weights)
    for row in range(4 * width, 4 * width + _LONGEST_GAP + 1):
        found = _view(block, shapes, row)
        if found is not None and _agree(found[-1], expected[-1]) and all(map(_agree, found, expected)):
            return row
    return None


def _agree(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def _view(block: Tensor, shapes: tuple[torch.Size, ...], row: int) -> Tensor | None:
    time, columns, width = *shapes[0][:2], shapes[2][1]
    numbers = block.view(torch.float32)
    if time * columns * row > numbers.numel():
        return None
    return numbers.as_strided((time, columns, 4, width), (columns * row, row, width, 1))


def _some_numbers(shape: tuple[int, ...]) -> Tensor:
    """Return numbers between -1 and 1, all of them different enough, without drawing from torch's generator."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).mul_(2.399963).sin_().float().view(shape)
