"""Norms by layer, for trackers: of the gradient, the weight and the update of chosen parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch.dtensor import is_dtensor
from ..say import say

Layers: TypeAlias = str | Mapping[str, str]
"""A name pattern: each parameter that matches. Or patterns by label: under each, all that match together.

See Also:
    [`gradrein.Monitor`][]
"""


def choose(layers: Layers, names: Iterable[str]) -> dict[str, list[int]]:
    """Return the indices of the parameters behind each label."""
    listed = list(enumerate(names))
    if isinstance(layers, str):
        return {name: [i] for i, name in listed if fnmatchcase(name, layers)}
    return {label: [i for i, name in listed if fnmatchcase(name, pattern)] for label, pattern in layers.items()}


class LayerNorms:
    """Adds up squares by label, over the ranks that hold shards.

    Args:
        layers: Which parameters, under which labels.
        names: The names of the optimizer's parameters.
        parameters: The parameters.
    """

    def __init__(self, layers: Layers, names: Sequence[str], parameters: Sequence[Any]) -> None:
        chosen = choose(layers, names)
        self._labels = {label: at for label, at in chosen.items() if at}
        missing = [label for label in chosen if label not in self._labels] if chosen else [layers]
        if missing:
            say(f"gradrein: norms={missing} matches none of the optimizer's parameters: {', '.join(names[:8])}")
        self._sharded: dict[tuple[Any, ...], list[int]] = {}
        for i in sorted({i for at in self._labels.values() for i in at}):
            if groups := _shard_groups(parameters[i]):
                self._sharded.setdefault(groups, []).append(i)

    def sum_over_ranks(self, norms: list[Tensor]) -> Tensor:
        """Return the squares of whole parameters, given rows with a norm of what this rank holds of each."""
        squares = torch.stack(norms).square()
        for groups, at in self._sharded.items():
            index = torch.tensor(at, device=squares.device)
            part = squares.index_select(1, index)
            for group in groups:
                dist.all_reduce(part, group=group)
            squares.index_copy_(1, index, part)
        return squares

    def entries(self, squares: Sequence[float]) -> dict[str, float]:
        """Return the numbers for a tracker, given what `sum_over_ranks` returned: gradient, weight, move, its base."""
        count = len(squares) // 4
        by_parameter = [*zip(*(squares[k * count : (k + 1) * count] for k in range(4)), strict=True)]
        numbers: dict[str, float] = {}
        for label, at in self._labels.items():
            gradient, weight, move, base = map(math.sqrt, map(sum, zip(*[by_parameter[i] for i in at], strict=True)))
            numbers[f"norm/{label}"], numbers[f"weight/{label}"] = gradient, weight
            if base > 0:
                numbers[f"update/{label}"] = move / base
        return numbers


def _shard_groups(parameter: Any) -> tuple[Any, ...]:
    """Return the process groups whose ranks hold other parts of it."""
    if not is_dtensor(parameter) or parameter.device_mesh.get_coordinate() is None:
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(k) for k, placed in enumerate(parameter.placements) if not placed.is_replicate())
