"""A policy by its name: the one place where `"auto"` becomes a policy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._warn import warn
from ..errors import ArgumentError
from .base import Policy
from .element_spike import ByElementSpike
from .median import ByMedian
from .overshoot import ByOvershoot
from .quantile import ByQuantile
from .running_norm import ByRunningNorm
from .skip_spikes import SkipSpikes
from .zscore import ByZScore

PolicyOrName: TypeAlias = Policy | str
"""A policy, or the name of one that needs no arguments: `"auto"`, `"median"`, ..."""
Rules: TypeAlias = PolicyOrName | Mapping[str, PolicyOrName | None]
"""One for all, or one for each name pattern."""

_NAMES: dict[str, Callable[[], Policy]] = {
    "auto": ByOvershoot,  # held every kind of run in benchmarks/steady.py
    "overshoot": ByOvershoot,
    "zscore": ByZScore,
    "quantile": ByQuantile,
    "median": ByMedian,
    "running_norm": ByRunningNorm,
    "element_spike": ByElementSpike,
    "skip_spikes": SkipSpikes,
}
_SETS = 4  # of parameters that begin with the same one: more are a list that is made anew for each call
_Key = tuple[str, str, tuple[int, ...]]  # name, pattern, and the parameters it is for
_kept: dict[_Key, tuple[Policy, list[weakref.ref[Tensor]]]] = {}


def build(name: str) -> Policy:
    """Return a new policy by its name.

    Raises:
        ArgumentError: (a ValueError) No policy has this name.
    """
    if name not in _NAMES:
        raise ArgumentError(
            f"no policy is called {name!r}. Pass one of {', '.join(_NAMES)}, or a policy such as gradrein.by_norm(1.0)."
        )
    return _NAMES[name]()


def build_all(rules: Rules) -> Any:
    """Return the rules with a new policy in place of every name."""
    return _replace(rules, lambda name, _: build(name))


def kept_for(rules: Rules, parameters: Sequence[Tensor]) -> Any:
    """Return the rules with the policy of these very parameters in place of every name.

    A policy that learns has to be the same object in every call. It is kept as long as all of its parameters live, so
    no other parameter can have the identity of one of them meanwhile.
    """
    return _replace(rules, lambda name, pattern: _keep(name, pattern, parameters))


def _replace(rules: Any, policy_of: Callable[[str, str], Policy]) -> Any:
    if isinstance(rules, str):
        return policy_of(rules, "*")
    if isinstance(rules, Mapping) and any(isinstance(rule, str) for rule in rules.values()):
        return {key: policy_of(rule, key) if isinstance(rule, str) else rule for key, rule in rules.items()}
    return rules


def _keep(name: str, pattern: str, parameters: Sequence[Tensor]) -> Policy:
    if torch.compiler.is_compiling():
        raise ArgumentError(
            f"inside torch.compile a policy cannot be called by its name {name!r}. Build it once, before the loop, "
            "with its class in gradrein.policies, and pass that object."
        )
    key = (name, pattern, tuple(map(id, parameters)))
    if key not in _kept:
        policy = build(name)
        _make_room(key)
        _kept[key] = policy, [weakref.ref(p, lambda _: _kept.pop(key, None)) for p in parameters]
    return _kept[key][0]


def _make_room(key: _Key) -> None:
    """Warn where the set of parameters changes from call to call, and forget the oldest of many."""
    alike = [held for held in list(_kept) if held[:2] == key[:2] and held[2][:1] == key[2][:1]]
    if len(alike) >= _SETS:
        warn(
            f"{key[0]!r} was called for more than {_SETS} sets of parameters that begin with the same one. Each set "
            "has its own policy, and the state of the oldest is discarded. Pass the module or the optimizer, whose "
            "parameters stay the same, or build the policy once, before the loop."
        )
        _kept.pop(alike[0], None)
