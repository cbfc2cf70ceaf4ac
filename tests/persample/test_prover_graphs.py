"""Proofs of ownership over whole models: the engine contradicts none, on that graph or on others of its signature."""

import pytest
import torch
import torch.nn.functional as F

from gradrein.persample.cuts import signature_of
from gradrein.persample.engine import Losses

from . import test_transformers
from .cases import CASES
from .random_graphs import drawn
from .routings import ROUTINGS
from .truth import claims, contradictions

pytestmark = pytest.mark.filterwarnings("ignore")


def inlined(losses, groups=None):
    """Return the losses as `per_sample` reads them."""
    root = losses.reshape(len(losses), -1).sum(1)
    sample_of = range(len(root)) if groups is None else torch.unique(groups, return_inverse=True)[1].tolist()
    return Losses(root, tuple(sample_of), max(sample_of) + 1)


def check(builds):
    """Hold what is proved for the first graph of a signature against all of them."""
    proofs = {}
    for losses in builds:
        claimed = proofs.setdefault(signature_of(losses), claims(losses))
        assert not contradictions(claimed, losses)
        assert not contradictions(claims(losses, by_indices=True), losses)


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    _, losses = CASES[name]()
    check(inlined(losses()) for _ in range(2))


@pytest.mark.parametrize("build", [getattr(test_transformers, name) for name in ("gpt2", "bert", "llama", "t5")])
def test_transformers_of_all_kinds(build):
    model, ids = build().double(), torch.randint(test_transformers.V, (2, 3, 4))
    logits = [model(few).logits.transpose(1, 2) for few in ids]
    check(inlined(F.cross_entropy(out, few, reduction="none").sum(1)) for out, few in zip(logits, ids, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed):
    described = drawn(1000 + seed)
    weights = described.weights()
    check(inlined(described.build(weights, build)) for build in range(len(described.moods)))


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name):
    routing, batch = ROUTINGS[name], 4
    model = routing.model(batch)
    check(
        inlined(
            routing.losses(model, routing.draw(batch), setting),
            routing.groups(batch, setting) if routing.groups else None,
        )
        for setting in routing.verdicts
    )
