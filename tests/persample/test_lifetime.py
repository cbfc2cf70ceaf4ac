"""What per_sample held is gone when its answers are, without waiting for the garbage collector."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein


@pytest.fixture
def uncollected():
    gc.disable()
    yield
    gc.enable()


def asked(run):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    between = model[0](torch.randn(5, 3)).tanh()
    ps = gradrein.per_sample(run(lambda h: model[1](h).sin(), between).sum(1), model)
    ps.clip_(1.0)
    return [weakref.ref(thing) for thing in (model[0].weight, between, ps)]


@pytest.mark.parametrize(
    "run",
    [lambda region, x: region(x), lambda region, x: checkpoint(region, x, use_reentrant=False)],
    ids=["plain", "checkpoint"],
)
def test_answers(uncollected, run):
    asked(run)  # torch's first checkpoint in a process imports its compiler, and that keeps things
    assert [ref() for ref in asked(run)] == [None] * 3


def test_the_drop_in(uncollected):
    def called():
        model = nn.Linear(3, 2)
        gradrein.call_for_per_sample_grads(model)(torch.randn(5, 3)).sum().backward()
        return weakref.ref(model.weight)

    assert called()() is None
