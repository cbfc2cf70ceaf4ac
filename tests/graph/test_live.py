"""Live tensors and models, shared memory, and names of variables."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gradrein import graph


def test_live_tensors_and_models_are_found_and_not_kept():
    model = nn.Sequential(nn.Linear(2, 2))
    assert any(t is model[0].weight for t in graph.live_tensors())
    assert any(m is model for m in graph.live_models())
    assert not any(m is model[0] for m in graph.live_models())
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None


def test_memory_is_shared_by_views_and_detached_tensors():
    x = torch.ones(4, requires_grad=True).exp()
    assert graph.memory_of(x) == graph.memory_of(x.detach()) == graph.memory_of(x[1:])
    assert graph.memory_of(x) != graph.memory_of(x.clone())
    assert graph.memory_of(torch.empty(0)) is None
    assert graph.memory_of(torch.eye(2).to_sparse()) is None


def test_memory_of_a_wrapper_is_none():
    seen = []

    def look(x):
        seen.append(graph.memory_of(x))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    assert seen == [None]


def test_base_of_a_view_is_the_whole():
    x = torch.ones(4)
    view = x[1:].reshape(3, 1)
    assert graph.base_of(view) is x
    assert graph.base_of(x) is x


def test_variable_name_keeps_nothing_alive():
    tensor = torch.ones(1)
    assert graph.variable_name(tensor) == "tensor"
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


def test_the_edge_of_a_tensor_without_gradient_is_refused():
    with pytest.raises(ValueError, match="requires no gradient"):
        graph.edge_of(torch.ones(1))
