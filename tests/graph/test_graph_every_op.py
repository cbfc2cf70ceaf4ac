"""The reader over torch's own database of ops: whatever node torch makes, reading it neither fails nor changes it."""

import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from gradrein import graph


def outputs_of(op):
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        found = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
        outputs = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]
        if outputs:
            return outputs
    return []


def read_all(outputs):
    """Read everything there is to read, and return the states of what was saved."""
    read = graph.read(outputs)
    index = {node: i for i, node in enumerate(read.nodes)}
    assert set(graph.walk(outputs)) == set(read.nodes) == set(read.consumers)
    for node in read.nodes:
        assert all(used is None or index[used] > index[node] for used, _ in node.next_functions)
        assert len(graph.describe(node)) >= 1
    assert {id(use.leaf) for use in graph.parameter_uses(read)} == {id(leaf) for leaf in read.leaves}
    return {entry.state for node in read.nodes for entry in graph.saved(node)}


@pytest.mark.parametrize("op", [op for op in op_db if op.supports_autograd], ids=lambda op: op.full_name)
def test_op(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outputs = outputs_of(op)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as error:
            pytest.skip(f"torch cannot sample it in float64: {type(error).__name__}")
        assert read_all(outputs) <= {"ready"}
        try:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"torch cannot differentiate it: {type(error).__name__}")
        assert read_all(outputs) <= {"ready", "freed"}
