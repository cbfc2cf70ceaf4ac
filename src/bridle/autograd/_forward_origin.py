"""Which op of the forward pass made the first non-finite value, as far as the graph still shows it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from ._operand import bad_places, describe, rows_of, saved_tensors

# Ops that save what they were given but not what they made: computed again to look at it.
_AGAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "LogBackward0": torch.log,
    "Log2Backward0": torch.log2,
    "Log10Backward0": torch.log10,
    "Log1PBackward0": torch.log1p,
    "AcosBackward0": torch.acos,
    "AsinBackward0": torch.asin,
    "AcoshBackward0": torch.acosh,
    "AtanhBackward0": torch.atanh,
    "LgammaBackward0": torch.lgamma,
    "SinhBackward0": torch.sinh,
    "CoshBackward0": torch.cosh,
    "Expm1Backward0": torch.expm1,
    "ErfinvBackward0": torch.erfinv,
}

# Which input of its op a saved value is, where the name says so for every op that uses it.
_POSITION = {"self": 0, "input": 0, "other": 1, "weight": 1, "mat1": 1, "batch1": 1, "mat2": 2, "batch2": 2}
_TWO_INPUTS = {"MmBackward0": 1, "BmmBackward0": 1}


class ForwardOrigin(NamedTuple):
    """What was found; see `NonFiniteGradientError` for the attributes."""

    text: str
    node: str | None = None
    module: str | None = None
    operand: str | None = None
    rows: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return everything but the text."""
        return {"node": self.node, "module": self.module, "operand": self.operand, "rows": self.rows}


def forward_origin(read: graph.Graph, names: graph.Names, places: dict[Node, graph.Place]) -> ForwardOrigin:
    """Walk the graph in the order of the forward pass and stop at the first non-finite value."""
    for leaf in read.leaves:
        bad = bad_places(leaf)
        if bad.any():
            name = names.of(leaf) or graph.variable_name(leaf) or "a leaf"
            text = f"{name} {describe(bad)} already held NaN or infinity when the forward pass began."
            return ForwardOrigin(text, None, names.module_of(leaf), name, rows_of(bad))
    for masks_count in (False, True):  # minus infinity is how masks are written: believed guilty last
        for node in reversed(read.nodes):
            operands = saved_tensors(node)
            found = _operand_bad(node, operands, places, masks_count) or _result_bad(node, operands, places)
            if found is not None:
                return found
    return ForwardOrigin(
        "No value that the graph has saved is NaN or infinite, so the op that made it cannot be told: it is "
        "one that saves nothing, such as a sum, or the value came in with data. Check the inputs with "
        "torch.isfinite."
    )


def _operand_bad(
    node: Node, operands: dict[str, Tensor], places: dict[Node, graph.Place], masks_count: bool
) -> ForwardOrigin | None:
    for name, value in operands.items():
        bad = bad_places(value) if masks_count else bad_places(value) & ~value.isneginf()
        if _is_result(name) or not bad.any():
            continue
        told = f"Operand `{name}` of {_tell(node, places)} {describe(bad)} is NaN or infinite"
        producer = _producer(node, name)
        if producer is None:
            return ForwardOrigin(
                f"{told}. It came in with data, or from an op that was not recorded: check the inputs.",
                graph.op(node),
                _module(node, places),
                name,
                rows_of(bad),
            )
        return ForwardOrigin(
            f"{told}. It was made by {_tell(producer, places)}, or by an op before that which saved nothing.",
            graph.op(producer),
            _module(producer, places),
            name,
            rows_of(bad),
        )
    return None


def _result_bad(node: Node, operands: dict[str, Tensor], places: dict[Node, graph.Place]) -> ForwardOrigin | None:
    given = {name: value for name, value in operands.items() if not _is_result(name)}
    for name, made in (*operands.items(), *_computed_again(node, operands)):
        if name in given:
            continue
        bad = bad_places(made)
        if bad.any():
            cause = next(iter(given), None)
            ranges = ", ".join(
                f"`{n}` from {v.min().item():.3g} to {v.max().item():.3g}" for n, v in given.items() if v.numel()
            )
            text = f"Origin: {_tell(node, places)} made NaN or infinity {describe(bad)}" + (
                f" out of {ranges}." if ranges else "."
            )
            return ForwardOrigin(text, graph.op(node), _module(node, places), cause, rows_of(bad))
    return None


def _computed_again(node: Node, operands: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    op = graph.op(node)
    if op in _AGAIN and "self" in operands:
        return [("computed again", _AGAIN[op](operands["self"]))]
    if op == "PowBackward0" and "self" in operands:
        return [("computed again", operands["self"] ** node._saved_exponent)]  # type: ignore[attr-defined]
    if op == "DivBackward0" and "other" in operands:  # whatever is divided by zero is not finite
        return [("computed again", operands.get("self", torch.ones(())) / operands["other"])]
    if op == "MulBackward0" and operands.keys() >= {"self", "other"}:
        return [("computed again", operands["self"] * operands["other"])]
    return []


def _is_result(name: str) -> bool:
    return name.startswith(("result", "output"))


def _producer(node: Node, operand: str) -> Node | None:
    position = _POSITION.get(operand)
    if operand in ("mat2", "batch2"):
        position = _TWO_INPUTS.get(graph.op(node), 2)
    if position is None or position >= len(node.next_functions):
        return None
    return node.next_functions[position][0]


def _tell(node: Node, places: dict[Node, graph.Place]) -> str:
    return graph.op(node) + (f" {places[node]}" if node in places else "")


def _module(node: Node, places: dict[Node, graph.Place]) -> str | None:
    return places[node].module if node in places else None
