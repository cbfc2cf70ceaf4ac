"""What a proof of ownership claims, against the engine: one backward pass per sample, on several graphs of one form."""

import torch
from torch.autograd.graph import GradientEdge

from gradrein import graph
from gradrein.persample.cuts import signature_of
from gradrein.persample.engine import Losses
from gradrein.persample.layout import MIXED, UNREACHED
from gradrein.persample.owners.prove import prove


def flat_losses(outputs):
    """Return one loss per element of some outputs, whatever their shapes."""
    real = [torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outputs]
    return torch.cat([out.reshape(-1) for out in real])


def edges_of(scan):
    return [GradientEdge(node, i) for node in scan.nodes for i in range(len(graph.describe(node)))]


def senders(losses):
    """Return for each edge of the graph which sample sends each of its elements a gradient; MIXED where many do.

    NaN is no evidence: the engine multiplies the zeros of other samples by infinities.
    """
    edges = edges_of(losses.scan)
    weights = torch.rand(losses.root.shape, dtype=torch.float64) + 0.5
    found = [torch.full(tuple(graph.describe(e.node)[e.output_nr].shape), UNREACHED) for e in edges]
    for sample in range(losses.samples):
        only = (weights * (torch.tensor(losses.sample_of) == sample)).to(losses.root.dtype)
        got = torch.autograd.grad(losses.root, edges, only, retain_graph=True, allow_unused=True)
        for i, gradient in enumerate(got):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                here = (dense != 0) & ~dense.isnan()
                found[i] = torch.where(here, torch.where(found[i] == UNREACHED, sample, MIXED), found[i])
    return found


def claims(losses, by_indices=False):
    """Return for each edge of the graph which sample is claimed to own each element."""
    owners = prove(losses.root, losses.sample_of, by_indices=by_indices)
    known = [owners[e.node][e.output_nr] if e.node in owners else None for e in edges_of(losses.scan)]
    return [torch.tensor(MIXED) if one is None else one.ids.expand(one.shape) for one in known]


def contradictions(claimed, losses):
    """Return, edge by edge, where the engine sends a gradient from another sample than the one that was claimed."""
    wrong = []
    for edge, claim, truth in zip(edges_of(losses.scan), claimed, senders(losses), strict=True):
        bad = (claim != MIXED) & (truth != UNREACHED) & (truth != claim)
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            wrong.append(f"{graph.op(edge.node)}[{edge.output_nr}]{at}: claimed {claim[at]}, engine {truth[at]}")
    return wrong


def same_form(a: Losses, b: Losses) -> bool:
    return signature_of(a) == signature_of(b)
