"""DTensors that wrap the memory of another gradient of the call, which counts and is scaled once.

Each rank decides for itself, as for a parameter without a gradient: of shards it then has none to add, and of copies
one rank with a gradient is enough. So ranks need not agree on it, and one that holds an empty shard does not know.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._torch.storage import repeats
from ..errors import UnsupportedGradientError
from ._shard_layouts import Place, ShardLayout


def repeated_dtensors(local: Sequence[Tensor], layout_at: Callable[[int], ShardLayout | None]) -> dict[int, int]:
    """Return the DTensors in the memory of another gradient, each with the one that stays, by index.

    Args:
        local: What this rank holds of each gradient.
        layout_at: Returns how a gradient lies, None for a plain tensor. That stays, since ranks do not exchange it.
    """
    together: dict[int, list[int]] = {}
    for i, first in repeats(local).items():
        together.setdefault(first, [first]).append(i)
    found: dict[int, int] = {}
    for members in together.values():
        kept = next((i for i in members if layout_at(i) is None), members[0])
        found.update((i, kept) for i in members if i != kept and layout_at(i) is not None)
    return found


def refuse_other_layout(grad: Any, place: Place, other: Any, place_of_other: Place) -> None:
    """Raise where two gradients in one memory stand for different things: shards and copies, or partial sums."""
    if _stands_for(grad, place) != _stands_for(other, place_of_other):
        raise UnsupportedGradientError(
            f"two gradients are in the same memory, one of shape {tuple(grad.shape)} {_placed(grad)}, the other of "
            f"shape {tuple(other.shape)} {_placed(other)}: what they come to over all ranks is not the same, so it is "
            "not clear how the memory counts. Pass one of the two, or give one of them memory of its own (`clone()`)."
        )


def _stands_for(grad: Any, place: Place) -> tuple[Any, int]:
    layout, pattern = place
    if layout is None:
        return frozenset(), pattern
    if layout.partial:
        return (layout.mesh, grad.placements), pattern
    cuts = zip(layout.mesh.groups, layout.sharded, strict=True)
    return frozenset(group for group, shards in cuts if shards and group.group.size() > 1), pattern


def _placed(grad: Any) -> str:
    placements = getattr(grad, "placements", None)
    return "as a plain tensor" if placements is None else f"with placements {placements} on {grad.device_mesh}"
