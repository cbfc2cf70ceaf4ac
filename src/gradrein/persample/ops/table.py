"""The table of ops: one entry for each, under every name that torch has for it on any device."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..._torch.signature import kind_of
from ..layout.owners import Owners
from ..representations.base import SampleGrads
from .context import RuleContext

if TYPE_CHECKING:
    from .step import Step

OwnerRule: TypeAlias = Callable[["Step"], Owners]
GradientRule: TypeAlias = Callable[[RuleContext], SampleGrads | Tensor]


@dataclass(frozen=True)
class OpEntry:
    """What per-sample gradients have to know of an op.

    Attributes:
        owners: who may own the elements of one of its inputs, given who owns its outputs. Every multiplier counts as
            non-zero: a mask, a gate or a coefficient may be zero today and not tomorrow. It may claim more mixing than
            there is, never less than some values would cause.
        keeps: which inputs the op keeps that may be data, by position, with torch's name for each.
        ids: torch's name for the ids, of an op that looks up rows or cells of its input. These are no input that could
            have a gradient: `owners` is asked about them under the position `IDS`.
        by_index: the same as `owners`, of an op that only moves elements to where a saved index or mask says. It
            follows these, so that what is found holds for one graph alone.
        all_outputs: whether `owners` and `rule` look at more than the first output.
        rule: the per-sample gradients of one use of a parameter by the op; without one its backward is run once for
            each sample.
        runs_op: whether the rule may run the op. Inside the engine an op leaves out what it was not asked for, so such
            a rule waits until the engine is done; one that reads saved tensors only runs at once.
    """

    owners: OwnerRule
    keeps: Mapping[int, str] = field(default_factory=dict)
    ids: str = ""
    by_index: OwnerRule | None = None
    all_outputs: bool = False
    rule: GradientRule | None = None
    runs_op: bool = False


OP_TABLE: dict[str, OpEntry] = {}
# The position under which the owners of ids are asked for.
IDS = -1


def add_op(*names: str, entry: OpEntry) -> None:
    """Add the entry of an op, by torch's names for it without ``Backward`` and its number."""
    for name in names:
        assert name not in OP_TABLE, f"{name} has an entry already"
        OP_TABLE[name] = entry


def entry_of(node: Node) -> OpEntry | None:
    """Return the entry of an op; None if it has none, and so sends every output to every input."""
    return OP_TABLE.get(base_name(node))


def moves_by_index(node: Node) -> bool:
    """Return whether an op moves elements by a saved index or mask, or by their places in memory."""
    entry = entry_of(node)
    return entry is not None and entry.by_index is not None


def base_name(node: Node) -> str:
    """Return torch's name for the op, without ``Backward`` and its number; that of a Python Function with both."""
    name = _NAMES.get(type(node))
    if name is not None:
        return name
    name, kind = graph.op(node), kind_of(node)
    if kind.is_custom:
        return name
    if not kind.is_generic:
        _NAMES[type(node)] = without_suffix(name)
    return without_suffix(name)


def without_suffix(name: str) -> str:
    """Return the name of a node without ``Backward`` and its number."""
    return _SUFFIX.sub("", name)


_SUFFIX = re.compile(r"Backwards?\d*(_copy)?$")
# By the type of the node, where torch has one for the op.
_NAMES: dict[type, str] = {}
