"""Gradients near the end of what a dtype can hold: whose they are is still found, or refused."""

import pytest
import torch
from torch import nn

import gradrein

from .oracle import flat, loop

B, T, D = 3, 4, 5


def batch_second():
    model = nn.Sequential(nn.Linear(D, D), nn.PReLU(D))
    x = torch.randn(T, B, D)
    return model, lambda: (model[1](model[0](x).permute(1, 2, 0)).permute(2, 0, 1) ** 2).sum((0, 2))


def routed_rows():
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    x = torch.randn(B * T, D)
    owner = torch.tensor([0, 2, 1, 1, 0, 2, 0, 0, 1, 2, 2, 0])

    def losses():
        out = model[1](torch.tanh(model[0](x)) * model[1].bias)
        return torch.zeros(B, dtype=out.dtype).index_add(0, owner, (out**2).sum(1))

    return model, losses


def one_row_that_breaks_the_pattern():
    """Rows 0, 1 and 3 look like two samples of two rows each; row 2, which is tiny, is of the first as well."""
    layer = nn.Linear(4, 1, bias=False)
    x = torch.eye(4)
    scale = torch.tensor([1.0, 1.0, 1e-34, 1.0])

    def losses():
        out = layer(x).squeeze(1) * scale.to(x)
        return torch.zeros(2, dtype=out.dtype).index_add(0, torch.tensor([0, 0, 0, 1]), out)

    return layer, losses


def close(found, expected):
    """Compare at the size of each parameter of each sample: nothing may be lost because it is small."""
    for name in expected:
        for a, b in zip(found[name].double(), expected[name].double(), strict=True):
            size = b.abs().max()
            assert float((a - b).abs().max()) <= 1e-4 * float(size), name


@pytest.mark.parametrize("build", [batch_second, routed_rows])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, [1e-33] * 3),
        (torch.float32, [1e-33, 1.0, 1e-31]),
        (torch.float32, [1e-35, 1e10, 1e-20]),
        (torch.bfloat16, [1e-33] * 3),
        (torch.float64, [1e-40] * 3),
        (torch.float64, [1e-40, 1e-200, 1.0]),
        (torch.float64, [1e-295] * 3),
        (torch.float64, [1e-303, 1e100, 1e-290]),
    ],
)
def test_equals_the_loop(build, dtype, sizes):
    torch.set_default_dtype(dtype)
    model, losses = build()
    losses = losses() * torch.tensor(sizes, dtype=dtype)
    found = gradrein.per_sample(losses, model).grads()
    expected = loop(losses, dict(model.named_parameters()))
    if dtype == torch.bfloat16:
        torch.testing.assert_close(flat(found) * 1e33, flat(expected) * 1e33, rtol=0.1, atol=0.1)
    else:
        close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_row_is_nobody_elses(dtype):
    torch.set_default_dtype(dtype)
    model, losses = one_row_that_breaks_the_pattern()
    losses = losses()
    found = gradrein.per_sample(losses, model).grads()["weight"]
    assert torch.equal(found, loop(losses, {"weight": model.weight})["weight"])


def test_the_smallest_number_has_an_owner():
    x = torch.randn(B, D).sign()
    model, tiny = nn.Linear(D, 1, bias=False), torch.tensor([1.0, 5e-324, 1.0])
    losses = (model(x).squeeze(1) * tiny)[torch.tensor([0, 2, 1])]
    found = gradrein.per_sample(losses, model).grads()
    torch.testing.assert_close(found, loop(losses, {"weight": model.weight}), rtol=0, atol=0)
