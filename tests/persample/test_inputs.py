"""Inputs that need a gradient: what is made from them before the first layer is recorded, so that mixing is seen."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein
from gradrein.errors import BatchCouplingError

from .oracle import flat, loop

SAMPLES, D = 5, 6

MIXED = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "fourier": lambda x: torch.fft.fft(x, dim=0).real,
    "layer_norm over the batch": lambda x: F.layer_norm(x, x.shape),
    "convolution over the batch": lambda x: F.conv1d(x[None], torch.randn(len(x), len(x), 1, dtype=x.dtype))[0],
    "scaled, then centred": lambda x: (lambda y: y - y.mean(0))(2 * x),
    "scaled, then mixed up": lambda x: (lambda y: 0.7 * y + 0.3 * y.flip(0))(2 * x),
    "scaled, then divided by the norm of all": lambda x: (lambda y: y / y.norm())(2 * x),
}


def model():
    return nn.Linear(D, 4).double()


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def refused(losses, layer):
    with pytest.raises(BatchCouplingError):
        gradrein.per_sample(losses, layer)
    answered(losses, layer, allow_coupling=True)


def answered(losses, layer, **settings):
    expected = flat(loop(losses, dict(layer.named_parameters())))
    torch.testing.assert_close(flat(gradrein.per_sample(losses, layer, **settings).grads()), expected)


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("folded", [1, 3])
def test_mixed_before_the_first_layer(mix, folded):
    layer = model()
    for _ in range(2):
        y = layer(mix(leaf(SAMPLES * folded, D)))
        losses = y.sin().reshape(SAMPLES, -1).sum(1)
        refused(losses, layer)
        refused(losses[torch.randperm(SAMPLES)], layer)  # an index does not hide it


def test_a_batch_that_a_weight_is_multiplied_with_as_a_whole():
    layer = nn.Linear(D, SAMPLES, bias=False).double()
    for x in (leaf(SAMPLES, D), 2 * leaf(SAMPLES, D)):
        refused((layer.weight @ x.T).sin().sum(1), layer)


def test_columns_of_samples_whose_rows_an_index_has_moved():
    layer = nn.Linear(D, SAMPLES).double()
    order = torch.randperm(SAMPLES * 3)
    moved = layer(leaf(SAMPLES, 3, D)).reshape(SAMPLES * 3, SAMPLES)[order].view(SAMPLES, 3, SAMPLES)
    refused(moved.swapaxes(0, 2).sin().sum((1, 2)), layer)


NOT_MIXED = {
    "ordinary": lambda layer, x: layer(2 * leaf(SAMPLES, D)).sin().sum(1),
    "samples second": lambda layer, x: layer(2 * leaf(3, SAMPLES, D)).sin().sum((0, 2)),
    "other rows": lambda layer, x: layer((2 * leaf(SAMPLES, D))[torch.randperm(SAMPLES)]).sin().sum(1),
    "a mask": lambda layer, x: layer(x * (2 * leaf(SAMPLES, D)).tanh()).sin().sum((1, 2)),
    "a prompt": lambda layer, x: layer(torch.cat([(2 * leaf(SAMPLES, D)).expand_as(x), x], 1)).sin().sum((1, 2)),
    "a repeated prompt": lambda layer, x: layer(torch.cat([leaf(SAMPLES, D).repeat(SAMPLES, 1, 1), x], 1)).sum((1, 2)),
    "a memory": lambda layer, x: F.linear(layer(x), 2 * leaf(SAMPLES, 4)).sin().sum((1, 2)),
    "a weight before it": lambda layer, x: layer(F.linear(x, 2 * leaf(D, D))).sin().sum((1, 2)),
    "a weight of as many rows": lambda layer, x: layer(F.linear(x.mT, leaf(SAMPLES, SAMPLES)).mT).sin().sum((1, 2)),
}


@pytest.mark.parametrize("losses", NOT_MIXED.values(), ids=NOT_MIXED)
def test_what_all_samples_share_is_not_mixed(losses):
    layer = model()
    for _ in range(2):
        x = torch.randn(SAMPLES, SAMPLES, D, dtype=torch.float64)
        answered(losses(layer, x), layer)
