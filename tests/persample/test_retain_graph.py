"""Letting go of the graph on the way: the same answers, and nothing left to differentiate again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein

from .oracle import loop


class Several(nn.Module):
    """A layer with a rule, one without, a parametrised one, and a checkpointed one."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(4, 6), nn.Parameter(torch.rand(6))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        x = torch.cosh(self.first(x)) * self.scale
        x = torch.addcdiv(x, self.scale, 2 + self.scale)
        x = torch.cumprod(self.normed(x).tanh() + self.scale.square(), 1)
        return checkpoint(self.last, x, use_reentrant=False).square().sum(1)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_the_same_answers(batch):
    torch.manual_seed(0)
    model, x = Several().double(), torch.randn(batch, 4, dtype=torch.float64)
    kept = gradrein.per_sample(model(x), model)
    freed = gradrein.per_sample(model(x), model, retain_graph=False)
    for name, gradients in kept.grads().items():
        torch.testing.assert_close(freed.grads()[name], gradients)
    torch.testing.assert_close(freed.norms(), kept.norms())


def test_an_op_without_a_rule_is_asked_before_it_forgets():
    torch.manual_seed(0)
    scale, x = torch.rand(3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    losses = lambda: torch.cdist(x[:, None] * 2, scale.expand(4, 1, 3).exp()).sum((1, 2))  # noqa: E731
    kept = gradrein.per_sample(losses(), {"scale": scale}).grads()["scale"]
    freed = gradrein.per_sample(losses(), {"scale": scale}, retain_graph=False).grads()["scale"]
    torch.testing.assert_close(freed, kept)


def test_the_graph_is_gone():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    losses = model(torch.randn(3, 4)).square().sum(1)
    ps = gradrein.per_sample(losses, model, retain_graph=False)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        ps.audit()
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


def test_the_graph_is_kept_unless_told_otherwise():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    losses = model(torch.randn(3, 4)).square().sum(1)
    ps = gradrein.per_sample(losses, model)
    ps.audit()
    losses.sum().backward()


def bmm_of_a_stack_permuted_after(weight, x):
    return torch.bmm(weight, x).sum((0, 1))


def norm_of_a_parameter(weight, x):
    return F.layer_norm(weight.expand(5, 2, 3, 4), (4,)).mul(x.sum()).square().sum((1, 2, 3))


def convolved_parameter(weight, x):
    """The parameter is the image, the samples are the kernels."""
    return F.conv1d(weight, x.transpose(0, 2)[:, :1].expand(-1, 3, -1)).square().sum((0, 2))


@pytest.mark.parametrize("use", [bmm_of_a_stack_permuted_after, norm_of_a_parameter, convolved_parameter])
@pytest.mark.parametrize("below", [False, True])
def test_what_a_rule_gives_up_is_written_down_before_it_is_forgotten(use, below):
    torch.manual_seed(0)
    weight, x = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5)
    losses = lambda: use(weight.exp() if below else weight, x)  # noqa: E731
    for _ in range(2):
        expected = loop(losses(), {"0": weight})["0"]
        freed = gradrein.per_sample(losses(), [weight], retain_graph=False)
        torch.testing.assert_close(freed.grads()["0"], expected)
        torch.testing.assert_close(freed.norms(), expected.flatten(1).norm(dim=1))


def test_the_budget_is_spent_once():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3)))
    losses = model(torch.randn(3, 4, 9, 9)).square().sum((1, 2, 3))
    two = 2 * 4 * 3 * model[0].weight.numel()
    ps = gradrein.per_sample(losses, model, retain_graph=False, memory_budget=two)
    ps.clip_(1.0)
    assert ps.plan().count("stored") == 2, ps.plan()
