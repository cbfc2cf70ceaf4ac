"""`grad` and `replay` over torch's own database of ops: bitwise torch's numbers, and batches that equal one by one."""

import warnings
from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import gradrein
from gradrein.autograd import replay

ROWS, SAMPLES = 3, 3


def differentiable(op):
    return op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")


def calls(op):
    """Yield outputs and inputs of the op's samples that torch itself can differentiate."""
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        torch.manual_seed(0)
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        inputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        try:
            found = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
        except Exception:
            continue  # torch cannot compute it
        outputs = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]
        if inputs and outputs and all(t.layout == torch.strided and t.numel() for t in outputs):
            yield outputs, inputs


def one_by_one(outputs, inputs, grads, grad):
    rows = []
    for row in range(ROWS):
        one = [g[row] for g in grads]
        rows.append(grad(outputs, inputs, one, retain_graph=True, allow_unused=True))
    return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def same_as_torch(outputs, inputs):
    """Replay one sample; both draw the same random numbers."""
    grads = [torch.randn_like(t) for t in outputs]
    torch.manual_seed(1)
    try:
        expected = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    except Exception:
        return  # torch cannot differentiate it
    torch.manual_seed(1)
    for ours, theirs in zip(replay(outputs, inputs, grads), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [op for op in op_db if differentiable(op)], ids=lambda op: op.full_name)
def test_op(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cases = list(islice(calls(op), SAMPLES))
            if not cases:
                pytest.skip("no sample with a dense result that requires grad")
            outputs, inputs = cases[0]
            grads = [torch.randn(ROWS, *t.shape, dtype=t.dtype) for t in outputs]
            expected = one_by_one(outputs, inputs, grads, torch.autograd.grad)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as error:
            pytest.skip(f"torch cannot do it: {type(error).__name__}")
        found = one_by_one(outputs, inputs, grads, gradrein.grad)
        for outs, ins in cases:
            same_as_torch(outs, ins)
        batch = {"is_grads_batched": True, "retain_graph": True, "allow_unused": True}
        try:
            batched = gradrein.grad(outputs, inputs, grads, **batch)
        except RuntimeError:  # what torch cannot vectorise, or does wrongly
            batched = expected
    for ours, ours_batched, theirs in zip(found, batched, expected, strict=True):
        if theirs is None:
            assert ours is ours_batched is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(ours_batched, theirs, rtol=1e-5, atol=1e-7, equal_nan=True)
