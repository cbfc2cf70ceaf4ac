"""Owners at ops that only other devices record, shown on stand-ins for their nodes: torch's CPU build makes none."""

import pytest
import torch

from gradrein.persample.layout.owners import MIXED, UNREACHED, Owners
from gradrein.persample.ops.table import Step

B, T, D, H = 3, 4, 5, 2


def node_named(name, inputs, **saved):
    """Return what stands in for a node of torch: its name, its edges and what it saved."""
    values = {f"_saved_{key}": value for key, value in saved.items()}
    edges = ((None, 0),) * inputs
    return type(f"{name}Backward0", (), {"name": lambda _: f"{name}Backward0", "next_functions": edges, **values})()


def by_sample(shape, dim):
    """Return owners of a tensor with one sample at each index of a dimension."""
    return Owners(
        torch.arange(shape[dim], dtype=torch.int32).view(-1, *(1,) * (len(shape) - 1 - dim)).expand(shape), shape
    )


def nothing(*shape):
    return Owners.all(UNREACHED, shape)


def sent(node, outs, position, shape):
    return Step(node, tuple(outs), position, shape).sends().ids.expand(shape)


@pytest.mark.parametrize("name", ["CudnnRnn", "MiopenRnn", "LstmMps"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("read", ["outputs", "states"])
def test_columns_of_recurrent_layers_stay_apart(name, batch_first, read):
    inputs = 1 + 4 + 2
    states = (1, 2) if name == "LstmMps" else (5, 6)
    node = node_named(name, inputs, batch_first=batch_first, batch_sizes=())
    batch, steps = (0, (B, T, H)) if batch_first else (1, (T, B, H))
    given = (B, T, D) if batch_first else (T, B, D)
    outs = (
        [by_sample(steps, batch), nothing(1, B, H)] if read == "outputs" else [nothing(*steps), by_sample((1, B, H), 1)]
    )
    outs += [nothing(1, B, H), nothing(7)]
    assert sent(node, outs, 0, given).equal(by_sample(given, batch).ids)
    assert all(sent(node, outs, at, (1, B, H)).equal(by_sample((1, B, H), 1).ids) for at in states)
    weight = next(i for i in range(1, inputs) if i not in states)
    assert (sent(node, outs, weight, (4 * H, D)) == MIXED).all()


@pytest.mark.parametrize("name", ["CudnnRnn", "MiopenRnn"])
def test_time_taken_for_the_batch_mixes_it(name):
    node = node_named(name, 7, batch_first=False, batch_sizes=())
    outs = [by_sample((B, T, H), 0), nothing(1, T, H), nothing(1, T, H)]
    assert (sent(node, outs, 0, (B, T, D)) == MIXED).all()


def test_packed_sequences_stay_apart():
    sizes = (3, 2, 2, 1)
    node = node_named("CudnnRnn", 7, batch_first=False, batch_sizes=sizes)
    column = torch.tensor([0, 1, 2, 0, 1, 0, 1, 0], dtype=torch.int32)
    outs = [Owners(column[:, None], (8, H)), nothing(1, B, H), nothing(1, B, H)]
    assert sent(node, outs, 0, (8, D)).equal(column[:, None].expand(8, D))
    assert sent(node, outs, 5, (1, B, H)).equal(by_sample((1, B, H), 1).ids)
    crossed = [Owners(column.flip(0)[:, None], (8, H)), nothing(1, B, H), nothing(1, B, H)]
    assert (sent(node, crossed, 0, (8, D)) == MIXED).any()


@pytest.mark.parametrize("name", ["ThnnFusedLstmCell", "ThnnFusedGruCell"])
def test_rows_of_fused_cells_stay_apart(name):
    outs = [nothing(B, H), by_sample((B, H), 0)][:: -1 if "Gru" in name else 1]
    node = node_named(name, 5)
    assert sent(node, outs, 0, (B, 4 * H)).equal(by_sample((B, 4 * H), 0).ids)
    assert (sent(node, outs, 3, (4 * H,)) == MIXED).all()


@pytest.mark.parametrize("kernel", ["Flash", "Efficient", "Cudnn"])
def test_attention_mixes_a_sequence_and_no_samples(kernel):
    named = node_named(f"ScaledDotProduct{kernel}Attention", 4)
    shape = (B, 2, T, D)
    assert sent(named, [by_sample(shape, 0)], 1, shape).equal(by_sample(shape, 0).ids)
    assert (sent(named, [by_sample(shape, 2)], 1, shape) == MIXED).all()
    assert sent(named, [by_sample(shape, 2)], 3, (B, 1, T, T)).shape == (B, 1, T, T)
    direct = node_named(f"{kernel}Attention", 3)
    assert sent(direct, [by_sample(shape, 0)], 1, shape).equal(by_sample(shape, 0).ids)
    packed = node_named(f"{kernel}Attention", 3, cum_seq_q=torch.arange(2))
    assert (sent(packed, [by_sample(shape, 0)], 1, shape) == MIXED).all()


@pytest.mark.parametrize("name", ["CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNormLegit"])
def test_batch_norm_mixes_in_training_alone(name):
    shape = (B, D, T)
    for training, expected in ((True, torch.full(shape, MIXED)), (False, by_sample(shape, 0).ids)):
        node = node_named(name, 3, training=training)
        assert sent(node, [by_sample(shape, 0)], 0, shape).equal(expected.int())


def test_rms_norm_mixes_a_row():
    node = node_named("FusedRmsNorm", 2, normalized_shape=(D,))
    assert sent(node, [by_sample((B, D), 0)], 0, (B, D)).equal(by_sample((B, D), 0).ids)
    assert (sent(node, [by_sample((B, D), 1)], 0, (B, D)) == MIXED).all()
