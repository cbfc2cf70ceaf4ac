"""Base of policies with a memory: built once, before the loop. One that is built for every call never learns."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch

from .._distributed.fingerprints import state_fingerprint
from .._warn import warn
from ..errors import ArgumentError, ArgumentTypeError
from .base import GradientView

_Key = tuple[int, type]  # the first parameter a policy is for, and the class of the policy
_IN_A_ROW = 3  # two policies of one call each may be an experiment; three are a loop


@dataclass
class _Uses:
    """How a policy was used; it outlives the policy."""

    calls: dict[_Key, int] = field(default_factory=dict)
    saved: bool = False  # its state was saved or loaded: the state may live longer than the object


@dataclass
class _Last:
    """The last policy of a class that was used for a parameter."""

    policy: weakref.ref[Any]
    parameter: weakref.ref[Any]
    uses: _Uses
    in_a_row: int


_last: dict[_Key, _Last] = {}


class BuiltOnce:
    """Name the saved state after the class, and warn where the policy is built anew for each call."""

    _loaded: int | None = None  # a number for the state that was loaded

    @cached_property
    def _uses(self) -> _Uses:
        return _Uses()

    def _told(self, same_parameters: bool) -> dict[str, Any]:
        """Return what it was told since it was built, for ranks to compare: with the norms, this makes its state.

        Args:
            same_parameters: Whether all ranks hold the same parameters; a state for each differs otherwise.
        """
        return {} if self._loaded is None or not same_parameters else {"loaded": f"{self._loaded:016x}"}

    def check(self, grads: GradientView) -> None:
        """Warn if this policy is the third in a row that gets one call on the same parameters and is then discarded.

        The warning needs proof: its predecessors were garbage-collected after one call each, and nobody saved or
        loaded their state.
        """
        if torch.compiler.is_compiling() or not grads.parameters:
            return
        parameter = grads.parameters[0]
        key = (id(parameter), type(self))
        self._uses.calls[key] = self._uses.calls.get(key, 0) + 1
        if self._uses.calls[key] > 1 or self._uses.saved:
            _last.pop(key, None)
            return
        in_a_row = 1 + _discarded_after_one_call(key)
        forget = weakref.ref(parameter, lambda _: _last.pop(key, None))
        _last[key] = _Last(weakref.ref(self), forget, self._uses, in_a_row)
        if in_a_row >= _IN_A_ROW:
            name = type(self).__name__
            warn(
                f"{name} was built again for each of the last {in_a_row} calls on the same parameters, so it never "
                "adapts. Build it once, before the loop, and pass the same object to every call: "
                f"`policy = {name}(...)`."
            )

    def _saved(self, **state: Any) -> dict[str, Any]:
        self._uses.saved = True
        return {"policy": type(self).__name__, "settings": self._settings(), **state}

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
        self._uses.saved = True
        self._loaded = state_fingerprint(saved)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments it was built with: numbers and words. Of a policy among them, the class."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}
        plain = bool | int | float | str | None
        return {name: value if isinstance(value, plain) else type(value).__name__ for name, value in found.items()}


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


def _discarded_after_one_call(key: _Key) -> int:
    """Return how many policies in a row were used for one call and then garbage-collected."""
    last = _last.get(key)
    if last is None or last.policy() is not None or last.uses.saved or last.uses.calls.get(key) != 1:
        return 0
    return last.in_a_row
