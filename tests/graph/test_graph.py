"""The reader against graphs whose shape is known: order, edges, leaves, uses."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from gradrein import graph


def ops(outputs):
    return [graph.op(node) for node in graph.read(outputs).nodes]


def assert_topological(read):
    index = {node: i for i, node in enumerate(read.nodes)}
    for node in read.nodes:
        for used, _ in node.next_functions:
            assert used is None or index[used] > index[node]


def test_order_is_the_one_the_engine_runs():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    out = model(torch.randn(2, 3))
    loss = (out * out.exp()).sum() + model[0].weight.sum()
    read = graph.read(loss)
    ran = []
    for node in read.nodes:
        node.register_prehook(lambda _, node=node: ran.append(node))
    loss.backward()
    inner = [node for node in read.nodes if not graph.is_leaf(node)]
    assert [node for node in ran if not graph.is_leaf(node)] == inner


def test_sequence_numbers_of_other_threads_do_not_mislead():
    weight = torch.ones(2, requires_grad=True)
    made = {}

    def late_in_its_thread():
        x = weight
        for _ in range(50):
            x = x * 1.0
        made["x"] = x

    thread = threading.Thread(target=late_in_its_thread)
    thread.start()
    thread.join()
    fresh = {}
    thread = threading.Thread(target=lambda: fresh.update(y=made["x"].exp()))
    thread.start()
    thread.join()
    child, parent = fresh["y"].grad_fn, made["x"].grad_fn
    assert graph.sequence_nr(child) < graph.sequence_nr(parent)  # the trap is really there
    assert_topological(graph.read(fresh["y"].sum()))


def test_edges_say_which_input_and_which_output():
    weight = torch.ones(4, requires_grad=True)
    first, second = weight.split(2)
    loss = (first.detach() * second).sum()
    read = graph.read(loss)
    split = next(node for node in read.nodes if graph.op(node) == "SplitBackward0")
    ((op, position, output_nr),) = read.consumers[split]
    assert (graph.op(op), position, output_nr) == ("MulBackward0", 1, 1)


@pytest.mark.parametrize("as_edge", [False, True])
def test_a_tensor_and_its_edge_read_alike(as_edge):
    weight = torch.ones(3, requires_grad=True)
    loss = weight.exp().sum()
    assert ops(get_gradient_edge(loss) if as_edge else loss) == [
        "SumBackward0",
        "ExpBackward0",
        "AccumulateGrad",
    ]


def test_a_very_deep_graph():
    end = leaf = torch.ones(1, requires_grad=True)
    for _ in range(20_000):
        end = end + 1
    read = graph.read(end)
    assert len(read.nodes) == 20_001
    assert graph.parameter_uses(read)[0].leaf is leaf


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.tensor(1.0, dtype=torch.float16),
    ],
    ids=["coo", "csr", "jagged", "nested", "complex", "half scalar"],
)
def test_leaves_of_every_layout(make):
    leaf = make().requires_grad_()
    assert graph.read(leaf).leaves[0] is leaf
    with torch.no_grad():
        assert graph.read(leaf).leaves[0] is leaf


def test_describe_gives_shape_dtype_device_of_each_output():
    a, b = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True).split([1, 3])
    described = graph.describe(a.grad_fn)
    assert [d.shape for d in described] == [(1, 2), (3, 2)]
    assert described[0].dtype == torch.bfloat16
    assert described[0].device == b.device


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_graph_ending_in_a_python_node_stays_alive():
    weight = torch.ones(3, requires_grad=True)
    read = graph.read(Double.apply(weight.exp()))  # only the read graph holds the output
    assert [graph.op(node) for node in read.nodes] == ["DoubleBackward", "ExpBackward0", "AccumulateGrad"]
    assert read.nodes[0].next_functions[0][0] is read.nodes[1]


def test_reentrant_checkpoint_is_one_opaque_node():
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    read = graph.read(checkpoint(layer, x, use_reentrant=True))
    assert [graph.op(node) for node in read.nodes] == ["CheckpointFunctionBackward", "AccumulateGrad"]
