"""With a real compiler, and without one."""

import shutil

import pytest
import torch
from torch import nn

import gradrein
from gradrein._torch import fx as torch_fx

from .helpers import C, Twins, batch, losses_of, mlp

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler"
)


@needs_compiler
def test_compiled_with_a_convolution_and_dropout():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.second = nn.Conv1d(1, 2, 3), nn.Dropout(0.5), nn.Linear(6, C)

        def forward(self, x):
            return self.second(self.drop(torch.tanh(self.first(x[:, None]).flatten(1))))

    twins = Twins(Model(), backend="inductor")
    for _ in range(4):
        twins.run(*batch(), exact=False)
        for model in (twins.model, twins.other):
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert twins.ran == "compiled", twins.step.explain()


def test_the_fastest_is_kept_and_all_are_right(monkeypatch):
    monkeypatch.setattr("gradrein._torch.fx.compiled", lambda graph, _: graph)
    twins = Twins(mlp(), backend="fastest")
    for _ in range(25):
        twins.run(*batch(), exact=False)
    text = twins.step.explain()
    assert all(f"{way} " in text for way in ("eager", "captured", "compiled"))
    assert "being timed" not in text


def test_without_a_compiler_the_captured_graph_runs_and_that_is_said(monkeypatch):
    def compiled(*_):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("gradrein._torch.fx.compiled", compiled)
    twins = Twins(mlp(), backend="inductor")
    twins.run(*batch())
    with pytest.warns(gradrein.errors.GradreinWarning, match="runs uncompiled: RuntimeError: No working C"):
        twins.run(*batch())
    assert twins.ran == "captured"
    assert "No working C++ compiler found" in twins.step.explain()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_was_compiled_already(in_place):
    model = Own()
    if in_place:
        model.compile(backend="aot_eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="aot_eager")

    def make(run):
        def step(x, y):
            return gradrein.per_sample(losses_of(run, x, y), model).clip_(0.5)

        return step

    plain = Own()
    plain.load_state_dict(model.state_dict())
    with pytest.raises(gradrein.errors.UnsupportedOperationError, match="whole step with gradrein.compile"):
        make(compiled)(*batch())
    step = gradrein.compile(make(compiled), compiled, backend="captured")
    for _ in range(3):
        x, y = batch()
        expected = gradrein.per_sample(losses_of(plain, x, y), plain).clip_(0.5)
        assert torch.equal(step(x, y), expected)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert ": captured (" in step.explain()


def test_stays_eager_where_a_trace_has_other_ops_than_run(monkeypatch):
    monkeypatch.setattr(torch_fx, "RECORDS_WHAT_RUNS", False)
    twins = Twins(mlp())
    for _ in range(3):
        twins.eager(*batch())
    why = f"eager: torch {torch.__version__} records other ops than it runs (no `autograd_would_have_decomposed`)"
    assert why in twins.step.explain()
