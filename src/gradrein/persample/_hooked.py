"""Gradients where there are hooks: these run as if each loss were differentiated alone."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from .._torch.dtensor import is_dtensor
from .._torch.engine import torch_grad
from .._torch.hooks import register_prehooks
from ..errors import UnsupportedOperationError
from . import engine
from .cuts.find import find_hooked
from .engine import Losses
from .ops.crossings import refuse_asking
from .owners.model_tensors import ModelTensors
from .owners.probe import SeenOwners
from .representations.base import Dense, SampleGrads


def refuse_dtensors(hooked: Mapping[str, Tensor]) -> None:
    """Refuse hooks on parameters that are DTensors: they would be given the shard of one sample's gradient.

    Raises:
        UnsupportedOperationError: there is such a hook.
    """
    for name, leaf in hooked.items():
        if is_dtensor(leaf):
            raise UnsupportedOperationError(
                f"per_sample: a hook is registered on `{name}`, a DTensor. It would be given the shard of one "
                "sample's gradient. Remove it.",
                "",
                name,
            )


def through_hooks(hooked: Mapping[str, Tensor], forms: Mapping[str, SampleGrads]) -> dict[str, SampleGrads]:
    """Send the gradient of each sample through the hooks of its parameters, sample by sample, in runs of the engine."""
    if not hooked:
        return {}
    edges = [graph.edge_of(leaf) for leaf in hooked.values()]
    given = [forms[name].dense().to(leaf.dtype) for name, leaf in hooked.items()]
    written = [torch.empty_like(gradients) for gradients in given]
    for sample in range(len(given[0])):
        # A copy of its own: a hook may change it in place, and others may share its memory.
        alone = [gradients[sample].clone() for gradients in given]
        with engine.explain_errors("the graph of the losses"):
            found = torch_grad(edges, edges, alone)
        for rows, gradient in zip(written, found, strict=True):
            rows[sample] = _plain(gradient)
    return {name: Dense(rows) for name, rows in zip(hooked, written, strict=True)}


def refuse_coupling(
    leaves: dict[Node, str], losses: Losses, known: ModelTensors, seen: SeenOwners | None = None
) -> SeenOwners | None:
    """Refuse losses that depend on other samples, and run no hook to find out.

    Args:
        leaves: names of parameters by their nodes.
        losses: what is differentiated.
        known: what is no data.
        seen: owners as they were seen when each loss was differentiated; None before that.

    Returns:
        What is to see owners then, where the structure of the graph does not tell them; else None.

    Raises:
        BatchCouplingError: the data of one sample enters the loss of another.
        UnsupportedOperationError: this cannot be told.
    """
    found = find_hooked(leaves, losses, known, None if seen is None else seen.layouts)
    if found is None:
        return SeenOwners(losses.samples)
    packed = found.rows.waiting(())

    def look() -> None:
        for node in packed:
            found.rows.add_packed(node, partial(engine.saved, node))

    if packed:
        engine.inside_engine(look)
        found.rows.refuse_conflict()
    return None


def differentiate_each(
    losses: Losses, leaves: Mapping[str, Tensor], seen: SeenOwners | None, *, retain_graph: bool, hooks_run: bool
) -> dict[str, SampleGrads]:
    """Differentiate the loss of each sample alone. Hooks and Functions on the way may do whatever they like.

    Args:
        losses: what is differentiated.
        leaves: the parameters.
        seen: is shown the gradients at all ops, if there is one.
        retain_graph: whether ops keep what they saved when they have run.
        hooks_run: whether there are hooks, which may not be run twice.

    Raises:
        UnsupportedOperationError: there are DTensors in the graph, or hooks and reentrant checkpoints.
    """
    refuse_asking(losses.scan)
    bypassed = bool(engine.bypassed(losses.root))
    if bypassed and hooks_run:
        raise UnsupportedOperationError(
            "per_sample: there is a hook for which each loss has to be differentiated alone, and there are reentrant "
            "checkpoints, around which the hook might run twice. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint, or remove the hook."
        )
    handles = [] if seen is None else register_prehooks(_ops(losses), lambda node: partial(seen.see, node))
    try:
        return _each(losses, leaves, seen, retain_graph=retain_graph or seen is not None or bypassed)
    finally:
        for handle in handles:
            handle.remove()


def _ops(losses: Losses) -> list[Node]:
    return [node for i, node in enumerate(losses.scan.nodes) if i not in losses.scan.leaves]


def _each(
    losses: Losses, leaves: Mapping[str, Tensor], seen: SeenOwners | None, *, retain_graph: bool
) -> dict[str, SampleGrads]:
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    rows: dict[str, Tensor] = {}
    for sample in range(losses.samples):
        if seen is not None:
            seen.sample = sample
        only = (losses.sample_of == sample).to(losses.root)
        keep = retain_graph or sample < losses.samples - 1
        found = engine.gradients_at(losses.root, only, edges, retain_graph=keep)
        for name, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                if name not in rows:
                    size = (losses.samples, *leaves[name].shape)
                    rows[name] = torch.zeros(size, dtype=gradient.dtype, device=gradient.device)
                rows[name][sample] = _plain(gradient)
    return {name: Dense(rows[name]) for name in leaves if name in rows}


def _plain(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()
