"""Proofs of ownership over whole models: the engine contradicts none, on that graph or on others of its signature."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridle import graph
from bridle.persample import _reentrant
from bridle.persample._cuts import Losses
from bridle.persample.ownership.find import signature
from bridle.persample.ownership.owners import NOBODY, SEVERAL, Owners
from bridle.persample.ownership.prove import prove

from . import test_transformers
from .cases import CASES
from .random_graphs import drawn
from .routings import ROUTINGS
from .truth import claims, contradictions

pytestmark = pytest.mark.filterwarnings("ignore")


def split(losses):
    """Return the losses as `per_sample` reads them."""
    root = losses.reshape(len(losses), -1).sum(1)
    return _reentrant.opened(Losses(root, torch.arange(len(root)), len(root)))


def refuted(claimed, losses):
    """Return ops at which the engine's own probe finds another owner than the one that was claimed."""
    nodes = [node for node in losses.read.nodes if node in claimed and not graph.is_leaf(node)]
    found = losses.owners(nodes)
    return [graph.op(node) for node in nodes if found[node] is not None and _differ(claimed[node], node, found[node])]


def _differ(claimed, node, layouts):
    for owners, layout, out in zip(claimed, layouts, graph.describe(node), strict=True):
        a, b = owners.ids, Owners.of_layout(layout, out.shape).ids
        if bool(((a != SEVERAL) & (b != NOBODY) & (a != b)).any()):
            return True
    return False


def check(builds):
    """Hold what is proved for one graph against it and all others of its signature; return how many there were."""
    graphs = [split(losses) for losses in builds]
    proofs = {signature(one): prove(one.root, one.sample_of) for one in graphs[:1]}
    held = 0
    for one in graphs:
        form = signature(one)
        first = proofs.setdefault(form, prove(one.root, one.sample_of))
        claimed = dict(zip(one.read.nodes, (first[node] for node in first), strict=False))
        assert not refuted(claimed, one)
        held += 1
    return held
