"""The table of ops: one entry for all names of an op, and rules from outside."""

import re

import pytest
import torch
from torch import nn

import gradrein
from functions import function
from gradrein.persample import register_rule
from gradrein.persample.ops.table import IDS, OP_TABLE, without_suffix

from .oracle import loop

NODES = {name: getattr(torch._C._functions, name) for name in dir(torch._C._functions)}
# Every build of torch knows the names of all devices. Those of double backward, what is no op of the family, and what
# only direct calls of the ops of one library record.
OTHERS = (
    r"BackwardBackward|BackwardOverrideable|DiagEmbed|WeightNormInterface|Renorm|LogNormal|ConvTbc|"
    r"(Mkldnn|Cudnn|Miopen|Mps|Slow|Nnpack).*Conv|MiopenDepthwise|ConvDepthwise|^(Flash|Efficient|Cudnn)Attention"
)
FAMILIES = {
    "attention": "Attention",
    "batch norm": "BatchNorm",
    "layer norm": "LayerNorm|RmsNorm|GroupNorm",
    "recurrent": "Rnn|Lstm|Gru",
    "convolution": "Conv(?!ert)",
    "dropout": "Dropout",
    "embedding": "Embedding(?!Dense)",
}
NO_RULE = {
    "Attention": "has no parameters: one that is passed as it is has its backward run once for each sample",
    "Rnn|LstmMps": "keeps its gates in a block that is its own",
    "Thnn": "only its biases are parameters",
}


def names_of(family):
    pattern = FAMILIES[family]
    return sorted(
        {without_suffix(n) for n in NODES if re.search(pattern, n) and not re.search(OTHERS, n) and "Backward" in n}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_all_names_of_an_op_have_an_entry(family):
    names = names_of(family)
    assert len(names) > 1
    assert not [name for name in names if name not in OP_TABLE]
    for name in names:
        entry = OP_TABLE[name]
        assert entry.keeps or entry.ids or "Dropout" in name, name
        assert entry.rule is not None or any(re.search(p, name) for p in NO_RULE), name


@pytest.mark.parametrize("name", sorted(name for name, entry in OP_TABLE.items() if entry.keeps or entry.ids))
def test_what_an_entry_says_is_kept_is_kept_under_that_name(name):
    """A wrong name would hide data from the coupling check."""
    nodes = [node for full, node in NODES.items() if without_suffix(full) == name]
    entry = OP_TABLE[name]
    for saved in (*entry.keeps.values(), *([entry.ids] if entry.ids else [])):
        assert not nodes or any(hasattr(node, f"_saved_{saved}") for node in nodes), saved


@pytest.mark.parametrize(
    ("cpu", "others"),
    [
        ("ScaledDotProductFlashAttentionForCpu", ["Flash", "Efficient", "Cudnn", "Fused"]),
        ("NativeBatchNorm", ["CudnnBatchNorm", "MiopenBatchNorm"]),
        ("MkldnnRnnLayer", ["CudnnRnn", "MiopenRnn", "LstmMps"]),
        ("NativeDropout", ["FusedDropout"]),
        ("Convolution", ["ConvolutionOverrideable"]),
    ],
)
def test_names_of_other_devices_send_owners_alike(cpu, others):
    for other in others:
        found = [name for name in OP_TABLE if re.search(f"^(ScaledDotProduct)?{other}", name) and name in names_at(cpu)]
        assert found, other
        assert all(OP_TABLE[name].owners is OP_TABLE[cpu].owners for name in found)
        assert all(OP_TABLE[name].keeps == OP_TABLE[cpu].keeps for name in found)


def names_at(cpu):
    """Return the names that share what is said about the name of the CPU."""
    return {name for name, entry in OP_TABLE.items() if entry.owners is OP_TABLE[cpu].owners}


def test_an_op_of_one_library_called_directly():
    """It has no entry: data that it keeps may be shared, and values of samples are observed."""
    weight, x = nn.Parameter(torch.randn(2, 3, 3, 3).float()), torch.randn(4, 3, 5, 5).float()
    before = nn.Parameter(torch.ones(3, 1, 1).float())
    call = lambda x: torch.mkldnn_convolution(x, weight, None, [1, 1], [1, 1], [1, 1], 1).square().sum((1, 2, 3))  # noqa: E731
    with pytest.raises(gradrein.errors.BatchCouplingError, match="it is not known how.*allow_coupling=True"):
        gradrein.per_sample(call(x), {"weight": weight})
    losses = call(x * before)
    found = gradrein.per_sample(losses, {"weight": weight, "before": before}).grads()
    torch.testing.assert_close(found, loop(losses, {"weight": weight, "before": before}), rtol=1e-4, atol=1e-4)


def test_only_look_ups_have_ids():
    assert {name for name, entry in OP_TABLE.items() if entry.ids} == {
        *("Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect")
    }
    assert IDS not in {position for entry in OP_TABLE.values() for position in entry.keeps}


Scale = function("Scale", torch.mul, lambda g, x, scale: (g * scale, (g * x).sum(0)))


def test_a_rule_can_be_written_outside_the_package():
    class OutsideScale(Scale):
        pass

    register_rule(OutsideScale, lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape))
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    ps = gradrein.per_sample(OutsideScale.apply(x, scale).sum(1), {"scale": scale})
    torch.testing.assert_close(ps.grads()["scale"], x)
    ps.audit()


def test_another_function_of_the_same_name_does_not_get_the_rule():
    class Same(Scale):
        pass

    mine = Same

    class Same(Scale):
        pass

    register_rule(mine, lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape))
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    assert gradrein.per_sample(mine.apply(x, scale).sum(1), {"scale": scale}).grads()["scale"].equal(x)
    with pytest.raises(gradrein.errors.UnsupportedOperationError, match=r"register_rule\(Same, rule\)"):
        gradrein.per_sample(Same.apply(x, scale).sum(1), {"scale": scale})
    ps = gradrein.per_sample(Same.apply(x, scale).sum(1), {"scale": scale}, allow_opaque=True)
    assert "each loss is differentiated alone" in ps.plan()


def test_the_name_of_a_function_is_no_op():
    with pytest.raises(
        gradrein.errors.ArgumentError, match=r"other Functions may share it.*register_rule\(Scale, rule\)"
    ):
        register_rule("ScaleBackward", lambda ctx: ctx.gradient)


def test_an_op_of_a_library_goes_by_name():
    @torch.library.custom_op("gradrein_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum(0)

    scaled.register_autograd(backward, setup_context=setup)
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    losses = scaled(x, scale).sum(1)
    rule = lambda ctx: ctx.layout.sums(ctx.gradient * ctx.node.saved_tensors[0], ctx.shape)  # noqa: E731
    register_rule(losses.grad_fn.next_functions[0][0].name(), rule)
    assert gradrein.per_sample(losses, {"scale": scale}).grads()["scale"].equal(x)
