"""What a captured step computes beyond the products of a plain one, counted by op."""

from collections import Counter

import pytest
import torch

import gradrein

from .helpers import batch, clipped, mlp

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


def test_each_factor_is_read_once_for_its_norm_and_no_norm_is_the_slow_one():
    model = mlp()
    step = gradrein.compile(clipped(model), model, backend="captured")
    step(*batch())
    step(*batch())
    nodes = step._entries[0]._runners["captured"]._captured.graph.graph.nodes
    norms = [node for node in nodes if node.target is torch.ops.aten.linalg_vector_norm.default]
    # Inputs and output gradients of two layers, and all parameters together. Biases have a gradient that is counted.
    assert len(norms) == 5
    assert all(node.args[1] == 2 for node in norms)
    ops = Counter(str(node.target) for node in nodes)
    assert ops["aten.amax.default"] == ops["aten.amin.default"] == 5
    # The weights of samples are cast once for all parameters.
    casts = [node for node in nodes if node.target is torch.ops.aten._to_copy.default]
    assert sum(node.kwargs["dtype"] == torch.float32 for node in casts) == 2
