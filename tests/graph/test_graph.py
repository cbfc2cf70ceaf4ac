"""The reader against graphs whose shape is known: order, edges, leaves, uses; live tensors, shared memory."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from functions import function
from gradrein import graph


def ops(outputs):
    return [graph.op(node) for node in graph.read(outputs).nodes]


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
    made = {}

    def in_a_thread(run):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def late_in_its_thread():
        x = torch.ones(2, requires_grad=True)
        for _ in range(50):
            x = x * 1.0
        made["x"] = x

    in_a_thread(late_in_its_thread)
    in_a_thread(lambda: made.update(y=made["x"].exp()))
    assert graph.sequence_nr(made["y"].grad_fn) < graph.sequence_nr(made["x"].grad_fn)  # the trap is really there
    read = graph.read(made["y"].sum())
    index = {node: i for i, node in enumerate(read.nodes)}
    assert all(used is None or index[used] > index[node] for node in read.nodes for used, _ in node.next_functions)


def test_edges_say_which_input_and_which_output():
    first, second = torch.ones(4, requires_grad=True).split(2)
    read = graph.read((first.detach() * second).sum())
    split = next(node for node in read.nodes if graph.op(node) == "SplitBackward0")
    ((op, position, output_nr),) = read.consumers[split]
    assert (graph.op(op), position, output_nr) == ("MulBackward0", 1, 1)


def test_outputs_in_every_form():
    weight = torch.ones(3, requires_grad=True)
    loss = weight.exp().sum()
    expected = ["SumBackward0", "ExpBackward0", "AccumulateGrad"]
    assert ops(loss) == ops(get_gradient_edge(loss)) == ops([loss, torch.ones(1)]) == expected
    assert ops(torch.ones(2)) == []
    with pytest.raises(ValueError, match="requires no gradient"):
        graph.edge_of(torch.ones(1))


def test_a_very_deep_graph():
    end = leaf = torch.ones(1, requires_grad=True)
    for _ in range(20_000):
        end = end + 1
    read = graph.read(end)
    assert len(read.nodes) == 20_001
    assert graph.parameter_uses(read)[0].leaf is leaf


LEAVES = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "half scalar": lambda: torch.tensor(1.0, dtype=torch.float16),
}


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*:UserWarning")
@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_leaves_of_every_layout(make):
    leaf = make().requires_grad_()
    assert graph.read(leaf).leaves[0] is leaf
    with torch.no_grad():
        assert graph.read(leaf).leaves[0] is leaf


def test_describe_gives_shape_dtype_device_of_each_output():
    a, b = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True).split([1, 3])
    described = graph.describe(a.grad_fn)
    assert [d.shape for d in described] == [(1, 2), (3, 2)]
    assert (described[0].dtype, described[0].device) == (torch.bfloat16, b.device)


Double = function("Double", lambda x: x * 2, lambda grad, _: grad * 2)


@pytest.mark.needs("ownership_token of edges")
def test_a_graph_ending_in_a_python_node_stays_alive():
    read = graph.read(Double.apply(torch.ones(3, requires_grad=True).exp()))  # only the read graph holds the output
    assert [graph.op(node) for node in read.nodes] == ["DoubleBackward", "ExpBackward0", "AccumulateGrad"]
    assert read.nodes[0].next_functions[0][0] is read.nodes[1]


def test_reentrant_checkpoint_is_one_opaque_node():
    x = torch.ones(2, 3, requires_grad=True)
    assert ops(checkpoint(nn.Linear(3, 3), x, use_reentrant=True)) == ["CheckpointFunctionBackward", "AccumulateGrad"]


# Uses of parameters: through views, casts and cuts, shared and repeated.


def uses(outputs, model):
    found = graph.find_names(model)
    return sorted(
        (found.of(use.leaf) or "?", graph.op(use.node), use.position, [graph.op(e.node) for e in use.relayouts])
        for use in graph.parameter_uses(graph.read(outputs))
    )


def test_uses_are_seen_through_views_and_casts():
    layer = nn.Linear(3, 2)
    assert uses(layer(torch.ones(4, 3)), layer) == [
        ("bias", "AddmmBackward0", 0, []),
        ("weight", "AddmmBackward0", 2, ["TBackward0"]),
    ]
    weight = nn.Parameter(torch.ones(4, 3))
    owner = nn.Module()
    owner.w = weight
    seen = weight.t().to(torch.float64)[:2].unsqueeze(0).expand(5, 2, 4).contiguous()
    views = ["TBackward0", "ToCopyBackward0", "SliceBackward0", "UnsqueezeBackward0", "ExpandBackward0"]
    assert uses(seen.exp().sum(), owner) == [("w", "ExpBackward0", 0, [*views, "CloneBackward0"])]
    assert uses(weight.t(), owner) == [("w", "TBackward0", -1, [])]  # a leaf that reaches a root unchanged
    assert graph.is_leaf(graph.parameter_uses(graph.read(weight))[0].node)


def test_each_part_of_a_split_weight_is_a_use_of_its_own():
    attention = nn.MultiheadAttention(4, 2)
    out, _ = attention(*(torch.ones(3, 1, 4) * i for i in range(3)))
    edges = [
        edge
        for use in graph.parameter_uses(graph.read(out))
        if use.leaf is attention.in_proj_weight
        for edge in use.relayouts
    ]
    parts = [edge.output_nr for edge in edges if graph.op(edge.node).startswith(("Split", "Unbind", "Chunk"))]
    assert sorted(parts) == [0, 1, 2]


def test_autocast_shares_one_cast_between_uses():
    layer = nn.Linear(3, 3, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(layer(torch.ones(4, 3)))
    found = [use for use in graph.parameter_uses(graph.read(out)) if use.leaf is layer.weight]
    casts = {edge.node for use in found for edge in use.relayouts if graph.op(edge.node) == "ToCopyBackward0"}
    assert (len(found), len(casts)) == (2, 1)


# Live tensors and models, and shared memory.


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
    assert graph.memory_of(torch.empty(0)) is graph.memory_of(torch.eye(2).to_sparse()) is None
    with FakeTensorMode():  # as a compiler leaves them alive
        assert graph.memory_of(torch.eye(2).to_sparse()) is None
    seen = []  # what a transform wraps has none
    torch.func.grad(lambda x: (seen.append(graph.memory_of(x)), x.sum())[1])(torch.ones(2))
    assert seen == [None]
    assert graph.base_of(x[1:].reshape(3, 1)) is graph.base_of(x) is x
