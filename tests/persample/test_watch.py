"""An answer is about the moment of the call: what was changed in place since is refused, or does not matter."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import InplaceModifiedError

from .cases import Calls
from .oracle import flat, loop

B, T, D = 4, 5, 6

QUESTIONS = {
    "norms": lambda ps: ps.norms(),
    "norms per parameter": lambda ps: ps.norms(per_parameter=True),
    "grads": lambda ps: ps.grads(),
    "stream": lambda ps: list(ps.stream(samples=2)),
    "clip_": lambda ps: ps.clip_(1.0),
    "weighted_": lambda ps: ps.weighted_(torch.ones(B)),
    "weighted_ by norms": lambda ps: ps.weighted_(lambda norms: norms),
    "dot": lambda ps: ps.dot(),
    "cosine": lambda ps: ps.cosine(),
    "gram": lambda ps: ps.gram(),
    "stats": lambda ps: ps.stats(),
    "audit": lambda ps: ps.audit(),
}


def linear():
    return nn.Linear(D, 3), torch.randn(B, D)


def conv():
    return nn.Conv1d(T, 3, 2), torch.randn(B, T, D)


def bilinear():
    return Calls(lambda m, x: m.layer(x, x), layer=nn.Bilinear(D, D, 2)), torch.randn(B, T, D)


def stack():
    return Calls(lambda m, x: torch.einsum("btd,edf->betf", x, m.w), w=nn.Parameter(torch.randn(3, D, 2))), torch.randn(
        B, T, D
    )


def weight_normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)), torch.randn(B, T, D)


def one_by_one():
    return Calls(lambda m, x: torch.linalg.cross(x, m.w), w=nn.Parameter(torch.randn(1, 1, 3))), torch.randn(B, T, 3)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("build", [linear, conv, bilinear, stack, weight_normed, one_by_one])
@pytest.mark.parametrize("quietly", [False, True])
def test_an_input_changed_after_the_call(build, question, quietly):
    model, x = build()
    ps = gradrein.per_sample(model(x).flatten(1).square().sum(1), model)
    with torch.set_grad_enabled(not quietly):
        x.mul_(1.3)
    with pytest.raises(InplaceModifiedError, match="changed (in place )?since"):
        QUESTIONS[question](ps)
    assert all(p.grad is None for p in model.parameters())


def test_ids_changed_after_the_call():
    model, ids = nn.Embedding(7, 3), torch.randint(7, (B, T))
    ps = gradrein.per_sample(model(ids).square().sum((1, 2)), model)
    ids.zero_()
    with pytest.raises(InplaceModifiedError, match=r"that the gradients of `weight` depend on.*at version 1") as caught:
        ps.norms()
    assert caught.value.stale == ("weight",)


def test_gradients_handed_out_and_changed():
    model, x = linear()
    ps = gradrein.per_sample(model(x).square().sum(1), model)
    ps.grads()["bias"].zero_()
    with pytest.raises(InplaceModifiedError, match="or what grads"):
        ps.norms()


def test_what_is_written_down_does_not_need_the_input_any_more():
    model, x = conv()
    losses = model(x).square().sum((1, 2))
    expected = loop(losses, dict(model.named_parameters()))
    ps = gradrein.per_sample(losses, model)
    ps.clip_(1e9)  # writes gradients down
    assert "streamed" not in ps.plan()
    x.zero_()
    torch.testing.assert_close(flat(ps.grads()), flat(expected))


def test_a_step_of_the_optimizer_does_not_matter_where_parameters_are_not_needed():
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D), nn.Linear(D, 2))
    losses = model(torch.randn(B, T, D)).square().sum((1, 2))
    expected = loop(losses, dict(model.named_parameters()))
    ps = gradrein.per_sample(losses, model)
    ps.clip_(1.0)
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(flat(ps.grads()), flat(expected))
    torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1))
    with pytest.raises(InplaceModifiedError):
        ps.audit()  # asks autograd, which needs the weights


def test_a_step_of_the_optimizer_is_seen_where_parameters_are_needed_and_nothing_is_half_written():
    model = nn.Sequential(nn.Linear(D, D), nn.utils.parametrizations.weight_norm(nn.Linear(D, 2)))
    losses = model(torch.randn(B, T, D)).square().sum((1, 2))
    ps = gradrein.per_sample(losses, model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with pytest.raises(InplaceModifiedError):
        ps.weighted_(torch.ones(B))
    assert all(p.grad is None for p in model.parameters())


def test_an_input_changed_between_two_parts_of_a_stream():
    model, x = linear()
    ps = gradrein.per_sample(model(x).square().sum(1), model)
    parts = ps.stream(samples=1)
    next(parts)
    x.zero_()
    with pytest.raises(InplaceModifiedError):
        next(parts)
