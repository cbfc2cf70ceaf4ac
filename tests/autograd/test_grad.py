"""`grad` against torch's own."""

import inspect

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradrein
from functions import function
from gradrein import errors


@pytest.fixture
def leaf():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def test_signature_is_torchs():
    ours, theirs = (inspect.signature(grad).parameters.values() for grad in (gradrein.grad, torch.autograd.grad))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_leaves_grad_alone_and_returns_a_tuple(leaf):
    found = gradrein.grad(leaf.square().sum(), leaf)
    assert isinstance(found, tuple)
    assert found[0].tolist() == [2.0, 4.0, 6.0]
    assert leaf.grad is None


def test_inner_tensors_and_edges(leaf):
    hidden = leaf.exp()
    loss = hidden.square().sum()
    by_tensor = gradrein.grad(loss, hidden, retain_graph=True)[0]
    by_edge = gradrein.grad(get_gradient_edge(loss), get_gradient_edge(hidden))[0]
    assert torch.equal(by_tensor, by_edge)
    assert torch.equal(by_tensor, 2 * hidden.detach())


def test_a_module_comes_back_as_a_dict_of_its_trainable_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    found = gradrein.grad(model(torch.ones(1, 2)).sum(), model)
    assert list(found) == ["0.bias", "1.weight", "1.bias"]
    assert found["1.bias"].tolist() == [1.0]


def test_empty_inputs_are_refused(leaf):
    with pytest.raises(RuntimeError, match=r"`inputs` argument to `grad\(\)` cannot be empty"):
        gradrein.grad(leaf.sum(), [])


def test_retain_graph_none_follows_create_graph(leaf):
    loss = leaf.exp().sum()
    gradrein.grad(loss, leaf, create_graph=True)
    gradrein.grad(loss, leaf)
    with pytest.raises(errors.GraphFreedError):
        gradrein.grad(loss, leaf)


def test_only_inputs_is_deprecated(leaf):
    with pytest.warns(FutureWarning, match="only_inputs argument is deprecated"):
        (found,) = gradrein.grad(leaf.sum(), leaf, only_inputs=False)
    assert found.tolist() == [1.0, 1.0, 1.0]


def test_unused_is_an_error_none_or_zeros(leaf):
    other = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used"):
        gradrein.grad(leaf.sum(), [leaf, other])
    assert gradrein.grad(leaf.sum(), [leaf, other], allow_unused=True)[1] is None
    zeros = gradrein.grad(leaf.sum(), [leaf, other], materialize_grads=True)[1]
    assert zeros.tolist() == [0.0, 0.0]
    assert not zeros.requires_grad
    assert gradrein.grad(leaf.sum(), [leaf, other], materialize_grads=True, create_graph=True)[1].requires_grad


def test_what_cannot_be_materialized(leaf):
    with pytest.raises(ValueError, match="Expected allow_unused to be True or not passed"):
        gradrein.grad(leaf.sum(), leaf, materialize_grads=True, allow_unused=False)
    other = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="materialize_grads cannot be used when"):
        gradrein.grad(leaf.sum(), [get_gradient_edge(other)], materialize_grads=True)


# Batches of gradients.


def test_batched_with_an_edge_and_with_several_outputs(leaf):
    hidden = leaf.square()
    edge = get_gradient_edge(hidden)
    (found,) = gradrein.grad([edge, leaf.sum()], leaf, [torch.eye(3), torch.ones(3)], is_grads_batched=True)
    assert torch.equal(found, torch.diag(2 * leaf.detach()) + 1)


def test_unused_in_a_batch_is_none_or_a_batch_of_zeros(leaf):
    other = torch.ones(2, requires_grad=True)
    out, grads = leaf * 1, torch.ones(4, 3)
    batch = {"is_grads_batched": True, "retain_graph": True}
    assert gradrein.grad(out, [leaf, other], grads, allow_unused=True, **batch)[1] is None
    assert gradrein.grad(out, [leaf, other], grads, materialize_grads=True, **batch)[1].shape == (4, 2)


# Cannot be vectorised: leaves torch in its backward.
Numpy = function("Numpy", lambda x: x * 2, lambda grad, _: torch.from_numpy(grad.detach().numpy() * 2))


def behind_a_hook(leaf):
    """Make an output behind a hook that branches on numbers, which a batch does not have."""
    hidden = leaf.exp()
    hidden.register_hook(lambda grad: grad * 2 if float(grad.sum()) > 0 else grad)
    return hidden.square()


@pytest.mark.parametrize("make", [Numpy.apply, behind_a_hook], ids=["Function", "hook"])
def test_what_torch_cannot_vectorise_is_refused_with_advice(leaf, make):
    with pytest.raises(errors.BackwardError, match=r"(?s)torch cannot vectorise this pass.*once per gradient instead"):
        gradrein.grad(make(leaf), leaf, torch.eye(3), is_grads_batched=True)


def test_what_torch_vectorises_wrongly_is_refused():
    x = torch.randn(3, 3, requires_grad=True)
    out = torch.as_strided_scatter(x, torch.ones(2, 2), (2, 2), (1, 2))
    with pytest.raises(errors.BackwardError, match="AsStridedScatterBackward0 wrongly, without an error"):
        gradrein.grad(out, x, torch.randn(4, 3, 3), is_grads_batched=True)


def test_batches_that_do_not_agree(leaf):
    with pytest.raises(ValueError, match=r"found grad_outputs\[0\]: 4, grad_outputs\[1\]: 3"):
        gradrein.grad([leaf.sum(), leaf.prod()], leaf, [torch.ones(4), torch.ones(3)], is_grads_batched=True)
    with pytest.raises(ValueError, match="output 0 has no grad_output"):
        gradrein.grad(leaf.sum(), leaf, is_grads_batched=True)
    with pytest.raises(ValueError, match=r"found grad_outputs\[0\]: 0"):
        gradrein.grad(leaf.sum(), leaf, torch.ones(0), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"Pass a gradient of shape \(batch, 3\)"):
        gradrein.grad(leaf * 1, leaf, torch.ones(4, 2), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"Pass a gradient of shape \(batch\)"):
        gradrein.grad(leaf.sum(), leaf, torch.ones(()), is_grads_batched=True)
