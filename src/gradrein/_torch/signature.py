"""What there is of a recorded graph besides the values of its tensors."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .nodes import walk
from .saved import is_packed


class NodeKind(NamedTuple):
    """What the nodes of one type have in common.

    Attributes:
        tensors: the names of torch's handles of the tensors that they save.
        values: the names of everything else that they save.
        is_leaf: whether they accumulate into a leaf's ``.grad``.
        is_custom: whether they were made by a Python `torch.autograd.Function`.
        is_generic: whether ops that torch has no type for share this one, and are told apart by name.
    """

    tensors: tuple[str, ...]
    values: tuple[str, ...]
    is_leaf: bool
    is_custom: bool
    is_generic: bool


class Scan(NamedTuple):
    """A recorded graph, read in one pass.

    Attributes:
        nodes: every node, each once, in an order that depends on the structure alone.
        leaves: the leaf tensors, by the number of their node.
        custom: the nodes that were made by Python Functions.
        signature: ops, edges, shapes, dtypes, sizes and flags. Two graphs with the same differ in the values of
            their tensors only, and in what Python Functions keep.
    """

    nodes: list[Node]
    leaves: dict[int, Tensor]
    custom: list[Node]
    signature: tuple[Any, ...]


def scan(root: Node | None) -> Scan:
    """Read the graph behind a node; None has none."""
    edges = walk([] if root is None else [root])
    number = {node: i for i, node in enumerate(edges)}
    leaves: dict[int, Tensor] = {}
    custom: list[Node] = []
    facts: list[Any] = []
    for here, (node, below) in enumerate(edges.items()):
        kind = type(node)
        about = _KINDS.get(kind) or kind_of(node)
        facts.append(kind)
        if about.is_leaf:
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            leaves[here] = leaf
            facts += (leaf.shape, leaf.dtype)
            continue
        if about.is_custom:
            custom.append(node)
        elif about.is_generic:
            facts.append(node.name())
        facts.append(len(below))
        for used, output_nr in below:
            facts += (None,) if used is None else (number[used], output_nr)
        outputs = node._input_metadata
        facts.append(len(outputs))
        for out in outputs:
            facts += (tuple(out.shape), out.dtype)
        for name in about.values:
            facts.append(getattr(node, name))
    return Scan(list(edges), leaves, custom, _hashable(facts))


# Types of Python Functions are not kept: a program may make any number of them.
_KINDS: dict[type, NodeKind] = {}


def kind_of(node: Node) -> NodeKind:
    """Return what all nodes of this one's type have in common."""
    kind = type(node)
    known = _KINDS.get(kind)
    if known is None:
        names = dir(kind)
        raw = tuple(name for name in names if name.startswith("_raw_saved_"))
        plain = tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in raw)
        is_custom = isinstance(node, torch._C._FunctionBase)
        name = kind.__name__
        known = NodeKind(raw, plain, name == "AccumulateGrad" and not is_custom, is_custom, name == "CppFunction")
        if not is_custom:
            _KINDS[kind] = known
    return known


def packed_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes with saved-tensor hooks, such as those of a checkpoint, before something that they saved."""
    packed = set()
    for node in nodes:
        for name in kind_of(node).tensors:
            if is_packed(node, name[len("_raw_saved_") :], getattr(node, name)):
                packed.add(node)
                break
    return packed


def _hashable(facts: list[Any]) -> tuple[Any, ...]:
    signature = tuple(facts)
    try:
        hash(signature)
    except TypeError:  # lists among what nodes saved
        return tuple(_hashable(list(one)) if isinstance(one, list | tuple) else one for one in signature)
    return signature
