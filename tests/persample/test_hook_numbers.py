"""The proof about hooks rests on torch numbering every hook that is registered from Python: on any torch."""

import pytest
import torch

import gradrein
from gradrein._torch import hooks
from gradrein._torch.nodes import current_sequence_nr


def on_tensor(out):
    out.register_hook(lambda grad: grad)


def on_node(out):
    out.grad_fn.register_hook(lambda *_: None)


def before_node(out):
    out.grad_fn.register_prehook(lambda *_: None)


def on_custom_node(out):
    twice = Twice.apply(out)
    twice.grad_fn.register_hook(lambda *_: None)


def before_custom_node(out):
    twice = Twice.apply(out)
    twice.grad_fn.register_prehook(lambda *_: None)


def on_several(out):
    torch.autograd.graph.register_multi_grad_hook([out], lambda *_: None)


def on_module(out):
    layer = torch.nn.Linear(3, 3)
    layer.register_full_backward_hook(lambda *_: None)
    layer(out)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


REGISTER = [on_tensor, on_node, before_node, on_custom_node, before_custom_node, on_several, on_module]


@pytest.mark.parametrize("register", REGISTER, ids=lambda register: register.__name__)
def test_every_hook_is_counted(register):
    out = torch.ones(3, requires_grad=True) * 2
    before = hooks.hooks_registered()
    register(out)
    assert hooks.hooks_registered() > before


@pytest.mark.parametrize("register", [on_node, before_node], ids=lambda register: register.__name__)
def test_a_hook_on_a_node_is_found_and_asking_is_not_counted(register):
    out = torch.ones(3, requires_grad=True) * 2
    before = hooks.hooks_registered()
    assert not hooks.has_node_hooks(out.grad_fn)
    assert hooks.hooks_registered() == before
    register(out)
    assert hooks.has_node_hooks(out.grad_fn)


def test_every_op_takes_a_number_of_its_thread():
    first = current_sequence_nr()
    out = torch.ones(3, requires_grad=True) * 2
    assert first <= out.grad_fn._sequence_nr() < current_sequence_nr()
    assert out.grad_fn.next_functions[0][0]._sequence_nr() == 2**64 - 1
    custom = Twice.apply(out)
    assert out.grad_fn._sequence_nr() < custom.grad_fn._sequence_nr() < current_sequence_nr()


def test_hooks_of_others_in_every_step_are_no_reason_to_ask_the_engine():
    layer, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    for _ in range(3):
        other.register_forward_hook(lambda *_: None)
        hidden = other(torch.randn(5, 3))
        hidden.register_hook(lambda grad: 2 * grad)
        hidden.sum().backward()
        losses = layer(torch.randn(5, 3)).square().sum(1)
        assert "proved" in str(gradrein.per_sample(losses, layer).plan())
    losses = layer(torch.randn(5, 3)).square().sum(1)
    losses.register_hook(lambda grad: 2 * grad)
    assert "alone" in str(gradrein.per_sample(losses, layer, allow_opaque=True).plan())
