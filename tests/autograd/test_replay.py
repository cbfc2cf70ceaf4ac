"""Our engine: whole models, what the op database does not hold, what it shows, and what it refuses."""

import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

from functions import function
from gradrein import errors, graph
from gradrein.autograd import replay


def assert_as_torch(outputs, inputs, grads=None, **kwargs):
    expected = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True, **kwargs)
    found = replay(outputs, inputs, grads, **kwargs)
    for ours, torchs in zip(found, expected, strict=True):
        assert (ours is None) == (torchs is None)
        if ours is not None:
            ours, torchs = (t.to_dense() if t.is_sparse else t for t in (ours, torchs))
            assert torch.equal(ours, torchs)
    return found


def cnn():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)]
    return nn.Sequential(*layers), torch.randn(4, 3, 8, 8)


def transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), torch.randn(3, 5, 16)


def lstm():
    return nn.LSTM(6, 7, num_layers=2, bidirectional=True), torch.randn(5, 3, 6)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("build", [cnn, transformer, lstm])
@pytest.mark.parametrize("create_graph", [False, True])
def test_models_bit_for_bit(build, create_graph):
    torch.manual_seed(0)
    model, x = build()
    x.requires_grad_()
    out = model(x)
    loss = (out[0] if isinstance(out, tuple) else out).square().mean()
    assert_as_torch(loss, [x, *model.parameters()], create_graph=create_graph)


def test_double_backward():
    x = torch.randn(4, requires_grad=True, dtype=torch.float64)
    loss = (x.sin() * x.exp()).sum()
    (ours,) = replay(loss, x, create_graph=True)
    (torchs,) = torch.autograd.grad(loss, x, create_graph=True)
    seconds = [torch.autograd.grad(g.square().sum(), x, retain_graph=True)[0] for g in (ours, torchs)]
    assert torch.equal(*seconds)
    assert not replay(loss, x)[0].requires_grad


class Pair(torch.autograd.Function):
    """Two outputs; says what it was given."""

    given: ClassVar[list] = []
    materialize = True

    @classmethod
    def run(cls, a, b, materialize):
        cls.materialize, cls.given = materialize, []
        return cls.apply(a, b)

    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(Pair.materialize)
        return a * 2, b * 3

    @staticmethod
    def backward(ctx, *grads):
        Pair.given.append(tuple(grad is None for grad in grads))
        return tuple(None if grad is None else grad * 2 for grad in grads)


Swallow = function("Swallow", lambda x: x + 1, lambda *_: None)  # sends nothing back


@pytest.mark.parametrize("materialize", [True, False])
def test_a_custom_function_gets_zeros_or_none_as_it_asked(materialize):
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first, _ = Pair.run(x * 1, y * 1, materialize)
    assert_as_torch(first.sum(), [x, y])
    assert Pair.given == [(False, not materialize)] * 2


@pytest.mark.parametrize("materialize", [True, False])
def test_a_custom_function_that_nothing_comes_back_to(materialize):
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = Pair.run(x * 1, y * 1, materialize)
    assert_as_torch(Swallow.apply(first + second).sum(), [x, y])
    assert Pair.given == [(not materialize,) * 2] * 2


def test_a_custom_function_whose_inputs_lead_to_each_other():
    x = torch.ones(3, requires_grad=True)
    hidden = x.exp()
    first, second = Pair.run(hidden, hidden.sin(), True)
    assert_as_torch((first * second).sum(), [x, hidden])


def test_hooks_on_tensors_and_nodes_run_once_each():
    x = torch.ones(3, requires_grad=True)
    calls = []
    hidden = x * 2
    hidden.register_hook(lambda g: calls.append("tensor") or g * 10)
    hidden.grad_fn.register_prehook(lambda gs: calls.append("before") or (gs[0] * 7,))
    hidden.grad_fn.register_hook(lambda gi, go: calls.append("after") or (gi[0] + 1, *gi[1:]))
    x.register_hook(lambda g: calls.append("leaf") or g * 3)
    out = hidden.exp().sum()
    replay(out, x)
    assert calls == ["tensor", "before", "after", "leaf"]
    assert_as_torch(out, [x])
    assert_as_torch(out, [hidden])
    assert_as_torch(out, [hidden, x])  # what passes on is caught before its hooks, as in torch


@pytest.mark.parametrize("build", [lambda: nn.Embedding(9, 4, sparse=True), lambda: nn.EmbeddingBag(9, 4, sparse=True)])
def test_sparse_gradients(build):
    layer = build()
    out = layer(torch.tensor([[0, 3], [3, 1]]))
    assert_as_torch(out.sum() + out.square().sum(), [layer.weight])
    assert_as_torch(out.sum() + layer.weight.square().sum(), [layer.weight])


def test_nested_tensors():
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    nested = torch.nested.as_nested_tensor([x, y], layout=torch.jagged)
    assert_as_torch((nested * 2).values().square().sum(), [x, y])


def test_gradients_are_reduced_and_cast_before_they_are_added():
    x, y = torch.randn(3, 1, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert_as_torch((x * y).sum() + x.exp().sum(), [x, y])


def test_outputs_inputs_and_gradients_in_every_form():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a, b = x * 2, (x * y).exp()
    assert_as_torch([a, b], [x, y], [torch.ones(2), torch.full((2,), 3.0)])
    assert_as_torch([a.sum(), a.sum()], [x, y])  # y is not used
    edge = GradientEdge(a.grad_fn, 0)
    assert_as_torch(a.exp().sum(), [edge])
    (ours,) = replay(edge, x, torch.ones(2))
    assert torch.equal(ours, torch.full((2,), 2.0))


@pytest.mark.needs("GraphExecGroup")
def test_a_checkpoint_is_computed_again_once():
    calls = []

    def region(x):
        calls.append(None)
        return x.exp().sin().exp().cos()

    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(region, x, use_reentrant=False).sum()
    calls.clear()
    (ours,) = replay(loss, x)
    assert len(calls) == 1
    assert torch.equal(ours, *torch.autograd.grad(region(x).sum(), x))


def test_a_visitor_sees_every_edge_and_can_change_it():
    x = torch.tensor(2.0, requires_grad=True)
    seen = []

    def look(edge, gradient):
        seen.append((edge.source and graph.op(edge.source), graph.op(edge.target), gradient.item()))

    loss = x.square() + 3 * x
    assert replay(loss, x, visit=look) == (torch.tensor(7.0),)
    assert seen == [
        (None, "AddBackward0", 1.0),
        ("AddBackward0", "PowBackward0", 1.0),
        ("AddBackward0", "MulBackward0", 1.0),
        ("MulBackward0", "AccumulateGrad", 3.0),
        ("PowBackward0", "AccumulateGrad", 4.0),
    ]
    doubled = replay(loss, x, visit=lambda edge, g: g * 2 if edge.source is None else None)
    assert doubled == (torch.tensor(14.0),)
    with pytest.raises(errors.BackwardError, match=r"visit returned a gradient of shape \(2,\)"):
        replay(loss, x, visit=lambda edge, g: torch.ones(2))


def test_nothing_is_written_and_nothing_is_kept():
    x = torch.ones(3, requires_grad=True)
    hidden = x.exp()
    alive = weakref.ref(hidden)
    (gradient,) = replay(hidden.square().sum(), x)
    assert x.grad is None
    del hidden
    gc.collect()
    assert alive() is None
    assert gradient.grad_fn is None


def test_refuses_a_reentrant_checkpoint():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(errors.BackwardError, match="use_reentrant=False"):
        replay(checkpoint(torch.exp, x, use_reentrant=True).sum(), x)


def test_refuses_arguments_that_do_not_fit():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(errors.GradientMismatchError):
        replay(x * 2, x)
    with pytest.raises(errors.GradientMismatchError):
        replay(x * 2, x, torch.ones(2))
    with pytest.raises(errors.GradientMismatchError, match="got 1 tensors and 2 gradients"):
        replay(x.sum(), x, [None, None])
    with pytest.raises(errors.BackwardError, match="output 0 does not require grad"):
        replay(torch.ones(()), x)
    with pytest.raises(errors.BackwardError, match="input 0 does not require grad"):
        replay(x.sum(), torch.ones(()))
