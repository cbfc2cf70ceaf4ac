"""Owners are proved only where values cannot change them; otherwise the engine is asked at every step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradrein

from .oracle import flat, loop


def right(losses, model):
    expected = loop(losses, dict(model.named_parameters()))
    ps = gradrein.per_sample(losses, model)
    torch.testing.assert_close(flat(ps.grads()), flat(expected))
    return "proved" in ps.plan().splitlines()[0]


def test_the_owners_of_a_plain_model_are_proved():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    answers = [
        right(F.cross_entropy(model(torch.randn(5, 3)), torch.tensor([0, 1, 0, 1, 0]), reduction="none"), model)
        for _ in range(3)
    ]
    assert answers[1:] == [True, True]  # hooks that others registered before may put the first in doubt


def mixed_by_matrix(model, order):
    return torch.tanh(torch.eye(4)[order] @ torch.tanh(model(torch.randn(4, 3)))).sum(1)


def mixed_by_batched_matrix(model, order):
    h = torch.tanh(model(torch.randn(4, 3)))
    return torch.tanh(torch.bmm(torch.eye(4)[order][None], h[None]))[0].sum(1)


def mixed_by_index(model, order):
    return torch.tanh(torch.tanh(model(torch.randn(4, 3)))[order]).sum(1)


def mixed_by_mask(model, order):
    """Attention between samples under a mask that happens to let each see one sample only."""
    h = torch.tanh(model(torch.randn(4, 3)))
    mask = torch.zeros(4, 4).masked_fill(torch.eye(4)[order] == 0, float("-inf"))
    with sdpa_kernel(SDPBackend.MATH):  # a fused kernel rounds, so that gradients that are zero are not quite
        mixed = F.scaled_dot_product_attention(h[None], h.detach()[None], h[None], attn_mask=mask[None])
    return torch.tanh(mixed)[0].sum(1)


def gathered(model, order):
    h = torch.tanh(model(torch.randn(4, 3)))
    return torch.tanh(h.gather(0, torch.tensor(order)[:, None].expand(4, 5))).sum(1)


@pytest.mark.parametrize("mix", [mixed_by_matrix, mixed_by_batched_matrix, mixed_by_index, mixed_by_mask, gathered])
def test_rows_moved_by_value_are_asked_every_time(mix):
    model = nn.Linear(3, 5)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        assert not right(mix(model, order), model)


def test_rows_without_a_gradient_today_may_have_one_tomorrow():
    model = nn.Linear(3, 5)
    for mask in ([1.0, 0, 0, 0], [0.0, 1, 1, 1], [1.0, 1, 1, 1]):
        right(model(torch.randn(4, 3)).square().sum(1) * torch.tensor(mask), model)
