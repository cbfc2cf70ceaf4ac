"""The table of rules and the table of owners agree."""

import re

import pytest
import torch
from torch import nn

import gradrein
from gradrein.persample import register_rule
from gradrein.persample.ownership.ops import MOVES
from gradrein.persample.rules import rules


# Those of Functions go by the Function: they have no name that torch knows.
@pytest.mark.parametrize("op", sorted(op for op in rules() if isinstance(op, str)))
def test_an_op_with_a_rule_says_where_it_sends_gradients(op):
    assert re.sub(r"Backward\d*$", "", op) in MOVES or not op.endswith(tuple("0123456789"))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum(0)


def test_a_rule_can_be_written_outside_the_package():
    class OutsideScale(Scale):
        pass

    register_rule(OutsideScale, lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape))
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    ps = gradrein.per_sample(OutsideScale.apply(x, scale).sum(1), {"scale": scale})
    torch.testing.assert_close(ps.grads()["scale"], x)
    ps.audit()


def test_another_function_of_the_same_name_does_not_get_the_rule():
    class Same(Scale):
        pass

    mine = Same

    class Same(Scale):
        pass

    register_rule(mine, lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape))
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    assert gradrein.per_sample(mine.apply(x, scale).sum(1), {"scale": scale}).grads()["scale"].equal(x)
    with pytest.raises(gradrein.errors.UnsupportedOperationError, match=r"register_rule\(Same, rule\)"):
        gradrein.per_sample(Same.apply(x, scale).sum(1), {"scale": scale})
    ps = gradrein.per_sample(Same.apply(x, scale).sum(1), {"scale": scale}, allow_opaque=True)
    assert "each loss is differentiated alone" in ps.plan()


def test_the_name_of_a_function_is_no_op():
    with pytest.raises(
        gradrein.errors.ArgumentError, match=r"other Functions may share it.*register_rule\(Scale, rule\)"
    ):
        register_rule("ScaleBackward", lambda ctx: ctx.gradient)


def test_an_op_of_a_library_goes_by_name():
    @torch.library.custom_op("gradrein_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum(0)

    scaled.register_autograd(backward, setup_context=setup)
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    losses = scaled(x, scale).sum(1)
    rule = lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape)  # noqa: E731
    register_rule(losses.grad_fn.next_functions[0][0].name(), rule)
    assert gradrein.per_sample(losses, {"scale": scale}).grads()["scale"].equal(x)
