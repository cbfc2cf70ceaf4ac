"""What stands around the ops: hooks, checkpoints, custom functions, precision."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..cases import flat_sum
from .base import (
    ANY,
    COUPLED,
    EITHER,
    FREE,
    OFF_ON,
    PACKED,
    Routing,
    add,
    document_mask,
    mean_of,
    packed_rows,
    picked,
    routing,
    square,
    vectors,
)

# Hooks ----------------------------------------------------------------------------------------------------------------


def hooked(h, hook):
    h.register_hook(hook)
    return h


@routing({0.0: EITHER, 1.0: EITHER})
def hook_that_mixes_rows(m, x, c):
    return flat_sum(m.b(hooked(torch.tanh(m.a(x)), lambda g: g + c * g.flip(0))))


@routing({0.0: EITHER, 1.0: EITHER})
def hook_on_the_losses(m, x, c):
    return hooked(flat_sum(m.a(x)), lambda g: g + c * g.sum())


@routing({1.0: FREE, 2.0: FREE})
def kept_gradient(m, x, c):
    h = torch.tanh(c * m.a(x))
    h.retain_grad()
    return flat_sum(m.b(h))


# Checkpoints ----------------------------------------------------------------------------------------------------------


def in_checkpoint(verdicts, data=vectors):
    """Add the routing under a checkpoint."""

    def added(function):
        def losses(m, x, setting):
            h = torch.tanh(m.a(x))
            return flat_sum(checkpoint(lambda h: function(m, h, setting), h, use_reentrant=False))

        add(function.__name__, Routing(losses, verdicts, data))
        return function

    return added


@in_checkpoint(PACKED, packed_rows)
def checkpointed_documents(m, h, setting):
    return (document_mask(len(h) // 2, setting)[:, :, None].double() * m.b(h)).sum(1)


@in_checkpoint(OFF_ON)
def checkpointed_gate(m, h, c):
    return h + c * m.b(h).mean(0)


@in_checkpoint({"in order": FREE, "shuffled": FREE, "twice": COUPLED})
def checkpointed_index(m, h, setting):
    return m.b(h)[picked(len(h), setting)]


@in_checkpoint(ANY)
def checkpointed_mask(m, h, c):
    return m.norm(m.b(h * torch.tensor([[1.0], [c]]).repeat(len(h) // 2, 1)))


# Custom functions -----------------------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, c):
        ctx.c = c
        return h.round()

    @staticmethod
    def backward(ctx, g):
        return ctx.c * g, None


class Mix(torch.autograd.Function):
    """Add rows of other samples; its node has no attribute that shows them."""

    @staticmethod
    def forward(ctx, h, c):
        ctx.c = c
        return h + c * h.flip(0)

    @staticmethod
    def backward(ctx, g):
        return g + ctx.c * g.flip(0), None


@routing(ANY)
def straight_through(m, x, c):
    return flat_sum(m.b(StraightThrough.apply(3 * m.a(x), c)))


@routing(OFF_ON, opaque=True)
def mixed_by_a_function(m, x, c):
    return flat_sum(m.b(Mix.apply(torch.tanh(m.a(x)), c)))


# Precision ------------------------------------------------------------------------------------------------------------


def in_precisions(verdicts, data=vectors):
    """Add the routing in float32, bfloat16 and float16."""

    def added(function):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"{function.__name__}_{str(dtype).removeprefix('torch.')}"
            add(name, Routing(function, verdicts, data, dtype=dtype))
        return function

    return added


@in_precisions({1.0: EITHER, 0.7: COUPLED})
def mixup_in(m, x, lam):
    h = m.a(x)
    return flat_sum(lam * h + (1 - lam) * h.flip(0))


@in_precisions(PACKED, packed_rows)
def documents_in(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of((mask[:, :, None].to(x.dtype) * m.a(x)).sum(1), mask)


@in_precisions(ANY, square)
def mask_in(m, x, c):
    mask = torch.ones(len(x), 1, dtype=x.dtype)
    mask[1] = c
    return flat_sum(m.b(F.relu(m.a(x)) * mask))


@routing({1.0: EITHER, 0.7: COUPLED}, dtype=torch.float32, autocast=True)
def mixup_under_autocast(m, x, lam):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(F.relu(m.a(x)))
        mixed = lam * h + (1 - lam) * h.flip(0)
    return flat_sum(mixed.float())
