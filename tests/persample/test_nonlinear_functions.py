"""Custom Functions whose backward is not linear in the gradient: each loss is differentiated alone."""

import pytest
import torch
from torch import nn

import gradrein
from functions import function
from gradrein.persample import engine

from .oracle import loop


class Shortened(torch.autograd.Function):
    """The identity, with a gradient that is no longer than a limit: another one for a batch than for its samples."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.limit / g.norm()).clamp(max=1), None


# Rounds, with the gradient of a straight line where that is small.
Rounded = function("Rounded", torch.round, lambda g, _: g.clamp(-1, 1))


def on_an_activation(model, x):
    return model[1](Shortened.apply(model[0](x), 0.6)).square().sum(1)


def on_losses(model, x):
    return Shortened.apply(model(x).square().sum(1), 0.6)


def on_a_weight_that_is_used_twice(model, x):
    weight = Rounded.apply(3 * model[1].weight)
    return ((model[0](x) @ weight.T).sin() @ weight).square().sum(1)


@pytest.mark.parametrize("options", [{}, {"retain_graph": False}, {"memory_budget": 0}], ids=str)
@pytest.mark.parametrize("losses_of", [on_an_activation, on_losses, on_a_weight_that_is_used_twice])
@pytest.mark.parametrize("size", [3, 8])
def test_right(losses_of, size, options):
    for scale in (0.1, 1.0, 10.0):
        model, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)), scale * torch.randn(size, 5)
        truth = loop(losses_of(model, x), dict(model.named_parameters()))
        losses = losses_of(model, x)
        torch.testing.assert_close(gradrein.per_sample(losses, model, **options).grads(), truth)


def test_a_rule_vouches_for_a_function():
    doubled = function("Doubled", lambda x: 2 * x, lambda g, _: 2 * g)

    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert "each loss is differentiated alone" in str(gradrein.per_sample(doubled.apply(model(x)).sum(1), model).plan())
    gradrein.register_rule(doubled, lambda ctx: None)
    assert "observed by running the engine" in str(gradrein.per_sample(doubled.apply(model(x)).sum(1), model).plan())


class Halves(torch.autograd.Function):
    """A product with a weight in two halves; its backward counts on a gradient for both."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return tuple(half.clone() for half in (x @ weight.T).chunk(2, 1))

    @staticmethod
    def backward(ctx, first, second):
        x, weight = ctx.saved_tensors
        g = torch.cat([first, second], 1)
        return g @ weight, g.T @ x


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_without_a_gradient(used):
    model, x = nn.Linear(5, 4, bias=False), torch.randn(3, 5)
    halves = Halves.apply(x, model.weight)
    losses = halves[used].sin().sum(1)
    expected = loop(losses, dict(model.named_parameters()))
    found = gradrein.per_sample(losses, model, allow_opaque=True).grads()
    torch.testing.assert_close(found, expected)
    gradients = [None, None]
    gradients[used] = halves[used].cos()
    _, weight = engine.call(halves[used].grad_fn, gradients)  # as a region of torch's own is run
    torch.testing.assert_close(weight, expected["weight"].sum(0))


class Overwriting(torch.autograd.Function):
    """The product, whose backward writes over what was saved, as kernels of Liger do: no version counter tells."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        ctx.kept = torch.ones_like(a)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        given = g.clone() * ctx.kept
        ctx.kept.data.zero_()
        grads = given * b, given * a
        a.data.copy_(grads[0])
        b.data.copy_(grads[1])
        return grads


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("groups", [False, True])
def test_what_a_backward_overwrites_is_put_back(samples, groups):
    below, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]), torch.randn(samples, 3)
    parameters = dict(below.named_parameters())

    def losses_of():
        return Overwriting.apply(below[0](x), below[1](x)).square().sum(1)

    options = {"sample_groups": torch.zeros(samples, dtype=torch.int64)} if groups else {}
    losses = losses_of()
    expected = [torch.autograd.grad(losses_of()[i], [*parameters.values()]) for i in range(samples)]
    rows = {name: torch.stack([one[k] for one in expected]) for k, name in enumerate(parameters)}
    wanted = {name: row.sum(0, keepdim=True) if groups else row for name, row in rows.items()}
    for _ in range(2):
        ps = gradrein.per_sample(losses, parameters, **options)
        torch.testing.assert_close(ps.grads(), wanted)
        ps.audit()
    total = torch.autograd.grad(losses.sum(), [*parameters.values()])
    torch.testing.assert_close(list(total), [row.sum(0) for row in rows.values()])


class WithSecond(torch.autograd.Function):
    """A scaled value, and beside it nothing or a number that no loss uses."""

    @staticmethod
    def forward(ctx, x, w, second):
        ctx.save_for_backward(x, w)
        return x * w, (x.sum() if second else None)

    @staticmethod
    def backward(ctx, g, h):
        WithSecond.given.append(None if h is None else tuple(h.shape))
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0), None


@pytest.mark.parametrize("second", [False, True])
def test_outputs_that_no_loss_uses_get_what_autograd_hands_in(second):
    WithSecond.given = []
    gradrein.declare_samplewise(WithSecond, inputs=[0])
    w, layer = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)
    losses = WithSecond.apply(layer(torch.randn(3, 4)), w, second)[0].square().sum(1)
    expected = loop(losses, {"w": w})
    torch.testing.assert_close(gradrein.per_sample(losses, {"w": w}, allow_opaque=True).grads(), expected)
    assert set(WithSecond.given) == {() if second else None}
