"""Proofs of ownership over torch's own database of ops: a claim holds for every graph of the same signature."""

import random
import warnings
from itertools import islice
from math import prod

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from gradrein.persample.engine import Losses
from gradrein.persample.ops.table import moves_by_index

from .truth import claims, contradictions, flat_losses, same_form

FORMS_PER_OP, MOST_ELEMENTS = 3, 200
# What an op may say to inputs that it was not made for.
REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError)

VALUES = {
    "as sampled": lambda x: x.clone(),
    "drawn again": lambda x: torch.randn_like(x),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "large": lambda x: torch.randn_like(x) * 30,
    "other strides": lambda x: columns_first(torch.randn_like(x)),
}


def columns_first(x):
    """Return the same elements with the first dimension densest in memory."""
    back = list(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def changed(values, tensor):
    """Return a leaf of the same form with other values: masks flipped, indices in another order."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return tensor
    x = tensor.detach()
    if values == "as sampled":
        new = x.clone()
    elif x.dtype == torch.bool:
        new = ~x if values != "ones" else torch.ones_like(x)
    elif not (x.is_floating_point() or x.is_complex()):
        new = x.flip(list(range(x.dim()))) if values != "zeros" else x.clone()
    else:
        new = VALUES[values](x)
    return new.requires_grad_(tensor.requires_grad)


def built(function, sample, values):
    """Return the outputs of an op that have a gradient, or None where it does not take these values."""
    try:
        torch.manual_seed(0)
        given = tree_map(lambda t: changed(values, t), (sample.input, list(sample.args), sample.kwargs))
        found = tree_leaves(function(given[0], *given[1], **given[2]))
    except REFUSALS:
        return None
    usable = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad and t.layout == torch.strided]
    return usable if usable and sum(t.numel() for t in usable) <= MOST_ELEMENTS else None


def partitions(outputs, draw):
    """Yield ways to give the elements of the outputs to samples."""
    sizes = [(*t.shape, 2) if t.is_complex() else tuple(t.shape) for t in outputs]
    dim = draw.randrange(4)
    yield (torch.cat([rows(shape, dim) for shape in sizes]) % 3).tolist()
    count = sum(map(prod, sizes))
    yield [draw.randrange(3) for _ in range(count)]


def rows(shape, dim):
    """Return the index of each element along one dimension."""
    if not shape:
        return torch.zeros(1, dtype=torch.long)
    dim %= len(shape)
    return torch.arange(shape[dim]).view(-1, *(1,) * (len(shape) - 1 - dim)).expand(shape).reshape(-1)


def check(function, sample, draw):
    """Compare what is claimed for one graph with the engine, on it and on graphs of its form."""
    first = built(function, sample, "as sampled")
    if first is None:
        return
    others = [found for values in VALUES if (found := built(function, sample, values)) is not None]
    roots = [root for root in map(flat_losses, others) if root.grad_fn is not None]
    root = flat_losses(first)
    for sample_of in partitions(first, draw):
        losses = Losses(root, tuple(sample_of), 4)
        claimed = claims(losses)
        for other in roots:
            if other.shape == root.shape and same_form(losses, again := Losses(other, tuple(sample_of), 4)):
                assert not wrong(claimed, again)
        if any(moves_by_index(node) for node in losses.scan.nodes):
            assert not wrong(claims(losses, by_indices=True), losses)


def wrong(claimed, losses):
    try:
        return contradictions(claimed, losses)
    except REFUSALS:  # torch cannot differentiate it, or not at these values
        return []


def op_functions(op):
    yield op.op
    if op.inplace_variant is not None:
        yield lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs)


@pytest.mark.parametrize("op", [op for op in op_db if op.supports_autograd], ids=lambda op: op.full_name)
def test_every_op(op):
    draw = random.Random(op.full_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), 40))
        except REFUSALS as error:
            pytest.skip(f"torch cannot sample it in float64: {type(error).__name__}")
        samples = draw.sample(samples, min(FORMS_PER_OP, len(samples)))
        for sample in samples:
            for function in op_functions(op):
                check(function, sample, draw)
