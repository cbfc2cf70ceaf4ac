"""This rank's part of a weight or gradient, read without asking any other rank."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

__all__ = ["here", "is_spread", "piece", "readable", "speaks", "why_not"]


def is_spread(t: Any) -> bool:
    """Is it a DTensor, which may lie on several ranks? Who has one has imported it, so it is not imported here."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def here(t: Any) -> Tensor:
    """What this rank has of it: all of a plain tensor, the local part of a DTensor."""
    found = t.to_local() if is_spread(t) else t
    if type(found) is not Tensor and hasattr(found, "wait"):  # torch is still fetching it for the program
        found = found.wait()
    whole: Tensor = found
    return whole


def piece(t: Any) -> list[int] | None:
    """Which piece of how many this rank has; copies of a piece have its number. None of a plain tensor: all of it."""
    if not is_spread(t):
        return None
    index, count = 0, 1
    coordinate = t.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in its mesh, and has nothing of it
        return [0, 0]
    for at, size, kind in zip(coordinate, t.device_mesh.shape, t.placements, strict=True):
        if not kind.is_replicate():
            index, count = index * size + at, count * size
    return [index, count]


def speaks(t: Any, rank: int) -> bool:
    """Is this rank the first that has this piece? Sums over ranks count each piece once: where this is so."""
    if not is_spread(t):
        return rank == 0
    coordinate = t.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(at == 0 for at, kind in zip(coordinate, t.placements, strict=True) if kind.is_replicate())


def why_not(parameter: Any, grad: Any) -> str | None:
    """Why a gradient cannot be measured by its pieces, or None where it can."""
    laid, wanted = ((t.device_mesh, t.placements) if is_spread(t) else None for t in (grad, parameter))
    if laid == wanted:
        return None
    kinds = [str(layout[1]) if layout else "a plain tensor" for layout in (laid, wanted)]
    layouts = f"it is laid out as {kinds[0]} and its parameter as {kinds[1]}"
    return f"{layouts}, so ranks would have to communicate to know its norm"


def readable(t: Any) -> Tensor | None:
    """A number that a rank can read by itself; None of a DTensor that the ranks have not yet added up."""
    if not is_spread(t):
        return t if isinstance(t, Tensor) else None
    return here(t) if all(kind.is_replicate() for kind in t.placements) else None
