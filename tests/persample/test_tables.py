"""The table of rules and the table of owners agree."""

import re

import pytest
import torch
from torch import nn

import bridle
from bridle.persample import register_rule
from bridle.persample.ownership.ops import MOVES
from bridle.persample.rules import rules

# The root that stands above inlined checkpoints is no op of a model.
NO_OP = {"ReentrantCheckpointBackward"}


@pytest.mark.parametrize("op", sorted(set(rules()) - NO_OP))
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

    register_rule(
        "OutsideScaleBackward", lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape)
    )
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    ps = bridle.per_sample(OutsideScale.apply(x, scale).sum(1), {"scale": scale})
    torch.testing.assert_close(ps.grads()["scale"], x)
    ps.audit()
