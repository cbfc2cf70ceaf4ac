"""Graphs without DTensors have no regions: the short way against the whole one."""

import pytest
import torch
from torch import nn

from gradrein.persample import _tensor_regions
from gradrein.persample._arguments import read_losses

MODELS = [
    lambda: nn.Linear(4, 3),
    lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)),
    lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.GRU(2, 3, batch_first=True)),
]


@pytest.mark.parametrize("make", MODELS)
def test_nothing_is_found_where_there_is_no_dtensor(make, monkeypatch):
    model = make()
    out = model(torch.randn(3, 4, requires_grad=True))
    losses, _ = read_losses((out[0] if isinstance(out, tuple) else out).flatten(1).sum(1), None)
    leaves = dict(model.named_parameters())
    short = _tensor_regions.read_regions(leaves, losses)
    monkeypatch.setattr(_tensor_regions, "any_dtensor", lambda _: True)
    whole = _tensor_regions.read_regions(leaves, losses)
    assert (short.spread, short.varies, short.summed) == (set(), {}, [])
    assert (whole.spread, whole.varies, whole.summed) == (set(), dict.fromkeys(losses.read.nodes, frozenset()), [])
