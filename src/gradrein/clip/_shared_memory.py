"""DTensors that wrap the memory of another gradient of the call, which counts and is scaled once.

Each rank decides for itself, as for a parameter without a gradient: of shards it then has none to add, and of copies
one rank with a gradient is enough. So ranks need not agree on it, and one that holds an empty shard does not know.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..distributed import Placement
from ..errors import UnsupportedGradientError
from ._shard_layouts import Place, ShardLayout


def repeated_dtensors(repeated: Mapping[int, int], layout_at: Callable[[int], ShardLayout | None]) -> dict[int, int]:
    """Return the DTensors in the memory of another gradient, each with the one that stays, by index.

    Args:
        repeated: The gradients in the memory of an earlier one, each with the first of them, by index.
        layout_at: Returns how a gradient lies, None for a plain tensor. That stays, since ranks do not exchange it.
    """
    together: dict[int, list[int]] = {}
    for i, first in repeated.items():
        together.setdefault(first, [first]).append(i)
    found: dict[int, int] = {}
    for members in together.values():
        kept = next((i for i in members if layout_at(i) is None), members[0])
        found.update((i, kept) for i in members if i != kept and layout_at(i) is not None)
    return found


def placed_again(
    grads: Sequence[Tensor | None],
    first: Mapping[int, int],
    patterns: Sequence[tuple[Placement, ...]],
    pattern_of: Sequence[int],
) -> list[int]:
    """Return the gradients that are listed before under other placements.

    Args:
        grads: The gradients.
        first: Where each is listed first, by its id.
        patterns: The placements of each pattern.
        pattern_of: The pattern of each.
    """
    listed = [(i, first[id(g)]) for i, g in enumerate(grads) if g is not None]
    return [i for i, k in listed if set(patterns[pattern_of[i]]) != set(patterns[pattern_of[k]])]


def refuse_other_layout(
    grad: Any, place: Place, other: Any, place_of_other: Place, patterns: Sequence[tuple[Placement, ...]]
) -> None:
    """Raise where two gradients in one memory stand for different things: shards and copies, or partial sums."""
    placed, placed_other = patterns[place[1]], patterns[place_of_other[1]]
    if set(placed) != set(placed_other) or _stands_for(grad, place[0]) != _stands_for(other, place_of_other[0]):
        raise UnsupportedGradientError(
            f"two gradients are in the same memory, one of shape {tuple(grad.shape)} {_placed(grad, placed)}, the "
            f"other of shape {tuple(other.shape)} {_placed(other, placed_other)}: what they come to over all ranks is "
            "not the same, so it is not clear how the memory counts. Pass one of the two, or give one of them memory "
            "of its own (`clone()`)."
        )


def _stands_for(grad: Any, layout: ShardLayout | None) -> Any:
    if layout is None:
        return frozenset()
    if layout.partial:
        return layout.mesh, grad.placements
    cuts = zip(layout.mesh.groups, layout.sharded, strict=True)
    return frozenset(group for group, shards in cuts if shards and group.group.size() > 1)


def _placed(grad: Any, placed: tuple[Placement, ...]) -> str:
    own = getattr(grad, "placements", None)
    found = "as a plain tensor" if own is None else f"with placements {own} on {grad.device_mesh}"
    kinds = " and ".join(type(each).__name__ for each in placed)
    return f"{found}, {kinds} by `placement`" if kinds else found
