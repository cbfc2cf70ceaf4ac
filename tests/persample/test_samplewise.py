"""Functions that are declared to treat rows alone: owners are proved through them, and an audit finds a false one."""

import random

import pytest
import torch
from torch import nn

import gradrein
from functions import function
from gradrein.errors import ArgumentTypeError, AuditError, GradreinError, UnsupportedOperationError

from .oracle import loop

B, T, D = 4, 3, 4  # a weight has as many rows as there are samples


def squared():
    return function("Declared", torch.square, lambda g, x: 2 * x * g)


def losses_of(declared, model, x, dim=0):
    hidden = declared.apply(model(x.movedim(0, dim)).sin()).movedim(dim, 0)
    return hidden.flatten(1).square().sum(1)


@pytest.mark.parametrize("dim", [0, 1])
def test_owners_are_proved_through_it(dim):
    declared, model, x = squared(), nn.Linear(D, D), torch.randn(B, T, D)
    losses = losses_of(declared, model, x, dim)
    expected = loop(losses, dict(model.named_parameters()))
    assert "each loss is differentiated alone" in gradrein.per_sample(losses, model).plan()
    gradrein.declare_samplewise(declared, dim=dim)
    for _ in range(2):
        ps = gradrein.per_sample(losses_of(declared, model, x, dim), model)
        assert "proved" in ps.plan()
        torch.testing.assert_close(ps.grads(), expected)
        ps.audit()
    gradrein.declare_samplewise(declared, dim=1 - dim)  # what was proved before does not hold any more
    assert "proved" not in gradrein.per_sample(losses_of(declared, model, x, dim), model).plan()


Product = function("Product", torch.matmul, lambda g, x, weight: (g @ weight.T, x.T @ g))


def test_an_input_that_all_rows_share():
    """A weight made from a parameter, with as many rows as the batch."""
    gradrein.declare_samplewise(Product, inputs=[0])
    model, x = nn.Linear(D, D), torch.randn(B, D)
    losses = Product.apply(model(x), model.weight.exp()).square().sum(1)
    with pytest.raises(UnsupportedOperationError, match="is used by `ProductBackward`"):
        gradrein.per_sample(losses, model)
    ps = gradrein.per_sample(losses, model, allow_opaque=True)
    torch.testing.assert_close(ps.grads(), loop(losses, dict(model.named_parameters())))
    assert "proved" in ps.plan()
    ps.audit()


def false_ones(draw):
    c, order = 0.1 + draw.random(), torch.tensor([1, 2, 3, 0])
    yield function("Declared", lambda x: x + c * x[order], lambda g, _: g + c * g[order.argsort()])
    yield function("Declared", lambda x: x.cumsum(0), lambda g, _: g.flip(0).cumsum(0).flip(0))
    yield function("Declared", lambda x: x[order] * c, lambda g, _: g[order.argsort()] * c)
    yield function("Declared", lambda x: x - c * x.mean(0), lambda g, _: g - c * g.mean(0))


@pytest.mark.parametrize("seed", range(5))
def test_an_audit_finds_a_false_declaration_every_time(seed):
    torch.manual_seed(seed)
    for declared in false_ones(random.Random(seed)):
        gradrein.declare_samplewise(declared)
        model = nn.Linear(D, D)
        ps = gradrein.per_sample(losses_of(declared, model, torch.randn(B, D)), model)
        with pytest.raises(AuditError, match="was declared by declare_samplewise"):
            ps.audit()


def test_a_name_that_is_known():
    flash, model = (
        function("FlashAttnFunc", lambda x: 3 * x, lambda g, _: 3 * g, "flash_attn.flash_attn_interface"),
        nn.Linear(D, D),
    )
    dense = flash.apply(model(torch.randn(B, T, 2, D)).sin()).flatten(1).square().sum(1)
    assert "proved" in gradrein.per_sample(dense, model).plan()
    packed = flash.apply(model(torch.randn(B, 2, D)).sin()).flatten(1).square().sum(1)  # as in its version 1
    assert "proved" not in gradrein.per_sample(packed, model).plan()


class Scanned(torch.autograd.Function):
    """What the scan of mamba has: rows, and a weight with fewer dimensions that may have as many entries."""

    @staticmethod
    def forward(ctx, u, a):
        ctx.save_for_backward(u, a)
        return u * a.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        u, a = ctx.saved_tensors
        return g * a.sum(1, keepdim=True), (g * u).sum((0, 2))[:, None].expand_as(a)


Scanned.__module__, Scanned.__qualname__ = "mamba_ssm.ops.selective_scan_interface", "SelectiveScanFn"


def test_a_weight_with_as_many_entries_as_rows_is_shared():
    model, a, x = nn.Linear(D, B), nn.Parameter(torch.randn(B, 2)), torch.randn(B, T, D)
    losses = Scanned.apply(model(x).sin().transpose(1, 2), a).flatten(1).square().sum(1)
    ps = gradrein.per_sample(losses, {"a": a, **dict(model.named_parameters())}, allow_opaque=True)
    assert "proved" in ps.plan()
    torch.testing.assert_close(ps.grads(), loop(losses, {"a": a, **dict(model.named_parameters())}))


def test_the_gelu_of_bloom():
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=11)
    model, ids = transformers.BloomForCausalLM(config).eval(), torch.randint(11, (3, 5))
    logits = model(input_ids=ids).logits
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").sum(1)
    ps = gradrein.per_sample(losses, model)
    assert "alone" not in ps.plan()
    torch.testing.assert_close(ps.grads(), loop(losses, dict(model.named_parameters())), rtol=1e-4, atol=1e-4)
    ps.audit()


def test_what_is_no_function():
    for given in (3, nn.Linear, lambda x: x):
        with pytest.raises(ArgumentTypeError, match=r"expected a torch\.autograd\.Function, as in"):
            gradrein.declare_samplewise(given)


@pytest.mark.parametrize("inputs", [0, "x", [1.5], [-1], ["x"]])
def test_inputs_are_positions(inputs):
    with pytest.raises(GradreinError, match="inputs"):
        gradrein.declare_samplewise(function("Given", torch.sin, lambda g, x: g * x.cos()), inputs=inputs)
