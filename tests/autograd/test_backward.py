"""`backward` against torch's own: implicit gradients, arguments, inputs, threads."""

import inspect

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradrein
from gradrein import errors

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def leaf():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


# Implicit gradients are created, and the engine runs.


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_scalar_starts_from_one(dtype, shape):
    weight = torch.full((3,), 2.0, dtype=dtype, requires_grad=True)
    gradrein.backward(weight.square().sum().reshape(shape))
    assert torch.equal(weight.grad, torch.full((3,), 4.0, dtype=dtype))


def test_implicit_gradients_are_made_per_output(leaf):
    gradrein.backward([leaf.sum(), (leaf * 2).sum(), leaf * 3], [None, None, torch.ones(3)])
    assert leaf.grad.tolist() == [6.0, 6.0, 6.0]


def test_an_edge_starts_from_one_as_well(leaf):
    gradrein.backward(get_gradient_edge(leaf.prod()))
    assert leaf.grad.tolist() == [6.0, 3.0, 2.0]


def test_the_engine_runs_hooks_and_accumulates_and_frees(leaf):
    hooked = []
    loss = leaf.exp().sum()
    leaf.register_hook(lambda grad: hooked.append("tensor"))
    leaf.register_post_accumulate_grad_hook(lambda p: hooked.append("accumulated"))
    leaf.grad = torch.ones(3)
    gradrein.backward(loss)
    assert torch.equal(leaf.grad, leaf.detach().exp() + 1)
    assert hooked == ["tensor", "accumulated"]
    with pytest.raises(RuntimeError, match="second time"):
        gradrein.backward(loss)


# The rest of the contract.


def test_signature_is_torchs():
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(gradrein.backward) == shape(torch.autograd.backward)


def test_explicit_gradient_single_and_sequence(leaf):
    gradrein.backward(leaf * 1, torch.tensor([1.0, 0.0, 2.0]))
    gradrein.backward([leaf * 1], [torch.tensor([1.0, 0.0, 2.0])])
    gradrein.backward((out for out in [leaf * 1]), (torch.ones(3),))
    assert leaf.grad.tolist() == [3.0, 1.0, 5.0]


def test_nothing_to_do_is_fine():
    assert gradrein.backward([]) is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_create_graph_makes_the_gradient_differentiable_and_retains(leaf):
    loss = leaf.pow(3).sum()
    gradrein.backward(loss, create_graph=True)
    (second,) = gradrein.grad(leaf.grad.sum(), leaf)
    assert torch.equal(second, 6 * leaf.detach())
    gradrein.backward(loss, create_graph=True)
    assert torch.equal(leaf.grad.detach(), 6 * leaf.detach().square())
    leaf.grad = None


@pytest.mark.parametrize("form", ["tensor", "list", "edge", "dict", "generator"])
def test_inputs_restrict_where_gradients_go(leaf, form):
    other = torch.ones(3, requires_grad=True)
    inputs = {
        "tensor": leaf,
        "list": [leaf],
        "edge": [get_gradient_edge(leaf)],
        "dict": {"leaf": leaf},
        "generator": (t for t in [leaf]),
    }[form]
    gradrein.backward((leaf * other).sum(), inputs=inputs)
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0]
    assert other.grad is None


@pytest.mark.parametrize("empty", [[], (), {}])
def test_empty_inputs_are_refused(leaf, empty):
    with pytest.raises(RuntimeError, match=r"`inputs` argument to `backward\(\)` cannot be empty"):
        gradrein.backward(leaf.sum(), inputs=empty)


def test_a_module_without_parameters_is_empty_and_said_so(leaf):
    with pytest.raises(errors.BackwardError, match="a module without trainable parameters"):
        gradrein.backward(leaf.sum(), inputs=nn.ReLU())


def test_a_zero_dimensional_tensor_is_not_an_empty_sequence():
    scalar = torch.tensor(2.0, requires_grad=True)
    gradrein.backward(scalar * 3, inputs=scalar)
    assert scalar.grad.item() == 3.0
    assert gradrein.grad(scalar * 3, scalar)[0].item() == 3.0


def test_only_dicts_among_mappings(leaf):
    from collections import OrderedDict

    with pytest.raises(TypeError, match="must be a dict, not OrderedDict"):
        gradrein.backward(leaf.sum(), inputs=OrderedDict(leaf=leaf))


def test_both_names_of_the_gradients_are_refused(leaf):
    with (
        pytest.warns(FutureWarning, match="deprecated"),
        pytest.raises(RuntimeError, match="arguments both passed to `backward"),
    ):
        gradrein.backward(leaf * 1, torch.ones(3), grad_variables=torch.ones(3))
    with pytest.warns(FutureWarning, match="`grad_variables` is deprecated"):
        gradrein.backward(leaf * 1, grad_variables=torch.ones(3))
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0]


def test_inside_a_func_transform_it_is_refused():
    def inner(x):
        gradrein.backward(x.sum())
        return x.sum()

    with pytest.raises(RuntimeError, match="inside a functorch transform"):
        torch.func.grad(inner)(torch.ones(2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(layout):
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    out = nested * 2
    gradrein.backward(out, torch.ones_like(out))
    assert all(torch.equal(g, 2 * p) for g, p in zip(nested.grad.unbind(), parts, strict=True))
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        gradrein.backward(nested * 2, torch.ones(3, 3))
