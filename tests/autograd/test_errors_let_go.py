"""A caught error holds nothing: when the except block ends, the graph is gone, without the collector."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein import errors


@pytest.fixture
def without_collector():
    checkpoint(torch.exp, torch.ones(1), use_reentrant=False)  # its first call imports the compiler, which holds frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(17)


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def no_scalar(net, out):
    gradrein.backward(out)


def not_real(net, out):
    gradrein.backward(torch.complex(out, out).sum())


def unused(net, out):
    gradrein.grad(out.sum(), list(net.parameters()))


def unused_in_a_batch(net, out):
    gradrein.grad(out, net, torch.ones(2, *out.shape), is_grads_batched=True)


def freed(net, out):
    gradrein.backward(out.sum())
    gradrein.backward(out.sum())


def carried_over(net, out):
    gradrein.backward(out.sum())
    gradrein.backward(net(out.expand(2, 3)).sum())


def stale(net, out):
    loss = out.exp().square()
    net.head.weight.data.mul_(1)
    with torch.no_grad():
        net.head.weight.mul_(2)
    gradrein.backward(loss.sum())


def stale_inside_a_checkpoint(net, out):
    loss = checkpoint(lambda x: x.exp().square(), out, use_reentrant=False) * net.head.bias
    with torch.no_grad():
        net.head.bias.mul_(2)
    gradrein.backward(loss.sum())


def no_graph(net, out):
    gradrein.backward(out.detach().sum())


def shape(net, out):
    gradrein.backward(out, torch.ones(9))


def wrong_return(net, out):
    gradrein.backward(Wrong.apply(out).sum())


def unvectorised(net, out):
    hidden = out.exp()
    hidden.register_hook(lambda grad: grad * float(grad.sum()))
    gradrein.grad(hidden.square(), net.body.weight, torch.ones(2, *out.shape), is_grads_batched=True)


def unknown(net, out):
    hidden = out.exp()
    hidden.register_hook(lambda _: np.ones(3)[7])
    gradrein.backward(hidden.sum())


def of_a_subclass(net, out):
    gradrein.grad(out.as_subclass(Logged).sum(), net.idle.weight)


def unused_parameters(net, out):
    gradrein.autograd.find_unused_parameters(
        checkpoint(net, out.detach().expand(2, 3).requires_grad_(), use_reentrant=True), net
    )


def replayed(net, out):
    x = out.detach().expand(2, 3).requires_grad_()
    gradrein.autograd.replay(checkpoint(net, x, use_reentrant=True).sum(), x)


def traced(net, out):
    gradrein.backward(out.sum())
    gradrein.trace(out.sum(), net)


def not_finite(net, out):
    with gradrein.detect_nonfinite():
        gradrein.backward((out - out).sqrt().sum())


MISTAKES = [
    *(no_scalar, not_real, unused, unused_in_a_batch, freed, carried_over, stale, stale_inside_a_checkpoint),
    *(no_graph, shape, wrong_return, unvectorised, unknown, of_a_subclass, unused_parameters, replayed, traced),
    not_finite,
]


def fail(mistake):
    """Make the mistake, catch what it raises, and return references to what must be gone by then."""
    net = Net()
    out = net(torch.randn(2, 3))
    mark = out.grad_fn.metadata["mark"] = Net()  # nodes themselves have no weak references
    held = [weakref.ref(value) for value in (net, net.body.weight, out, mark)]
    del mark
    try:
        mistake(net, out)
    except (RuntimeError, TypeError, IndexError):
        return held
    raise AssertionError("no error was raised")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_caught_error_holds_nothing(mistake):
    assert [held() for held in fail(mistake) if held() is not None] == []


def test_the_mistakes_raise_every_kind_of_error():
    def kinds(root):
        return {root} | {kind for child in root.__subclasses__() for kind in kinds(child)}

    found = set()
    for mistake in MISTAKES:
        net = Net()
        try:
            mistake(net, net(torch.randn(2, 3)))
        except Exception as error:
            found.add(type(error))
    assert {kind for kind in kinds(errors.BackwardError) if kind is not errors.BackwardError} <= found


@pytest.mark.usefixtures("without_collector")
def test_errors_that_are_kept_hold_what_torchs_would_and_go_with_it():
    kept = []
    net = Net()
    out = net(torch.randn(2, 3))
    node = weakref.ref(out)
    for mistake in (unused, no_scalar):
        try:
            mistake(net, out)
        except errors.BackwardError as error:
            kept.append(error)
    del net, out
    kept.clear()
    assert node() is None
