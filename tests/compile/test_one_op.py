"""Loops that a captured step holds as one op, and what that saves."""

import pytest
from torch import nn

from gradrein._compile import _entry
from gradrein.persample.representations import base

from .helpers import C, Twins, batch

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


class Recurrent(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 3, layers, batch_first=True), nn.Linear(3, C)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def graph_of(twins, *args):
    twins.run(*args)
    twins.captured(*args)
    return twins.step._entries[-1].graph


def names(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_a_recurrent_layer_has_as_many_ops_however_long_it_runs():
    twins = Twins(Recurrent())
    short, long = (names(graph_of(twins, *batch(4, steps, 4))) for steps in (20, 30))
    assert short.count("gradrein.gate_gradients.default") == 1
    assert len(long) == len(short)


@pytest.mark.parametrize(("layers", "ran"), [(1, "compiled"), (2, "captured")])
def test_recurrent_layers_upon_each_other_are_not_compiled(monkeypatch, layers, ran):
    monkeypatch.setattr("gradrein._torch.fx.compiled", lambda graph, _: graph)
    twins = Twins(Recurrent(layers), backend="inductor")
    for _ in range(2):
        twins.run(*batch(4, 5, 4))
    assert twins.ran == ran
    assert ("does not hand on what a recurrent layer keeps" in twins.step.explain()) == (layers == 2)


def test_a_convolution_has_as_many_ops_however_many_samples_there_are(monkeypatch):
    monkeypatch.setattr(base, "CHUNK_BYTES", 1 << 10)
    layers = nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(8, C)
    twins = Twins(nn.Sequential(*layers))
    few, many = (names(graph_of(twins, *batch(samples, 2, 6))) for samples in (2, 40))
    assert few.count("gradrein.weight_gradients.default") == 2
    assert len(many) == len(few)


def test_norms_of_a_wide_convolution_are_one_op():
    layers = nn.Conv2d(100, 64, 2), nn.Flatten(), nn.Linear(64, C)
    found = names(graph_of(Twins(nn.Sequential(*layers)), *batch(4, 100, 2, 2)))
    assert found.count("gradrein.convolution_gram_sums.default") == 1


@pytest.mark.parametrize(("backend", "ran"), [("fastest", "captured"), ("inductor", "compiled")])
def test_large_graphs_are_compiled_only_when_asked_for(monkeypatch, backend, ran):
    monkeypatch.setattr(_entry, "_OPS_AT_MOST", 10)
    monkeypatch.setattr("gradrein._torch.fx.compiled", lambda graph, _: graph)
    twins = Twins(nn.Linear(5, C), backend=backend)
    for _ in range(2):
        twins.run(*batch())
    assert twins.ran == ran
    assert ("uncompiled, since more than 10 ops take minutes" in twins.step.explain()) == (backend == "fastest")


@pytest.mark.parametrize("wide", [2, 8, 64], ids=["grouped", "narrow", "one by one"])
def test_a_convolution_is_captured_in_whichever_way_its_gradients_are_made(wide):
    """Each lays its result out in another way; the graph has been told one of them."""
    kernel = 1 if wide == 64 else 2
    layers = nn.Conv2d(2, wide, kernel), nn.Tanh(), nn.Conv2d(wide, 9, kernel), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    twins = Twins(nn.Sequential(*layers, nn.Linear(9, C)))
    graph_of(twins, *batch(4, 2, 6, 6))
    for _ in range(2):
        twins.run(*batch(4, 2, 6, 6))
    assert ": captured (" in twins.step.explain()
