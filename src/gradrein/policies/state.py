"""What a policy remembers from step to step, and how that is saved."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..distributed import state_fingerprint
from ..errors import ArgumentError, ArgumentTypeError
from .elements import ElementMemory

State: TypeAlias = dict[str, Tensor]
"""Statistics by name; the first dimension indexes the rows. `"seen"` counts the norms each row has learned from.

See Also:
    [`gradrein.policies.AdaptivePolicy`][]
"""


class StateRows:
    """One row per key. A new key starts from the initial row; a key that is absent for a step keeps its row."""

    def __init__(self, initial: Mapping[str, Tensor] | None = None) -> None:
        self._initial = {"seen": torch.zeros((), dtype=torch.float64), **(initial or {})}
        self._keys: list[str] = []
        self._rows = {name: t.new_empty((0, *t.shape)) for name, t in self._initial.items()}

    def read(self, keys: list[str], like: Tensor) -> State:
        """Return the rows of these keys, with the device and dtype of `like`."""
        new = [] if keys == self._keys else self._unknown(keys)
        self._rows = {name: rows.to(like) for name, rows in self._rows.items()}
        if new:  # only then anything is copied to the device
            for name, row in self._initial.items():
                self._rows[name] = torch.cat([self._rows[name], row.to(like).expand(len(new), *row.shape)])
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
        return torch.tensor([index[key] for key in keys], device=like.device)

    def state_dict(self) -> dict[str, Any]:
        """Return keys and rows: strings and tensors only."""
        return {"keys": list(self._keys), **{name: t.clone() for name, t in self._rows.items()}}

    def loaded(self, saved: Any) -> StateRows:
        """Return such rows with a saved state.

        Raises:
            ArgumentError: (a ValueError) It does not fit.
        """
        rows = saved if isinstance(saved, Mapping) else {}
        loaded = StateRows(self._initial)
        loaded._keys = list(rows.get("keys", []))
        for name, row in self._initial.items():
            shape, expected = getattr(rows.get(name), "shape", None), (len(loaded._keys), *row.shape)
            if shape != expected:
                raise ArgumentError(
                    f"the saved {name!r} has shape {shape and tuple(shape)}, this policy expects {expected}: it is "
                    "damaged, or was saved by a policy with other settings. Build the policy as it was when it was "
                    "saved, and load what `state_dict()` returned."
                )
            loaded._rows[name] = rows[name].clone()
        return loaded


def finite(norm: Tensor) -> Tensor:
    """Return norms with NaN in place of infinity. Those above zero are good to learn from."""
    return norm.nan_to_num(math.nan, math.nan)


def accepted(old: State, new: Mapping[str, Tensor], good: Tensor, *, guarded: bool) -> State:
    """Return the new state for rows where the norm was good, the old one elsewhere: a bad step spoils no statistics.

    Args:
        old: The state before.
        new: The state after.
        good: Which rows have a good norm.
        guarded: Keep the old state also where a finite statistic was lost, as to a norm whose square overflows.
    """
    for name, after in new.items() if guarded else ():
        lost = (old[name].abs() < math.inf) > (after.abs() < math.inf)
        good = good > (lost.flatten(1).any(1) if lost.dim() > 1 else lost)
    kept = {name: torch.where(good.reshape(-1, *[1] * (t.dim() - 1)), t, old[name]) for name, t in new.items()}
    return {**old, **kept, "seen": old["seen"] + good}


class LearningPolicy(ABC):
    """Base of policies with a memory: what is saved, what may be loaded, and what ranks compare."""

    _loaded: int | None = None  # a number for the state that was loaded

    @abstractmethod
    def _new_memory(self) -> dict[str, StateRows | ElementMemory]:
        """Return an empty memory, by the names under which it is saved."""

    @cached_property
    def _memory(self) -> dict[str, Any]:
        with torch.device("cpu"):  # whatever the default device is
            return self._new_memory()

    def compared_between_ranks(self, same_parameters: bool) -> dict[str, Any]:
        """Return what was loaded since it was built, for ranks to compare: with the norms, this makes its state.

        Args:
            same_parameters: Whether all ranks hold the same parameters; a state for each differs otherwise.
        """
        return {} if self._loaded is None or not same_parameters else {"loaded": f"{self._loaded:016x}"}

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Load it with `torch.load(..., weights_only=True)`."""
        memory = {name: memory.state_dict() for name, memory in self._memory.items()}
        return {"policy": type(self).__name__, "settings": self._settings(), **memory}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state is from another policy, or from one with other settings.
        """
        self._check_saved(saved)
        # Nothing is assigned before all of it is accepted.
        self._memory = {name: memory.loaded(saved.get(name)) for name, memory in self._memory.items()}
        self._loaded = state_fingerprint(saved)

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuse what is no state, and the state of another class of policy or of other settings."""
        name = type(self).__name__
        check_is_state(saved, name)
        if saved.get("policy") != name:
            raise ArgumentError(
                f"this is the state of {saved.get('policy')!r}, and cannot be loaded into {name!r}. Load what "
                f"`state_dict()` of a {name} returned."
            )
        was, now = saved.get("settings"), self._settings()
        if was != now:
            raise ArgumentError(
                f"this is the state of a {name} with other settings: saved with {_difference(was, now)}; this one has "
                f"{_difference(now, was)}. Build the policy as it was when it was saved."
            )

    def _settings(self) -> dict[str, Any]:
        """Return the arguments it was built with: numbers and words. Of a policy among them, the class."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]  # it is a dataclass
        plain = bool | int | float | str | None
        return {name: value if isinstance(value, plain) else type(value).__name__ for name, value in settings.items()}


def check_is_state(saved: Any, name: str) -> None:
    """Refuse what is not a mapping."""
    if not isinstance(saved, Mapping):
        raise ArgumentTypeError(
            f"a state of {name} is the dict that `state_dict()` returned; found {type(saved).__name__}: {saved!r:.80}."
        )


def _difference(settings: Any, other: Any) -> str:
    """Describe the settings that are not those of another policy."""
    if not isinstance(settings, Mapping) or not isinstance(other, Mapping):
        return str(settings)
    return ", ".join(f"{k}={v!r}" for k, v in settings.items() if k not in other or other[k] != v) or "no others"
