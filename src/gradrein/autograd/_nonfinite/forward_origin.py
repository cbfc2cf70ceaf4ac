"""The op of the forward pass that made the first non-finite value, as far as the graph shows it."""

from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..._torch.saved import saved_value
from .._diagnosis.context import node_label
from .._values import nonfinite_mask
from .operand import Origin, mask_label, rows_of, saved_floats

# Functions whose ops save their input but not their result: recompute it.
_RECOMPUTE = frozenset(
    ["acos", "acosh", "asin", "atanh", "cosh", "erfinv", "expm1", "lgamma", "log", "log10", "log1p", "log2", "sinh"]
)

# The input position of a saved value, where its name implies it for every op that uses the name.
_POSITION = {"self": 0, "input": 0, "other": 1, "weight": 1, "mat1": 1, "batch1": 1, "mat2": 2, "batch2": 2}
_TWO_INPUTS = {"MmBackward0": 1, "BmmBackward0": 1}


Locations: TypeAlias = dict[Node, graph.NodeLocation]


def forward_origin(recorded: graph.Graph, names: graph.Names, locations: Locations) -> Origin:
    """Walk the graph in the order of the forward pass and stop at the first non-finite value."""
    for leaf in recorded.leaves:
        bad = nonfinite_mask(leaf)
        if bad.any():
            name = names.of(leaf) or graph.variable_name(leaf) or "a leaf"
            text = f"{name} {mask_label(bad)} already held NaN or infinity before the forward pass."
            return Origin(text, None, names.module_of(leaf), name, rows_of(bad))
    for count_masks in (False, True):  # masks are written with minus infinity: blame it last
        for node in reversed(recorded.nodes):
            operands = saved_floats(node)
            origin = _bad_operand(node, operands, locations, count_masks) or _bad_result(node, operands, locations)
            if origin is not None:
                return origin
    return Origin(
        "No value that the graph has saved is NaN or infinite, so the op that made it is unknown: it is "
        "one that saves nothing, such as a sum, or the value came in with data. Check the inputs with "
        "torch.isfinite."
    )


def _bad_operand(node: Node, operands: dict[str, Tensor], locations: Locations, count_masks: bool) -> Origin | None:
    for name, value in operands.items():
        bad = nonfinite_mask(value) if count_masks else nonfinite_mask(value) & ~value.isneginf()
        if _is_result(name) or not bad.any():
            continue
        text = f"Operand `{name}` of {node_label(node, locations.get(node))} {mask_label(bad)} is NaN or infinite"
        producer = _producer(node, name)
        if producer is None:
            return Origin(
                f"{text}. It came in with data, or from an op that was not recorded: check the inputs.",
                graph.op(node),
                _module(node, locations),
                name,
                rows_of(bad),
            )
        return Origin(
            f"{text}. It was made by {node_label(producer, locations.get(producer))}, or by an op before that which "
            "saved nothing.",
            graph.op(producer),
            _module(producer, locations),
            name,
            rows_of(bad),
        )
    return None


def _bad_result(node: Node, operands: dict[str, Tensor], locations: Locations) -> Origin | None:
    inputs = {name: value for name, value in operands.items() if not _is_result(name)}
    for name, made in (*operands.items(), *_recomputed(node, operands)):
        if name in inputs:
            continue
        bad = nonfinite_mask(made)
        if bad.any():
            cause = next(iter(inputs), None)
            ranges = ", ".join(
                f"`{n}` from {v.min().item():.3g} to {v.max().item():.3g}" for n, v in inputs.items() if v.numel()
            )
            text = f"Origin: {node_label(node, locations.get(node))} made NaN or infinity {mask_label(bad)}" + (
                f" out of {ranges}." if ranges else "."
            )
            return Origin(text, graph.op(node), _module(node, locations), cause, rows_of(bad))
    return None


def _recomputed(node: Node, operands: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    op = graph.op(node)
    function = op.removesuffix("Backward0").lower()
    if function in _RECOMPUTE and "self" in operands:
        return [("recomputed", getattr(torch, function)(operands["self"]))]
    if op == "PowBackward0" and "self" in operands:
        return [("recomputed", operands["self"] ** saved_value(node, "exponent"))]
    if op == "DivBackward0" and "other" in operands:  # anything divided by zero is non-finite
        return [("recomputed", operands.get("self", torch.ones(())) / operands["other"])]
    if op == "MulBackward0" and operands.keys() >= {"self", "other"}:
        return [("recomputed", operands["self"] * operands["other"])]
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


def _module(node: Node, locations: Locations) -> str | None:
    return locations[node].module if node in locations else None
