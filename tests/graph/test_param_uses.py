"""Uses of parameters: through views, casts and cuts, shared and repeated."""

import torch
from torch import nn

from gradrein import graph


def table(outputs, names):
    found = graph.find_names(names)
    return sorted(
        (
            found.of(use.leaf) or "?",
            graph.op(use.node),
            use.position,
            [graph.op(e.node) for e in use.relayouts],
        )
        for use in graph.parameter_uses(graph.read(outputs))
    )


def test_linear():
    layer = nn.Linear(3, 2)
    assert table(layer(torch.ones(4, 3)), layer) == [
        ("bias", "AddmmBackward0", 0, []),
        ("weight", "AddmmBackward0", 2, ["TBackward0"]),
    ]


def test_seen_through_transpose_expand_cast_and_slice():
    weight = torch.ones(4, 3, requires_grad=True)
    seen = weight.t().to(torch.float64)[:2].unsqueeze(0).expand(5, 2, 4).contiguous()
    (entry,) = table(seen.exp().sum(), {"w": weight})
    assert entry == (
        "w",
        "ExpBackward0",
        0,
        [
            "TBackward0",
            "ToCopyBackward0",
            "SliceBackward0",
            "UnsqueezeBackward0",
            "ExpandBackward0",
            "CloneBackward0",
        ],
    )


def test_each_part_of_a_split_weight_is_a_use_of_its_own():
    attention = nn.MultiheadAttention(4, 2)
    q, k, v = (torch.ones(3, 1, 4) * i for i in range(3))
    out, _ = attention(q, k, v)
    parts = [
        edge.output_nr
        for use in graph.parameter_uses(graph.read(out))
        if use.leaf is attention.in_proj_weight
        for edge in use.relayouts
        if graph.op(edge.node).startswith(("Split", "Unbind", "Chunk"))
    ]
    assert sorted(parts) == [0, 1, 2]


def test_autocast_shares_one_cast_between_uses():
    layer = nn.Linear(3, 3, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(layer(torch.ones(4, 3)))
    uses = [use for use in graph.parameter_uses(graph.read(out)) if use.leaf is layer.weight]
    casts = {edge.node for use in uses for edge in use.relayouts if graph.op(edge.node) == "ToCopyBackward0"}
    assert len(uses) == 2
    assert len(casts) == 1


def test_a_leaf_that_reaches_a_root_unchanged():
    weight = torch.ones(4, 3, requires_grad=True)
    (use,) = graph.parameter_uses(graph.read(weight.t()))
    assert (graph.op(use.node), use.position, use.relayouts) == ("TBackward0", -1, ())
    (use,) = graph.parameter_uses(graph.read(weight))
    assert graph.is_leaf(use.node)
