"""What a policy remembers from step to step: rows of statistics by key, on the device the norms are on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import ArgumentError

__all__ = ["Memory", "State", "check_kind", "learned"]

State: TypeAlias = dict[str, Tensor]
"""Statistics by name; the first dimension numbers the rows. `"seen"` counts what each row has learned from."""


class Memory:
    """One row for each key. A key that is new starts from the blank row; one that is absent for a step is kept."""

    def __init__(self, blank: Mapping[str, Tensor]) -> None:
        self._blank = {"seen": torch.zeros((), dtype=torch.float64), **blank}
        self._keys: list[str] = []
        self._rows = {name: t.new_empty((0, *t.shape)) for name, t in self._blank.items()}

    def recall(self, keys: list[str], like: Tensor) -> State:
        """The rows of these keys, with the device and type of `like`."""
        known = set(self._keys)
        new = [key for key in keys if key not in known]
        for name, row in self._blank.items():
            rows = self._rows[name].to(like)
            fresh = row.to(like).expand(len(new), *row.shape)
            self._rows[name] = torch.cat([rows, fresh]) if new else rows
        self._keys = self._keys + new
        if keys == self._keys:
            return dict(self._rows)
        where = self._where(keys, like)
        return {name: rows[where] for name, rows in self._rows.items()}

    def keep(self, keys: list[str], state: State) -> None:
        """Remember the rows of these keys, which have been recalled."""
        if keys == self._keys:
            self._rows = state
            return
        where = self._where(keys, state["seen"])
        self._rows = {name: rows.index_copy(0, where, state[name]) for name, rows in self._rows.items()}

    def _where(self, keys: list[str], like: Tensor) -> Tensor:
        place = {key: i for i, key in enumerate(self._keys)}
        return torch.tensor([place[key] for key in keys]).to(like.device)

    def state_dict(self) -> dict[str, Any]:
        """Keys and rows: strings and tensors only."""
        return {"keys": list(self._keys), "rows": {name: t.clone() for name, t in self._rows.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the rows of `state_dict`, or refuse them whole."""
        keys, rows = list(saved.get("keys", ())), dict(saved.get("rows", {}))
        for name, row in self._blank.items():
            expected = (len(keys), *row.shape)
            found = tuple(rows[name].shape) if name in rows else None
            if found != expected:
                raise ArgumentError(
                    f"the saved {name!r} has shape {found}, this policy expects {expected}: it was saved by a policy "
                    "with other settings. Build the policy as it was when it was saved."
                )
        self._keys, self._rows = keys, {name: rows[name].clone() for name in self._blank}


def check_kind(saved: Mapping[str, Any], kind: str) -> None:
    """Refuse the state of another kind of policy."""
    found = saved.get("policy")
    if found != kind:
        raise ArgumentError(f"this is the state of {found!r}, and it was to be loaded into {kind!r}.")


def learned(old: State, new: Mapping[str, Tensor], good: Tensor) -> State:
    """The next state: the new one for rows where the observation was good, and nothing finite was lost by it.

    This is what keeps one bad step from spoiling statistics for ever: a NaN, an infinite value, or a value so large
    that its square overflows leaves the row as it was.
    """
    for name, after in new.items():
        lost = torch.isfinite(old[name]) & torch.isfinite(after).logical_not()
        good = good & lost.flatten(1).any(1).logical_not() if lost.dim() > 1 else good & lost.logical_not()
    kept = {name: torch.where(good.reshape(-1, *[1] * (t.dim() - 1)), t, old[name]) for name, t in new.items()}
    return {**old, **kept, "seen": old["seen"] + good}
