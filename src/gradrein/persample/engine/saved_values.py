"""What nodes saved of their inputs and outputs."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..._torch.signature import packed_nodes
from .errors import raise_explained
from .runs import run_inside_engine


def saved(node: Node, name: str) -> Any:
    """Return one value the node saved, or say why it cannot be had."""
    try:
        return getattr(node, f"_saved_{name}")
    except RuntimeError as error:
        raise_explained(f"what `{graph.op(node)}` saved as `{name}`", error)


def saved_number(node: Node, name: str) -> int:
    """Return an integer the node saved: torch hands out those below zero as unsigned ones."""
    number: int = saved(node, name)
    return number - 2**64 if number >= 2**63 else number


def is_packed(node: Node) -> bool:
    """Return whether saved-tensor hooks, such as those of a checkpoint, stand before what the node saved."""
    return bool(packed_nodes([node]))


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the tensors the node saved of its inputs and still holds."""
    read = partial(graph.saved, node, unpack=True)
    found = run_inside_engine(read) if is_packed(node) else read()
    entries = [entry for entry in found if not entry.name.startswith("result")]
    return [entry.value for entry in entries if isinstance(entry.value, Tensor)]
