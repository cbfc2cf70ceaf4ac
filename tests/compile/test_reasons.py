"""What stays eager, for which reason."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein import errors

from .helpers import B, C, D, Twins, batch, clipped, losses_of, mlp

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


class Experts(nn.Module):
    """Rows are routed to experts by their values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 2)
        self.experts, self.head = nn.ModuleList(nn.Linear(D, D) for _ in range(2)), nn.Linear(D, C)

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, None])
        return self.head(out)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return Square.apply(self.inner(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, C)

    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


def answers(ask, **options):
    def make(model):
        return lambda x, y: ask(gradrein.per_sample(losses_of(model, x, y), model, **options))

    return make


def with_zero_grad(model):
    def step(x, y):
        model.zero_grad()
        return gradrein.per_sample(losses_of(model, x, y), model).clip_(0.5)

    return step


def that_reads_grad(model):
    def step(x, y):
        norms = gradrein.per_sample(losses_of(model, x, y), model).clip_(0.5)
        if model[0].weight.grad is not None:
            norms = norms + model[0].weight.grad.sum()
        return norms

    return step


GROUPS = torch.tensor([0, 0, 1, 1])
EAGER = {
    "checkpoint": (Checkpointed, clipped, "holds a checkpoint"),
    "experts": (Experts, clipped, "."),
    "custom Function": (Custom, clipped, "."),
    "zero_grad": (mlp, with_zero_grad, "looks at `.grad`"),
    "reads grad": (mlp, that_reads_grad, "looks at `.grad`"),
    "groups": (mlp, answers(lambda ps: ps.norms(), sample_groups=GROUPS), "was given `sample_groups`"),
    "stats": (mlp, answers(lambda ps: ps.stats().noise_scale), "`stats` hands out"),
    "project": (mlp, answers(lambda ps: ps.project(8)), "`project` hands out .* what it was made of"),
    "list": (
        mlp,
        lambda model: lambda x, y: gradrein.per_sample(losses_of(model, x, y), [*model.parameters()]).norms(),
        "without names",
    ),
    "host": (mlp, answers(lambda ps: ps.norms().tolist()), "."),
    "nothing asked": (mlp, lambda model: lambda x, y: losses_of(model, x, y).detach(), "does not ask"),
    "one sample": (mlp, lambda model: lambda x, y: clipped(model)(x[:1], y[:1]), "at least two"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", EAGER)
def test_stays_eager_and_says_why(name):
    model, make, reason = EAGER[name]
    twins = Twins(model(), make)
    for _ in range(4):
        twins.run(*batch())
    assert twins.ran == "eager", twins.step.explain()
    assert re.search(f"eager: .*{reason}", twins.step.explain()), twins.step.explain()


def test_coupling_is_refused_at_every_call():
    model = nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Linear(6, C))
    step = gradrein.compile(clipped(model), model, backend="captured")
    for _ in range(3):
        with pytest.raises(errors.BatchCouplingError):
            step(*batch())
    assert all(p.grad is None for p in model.parameters())


def test_errors_of_the_step_are_its_own():
    model = mlp()

    def step(x, y):
        if x.shape[0] == 2:
            raise KeyError("two")
        return gradrein.per_sample(losses_of(model, x, y), model).clip_(0.5)

    step = gradrein.compile(step, model, backend="captured")
    for _ in range(3):
        step(*batch())
        with pytest.raises(KeyError, match="two"):
            step(*batch(2, D))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            step(*batch(B, D + 1))
        with pytest.raises(errors.ArgumentError, match="single number"):
            gradrein.compile(lambda x: gradrein.per_sample(model(x).sum(), model), model)(batch()[0])


def test_explained_before_the_first_call(monkeypatch):
    model = mlp()
    step = gradrein.compile(clipped(model), model)
    assert step.explain() == "`step`, backend 'fastest'\n  not called yet"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "a process group is initialised" in step.explain()


def test_what_cannot_be_compiled_at_all():
    with pytest.raises(errors.ArgumentTypeError, match="`step` must be a function"):
        gradrein.compile(3, mlp())
    with pytest.raises(errors.ArgumentTypeError, match="`model` must be a module"):
        gradrein.compile(lambda: 0, 3)
    with pytest.raises(errors.ArgumentError, match="backend must be"):
        gradrein.compile(lambda: 0, mlp(), backend="fast")


def test_dropped_samples():
    twins = Twins(mlp(), answers(lambda ps: ps.clip_(0.5, nonfinite="drop")))
    x, y = batch()
    twins.run(x, y)
    twins.captured(x, y)
    x[1] = torch.inf
    twins.eager(x, y)
    assert all(torch.isfinite(p.grad).all() for p in twins.model.parameters())
