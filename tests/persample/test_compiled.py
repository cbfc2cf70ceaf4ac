"""Compiled regions: refused by name where they hold parameters, right everywhere else.

The backend traces as the real one does and records the same node, but needs no C++ compiler.
"""

import pytest
import torch
from torch import nn
from torch._functorch import config

import gradrein
from gradrein import errors

from .oracle import flat, loop

# The tracer itself looks at `.grad` of what it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

B, D = 4, 6


@pytest.fixture(autouse=True)
def fresh():
    """Compile anew, and let the loop ask the same region more than once."""
    torch._dynamo.reset()
    with config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def parameters(model):
    return dict(model.named_parameters())


def mlp():
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_parameters_inside_are_refused_by_name_or_taken_slowly(dynamic):
    model = mlp()
    losses = compiled(model, dynamic=dynamic)(torch.randn(B, D)).square().sum(1)
    with pytest.raises(errors.UnsupportedOperationError, match="`0.weight` is used by .*a compiled region") as caught:
        gradrein.per_sample(losses, model)
    assert (caught.value.op, caught.value.where) == ("CompiledFunctionBackward", "0.weight")
    ps = gradrein.per_sample(losses, model, allow_opaque=True)
    torch.testing.assert_close(flat(ps.grads()), flat(loop(losses, parameters(model))))
    ps.audit()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_region_without_parameters_is_passed_through(dynamic):
    model = mlp()
    between = compiled(lambda h, factor: torch.tanh(h) * factor + h.cos(), dynamic=dynamic)
    for factor in (2, 3):
        losses = model[2](between(model[0](torch.randn(B, D)), factor)).square().sum(1)
        ps = gradrein.per_sample(losses, model)
        torch.testing.assert_close(flat(ps.grads()), flat(loop(losses, parameters(model))))
        assert "observed by running the engine" in ps.plan()  # nobody knows what a region does with its rows
        ps.audit()


def test_coupling_inside_is_found():
    model = mlp()
    centred = compiled(lambda h: (h - h.mean(0)) / h.std(0))
    losses = model[2](torch.tanh(centred(model[0](torch.randn(B, D))))).square().sum(1)
    with pytest.raises(errors.BatchCouplingError, match="`CompiledFunctionBackward` mixes the samples"):
        gradrein.per_sample(losses, model)
    found = gradrein.per_sample(losses, model, allow_coupling=True, allow_opaque=True).grads()
    torch.testing.assert_close(flat(found), flat(loop(losses, parameters(model))))


@config.patch(donated_buffer=True)
def test_a_region_that_overwrites_what_it_saved_is_refused():
    """A plain backward pass compiles such a one; torch refuses to run it twice, on either of our two ways to it."""
    model = mlp()
    x = torch.randn(B, D)
    between = compiled(lambda h: torch.tanh(h) * 2 + h.cos())
    inside = compiled(lambda x: model(x).cos() * model(x).sin())
    for losses in (lambda: model[2](between(model[0](x))).square().sum(1), lambda: inside(x).square().sum(1)):
        losses().sum().backward()
        with pytest.raises(errors.UnsupportedOperationError, match="donated_buffer = False"):
            gradrein.per_sample(losses(), model, allow_opaque=True).norms()


ASKED = {
    "norms": lambda ps: [ps.norms()],
    "each": lambda ps: list(ps.norms(per_parameter=True).values()),
    "grads": lambda ps: list(ps.grads().values()),
    "clip_": lambda ps: [ps.clip_(0.5)],
    "weighted_": lambda ps: [] if ps.weighted_(lambda norms: 1 / (1 + norms)) is None else None,
    "dot": lambda ps: [ps.dot(), ps.cosine()],
    "gram": lambda ps: [ps.gram()],
    "stats": lambda ps: [torch.tensor(ps.stats().mean_norm)],
    "audit": lambda ps: [torch.tensor(len(ps.plan())), torch.tensor(len(ps)), ps.audit() and ps.norms()],
    "stream": lambda ps: [part for _, _, part in ps.stream()],
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_step_around_it_runs_it_as_it_is(asked):
    """`torch.compile` around a whole step looks neither into `per_sample` nor into its answers."""
    model = mlp()

    def step(x):
        return ASKED[asked](gradrein.per_sample(model(x).square().sum(1), model))

    whole = torch.compile(step, backend="eager")
    for samples in (B, B, B + 1, B):
        x = torch.randn(samples, D)
        found = []
        for run in (step, whole):
            model.zero_grad()
            found.append((run(x), [p.grad for p in model.parameters()]))
        torch.testing.assert_close(found[1], found[0])


def test_a_step_around_it_is_refused_where_the_model_is_compiled():
    model = mlp()

    def step(x):
        return gradrein.per_sample(model(x).square().sum(1), model).clip_(1.0)

    with pytest.raises(errors.UnsupportedOperationError, match=r"Compile the whole step with gradrein\.compile"):
        compiled(step)(torch.randn(B, D))
    assert all(p.grad is None for p in model.parameters())
