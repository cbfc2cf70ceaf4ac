"""Tensors that are not dense: right where torch can, else refused with what to do."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradrein
from gradrein.errors import ArgumentError, UnsupportedOperationError

from .oracle import loop

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


def components(layout):
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_data(layout):
    weight, bias = (nn.Parameter(torch.randn(*shape)) for shape in ((4, 3), (3,)))
    x = LAYOUTS[layout](torch.randn(5, 4).relu())
    losses = torch.addmm(bias, x, weight).square().sum(1)
    parameters = {"weight": weight, "bias": bias}
    ps = gradrein.per_sample(losses, parameters)
    torch.testing.assert_close(ps.grads(), loop(losses, parameters))
    ps.clip_(1.0)
    ps.audit()


def test_sparse_data_that_torch_cannot_differentiate():
    """torch says so itself, here as in a backward pass."""
    weight = nn.Parameter(torch.randn(4, 3))
    losses = (torch.randn(5, 4).to_sparse_bsr((1, 1)) @ weight).square().sum(1)
    with pytest.raises(RuntimeError, match="not implemented for|unsupported combination of layouts"):
        gradrein.per_sample(losses, {"weight": weight}).norms()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_parameter(layout):
    weight = LAYOUTS[layout](torch.randn(4, 4)).requires_grad_()
    losses = (torch.randn(5, 4) @ weight.to_dense()).square().sum(1)
    with pytest.raises(UnsupportedOperationError, match="'weight' is not a dense tensor but torch.sparse_.*in a dense"):
        gradrein.per_sample(losses, {"weight": weight})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_on_the_way(layout):
    model = nn.Linear(4, 3)
    for losses in (
        model(components(layout)).to_padded_tensor(0.0).square().sum((1, 2)),
        torch.stack([out.square().sum() for out in model(components(layout)).unbind()]),
    ):
        with pytest.raises(UnsupportedOperationError, match="nested tensor.*to_padded_tensor"):
            gradrein.per_sample(losses, model)


def test_a_nested_input_that_needs_a_gradient():
    model, x = nn.Linear(4, 3), components(torch.strided).requires_grad_()
    with pytest.raises(UnsupportedOperationError, match="an input is a nested tensor"):
        gradrein.per_sample(model(x.to_padded_tensor(0.0)).square().sum((1, 2)), model)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_that_were_padded_first(layout):
    model = nn.Linear(4, 3)
    losses = model(components(layout).to_padded_tensor(0.0)).square().sum((1, 2))
    torch.testing.assert_close(gradrein.per_sample(losses, model).grads(), loop(losses, dict(model.named_parameters())))


def test_losses_without_values():
    model = nn.Linear(4, 3, device="meta")
    for samples in (5, 0):
        with pytest.raises(ArgumentError, match="no values: it is on the meta device"):
            gradrein.per_sample(model(torch.randn(samples, 4, device="meta")).sum(1), model)
    with FakeTensorMode():
        model = nn.Linear(4, 3)
        losses = model(torch.randn(5, 4)).sum(1)
        with pytest.raises(ArgumentError, match="no values: it is a fake tensor"):
            gradrein.per_sample(losses, model)
