"""What a policy remembers from step to step: rows of statistics by key, on the device the norms are on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ArgumentError

State: TypeAlias = dict[str, Tensor]
"""Statistics by name; the first dimension indexes the rows. `"seen"` counts the norms each row has learned from.

See Also:
    [`gradrein.policies.AdaptivePolicy`][]
"""


class StateRows:
    """One row per key. A new key starts from the initial row; a key that is absent for a step keeps its row."""

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        self._initial = {"seen": torch.zeros((), dtype=torch.float64), **initial}
        self._keys: list[str] = []
        self._rows = {name: t.new_empty((0, *t.shape)) for name, t in self._initial.items()}

    def read(self, keys: list[str], like: Tensor) -> State:
        """Return the rows of these keys, with the device and dtype of `like`."""
        new = [] if keys == self._keys else self._unknown(keys)
        for name, row in self._initial.items():
            rows = self._rows[name].to(like)
            fresh = row.to(like).expand(len(new), *row.shape)
            self._rows[name] = torch.cat([rows, fresh]) if new else rows
        self._keys = self._keys + new
        if keys == self._keys:
            return dict(self._rows)
        where = self._indices(keys, like)
        return {name: rows[where] for name, rows in self._rows.items()}

    def write(self, keys: list[str], state: State) -> None:
        """Store the rows of these keys, which have been read before."""
        if keys == self._keys:
            self._rows = state
            return
        where = self._indices(keys, state["seen"])
        self._rows = {name: rows.index_copy(0, where, state[name]) for name, rows in self._rows.items()}

    def _unknown(self, keys: list[str]) -> list[str]:
        known = set(self._keys)
        return [key for key in keys if key not in known]

    def _indices(self, keys: list[str], like: Tensor) -> Tensor:
        index = {key: i for i, key in enumerate(self._keys)}
        return torch.tensor([index[key] for key in keys]).to(like.device)

    def state_dict(self) -> dict[str, Any]:
        """Return keys and rows: strings and tensors only."""
        return {"keys": list(self._keys), "rows": {name: t.clone() for name, t in self._rows.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load atomically: validate every shape before assigning."""
        is_state = isinstance(saved, Mapping) and isinstance(saved.get("rows"), Mapping)
        keys, rows = (list(saved["keys"]), dict(saved["rows"])) if is_state and "keys" in saved else ([], {})
        for name, row in self._initial.items():
            expected = (len(keys), *row.shape)
            found = tuple(rows[name].shape) if isinstance(rows.get(name), Tensor) else None
            if found != expected:
                raise ArgumentError(
                    f"the saved {name!r} has shape {found}, this policy expects {expected}: it was saved by a policy "
                    "with other settings. Build the policy as it was when it was saved."
                )
        self._keys, self._rows = keys, {name: rows[name].clone() for name in self._initial}


def check_complete(keys: Iterable[str], found: Mapping[str, Tensor]) -> None:
    """Refuse a state that was read from a checkpoint only in part."""
    missing = sorted(set(keys) - set(found))
    if missing:
        raise ArgumentError(
            f"the state of {len(missing)} of {len(found) + len(missing)} parameters is missing, {missing[0]!r} among "
            "them. torch.distributed.checkpoint only fills in existing entries: clip once with the policy "
            "(dry_run=True is enough) before you load into its state_dict()."
        )


def accept_finite(old: State, new: Mapping[str, Tensor], good: Tensor) -> State:
    """Return the new state for rows where the norm was good and no finite statistic was lost, the old one elsewhere.

    A NaN, an infinite norm, or one so large that its square overflows leaves a row as it was, so that a bad step does
    not spoil the statistics.
    """
    for name, after in new.items():
        lost = torch.isfinite(old[name]) & torch.isfinite(after).logical_not()
        good = good & lost.flatten(1).any(1).logical_not() if lost.dim() > 1 else good & lost.logical_not()
    kept = {name: torch.where(good.reshape(-1, *[1] * (t.dim() - 1)), t, old[name]) for name, t in new.items()}
    return {**old, **kept, "seen": old["seen"] + good}
