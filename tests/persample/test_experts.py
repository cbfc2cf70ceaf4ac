"""Mixtures of experts whose rows are multiplied in groups. torch has no grouped product in float64."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.persample.representations.members import Members

from .cases import B, Calls, experts, flat_sum
from .oracle import flat, loop

pytestmark = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
E = 5


def grouped_experts(steps):
    """As transformers runs mixtures of experts: rows in groups, weights transposed or not, biases looked up."""
    model = Calls(
        None,
        gate=nn.Linear(8, E),
        up=nn.Parameter(torch.randn(E, 16, 8)),
        up_bias=nn.Parameter(torch.randn(E, 16)),
        down=nn.Parameter(torch.randn(E, 16, 8)),
    )
    x = torch.randn(B, steps, 8)

    def call(rows, chosen):
        offs = torch.bincount(chosen, minlength=E).cumsum(0).int()
        h = torch._grouped_mm(rows, model.up.transpose(-2, -1), offs=offs) + model.up_bias[chosen]
        return torch._grouped_mm(torch.tanh(h), model.down, offs=offs)

    return model, lambda: flat_sum(experts(x, model.gate, call))


@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize("retain_graph", [True, False])
def test_grouped_experts(steps, retain_graph):
    torch.set_default_dtype(torch.float32)
    model, losses = grouped_experts(steps)
    for _ in range(2):
        out = losses()
        expected = loop(out, dict(model.named_parameters()))
        ps = gradrein.per_sample(out, model, retain_graph=retain_graph)
        assert "one by one" not in ps.plan(), ps.plan()
        found = ps.grads()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
        each = flat(expected)
        torch.testing.assert_close(ps.norms(), each.norm(dim=1))
        torch.testing.assert_close(ps.dot(), each @ each.mean(0), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(ps.gram(), each @ each.T, rtol=1e-4, atol=1e-3)
        model.zero_grad()
        ps.weighted_(torch.arange(4.0))
        written = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(written, torch.arange(4.0) @ each, rtol=1e-4, atol=1e-3)


def test_experts_that_nobody_chose_and_rows_beyond_the_last_group():
    torch.set_default_dtype(torch.float32)
    weight, x = nn.Parameter(torch.randn(4, 8, 8)), torch.randn(B * 3, 8)
    offs = torch.tensor([0, 8, 8, 8], dtype=torch.int32)

    def losses():
        rows = torch._grouped_mm(x, weight, offs=offs)
        rows = torch.where(torch.arange(12)[:, None] < 8, rows, 0)
        return flat_sum(rows.view(B, 3, 8))

    out = losses()
    expected = loop(out, {"w": weight})["w"]
    torch.testing.assert_close(gradrein.per_sample(out, {"w": weight}).grads()["w"], expected)


def test_one_sample_that_sends_all_its_rows_to_one_expert():
    """Pairs of sample and expert with very different numbers of rows."""
    torch.set_default_dtype(torch.float32)
    weight, x = nn.Parameter(torch.randn(E, 8, 8)), torch.randn(60, 8)
    owner = torch.cat([torch.zeros(40), torch.arange(20) % 4]).long()
    expert = torch.cat([torch.full((40,), 1), torch.arange(20) % E]).sort(stable=True)
    offs = torch.bincount(expert.values, minlength=E).cumsum(0).int()
    owner, x = owner[expert.indices], x[expert.indices]
    out = torch._grouped_mm(x, weight, offs=offs).square().sum(1)
    losses = torch.zeros(4).index_add(0, owner, out)
    expected = loop(losses, {"w": weight})["w"].flatten(1)
    ps = gradrein.per_sample(losses, {"w": weight})
    torch.testing.assert_close(ps.grads()["w"].flatten(1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ps.norms(), expected.norm(dim=1))
    torch.testing.assert_close(ps.dot(), expected @ expected.mean(0), rtol=1e-4, atol=1e-2)
    ps.weighted_(torch.arange(4.0))
    torch.testing.assert_close(weight.grad.flatten(), torch.arange(4.0) @ expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("order", ["by member", "by sample", "as they come"])
@pytest.mark.parametrize("rows", [0, 1, 30, 300])
@pytest.mark.parametrize("even", [False, True])
def test_rows_in_any_order(order, rows, even):
    owner = torch.randint(-1, B, (rows,))
    member = torch.arange(rows) % E if even else torch.randint(0, E + 1, (rows,))
    if order != "as they come":
        by = torch.argsort((member if order == "by member" else owner), stable=True)
        owner, member = owner[by], member[by]
    left, right, weights = torch.randn(rows, 3), torch.randn(rows, 4), torch.randn(B)
    expected = torch.zeros(B, E, 3, 4)
    for b, e, x, y in zip(owner, member, left, right, strict=True):
        if b >= 0 and e < E:
            expected[b, e] += torch.outer(x, y)
    grads = Members(left, right, owner, member, B, E)
    torch.testing.assert_close(grads.dense(), expected)
    torch.testing.assert_close(grads.dense(slice(1, 3)), expected[1:3])
    torch.testing.assert_close(grads.norms(), expected.flatten(1).double().norm(dim=1))
    torch.testing.assert_close(grads.weighted(weights), torch.tensordot(weights, expected, 1))
