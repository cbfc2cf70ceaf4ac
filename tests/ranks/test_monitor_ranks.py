"""Monitor ranks with sharded gradients: the record equals that of one process, and nothing is sent for it."""

import math

import monitor_workers
import pytest
import torch

import gradrein
from gradrein.watch import read_run
from gradrein.watch.analysis.findings import find
from gradrein.watch.analysis.rank_table import warnings


def one_process(folder, limit, clip):
    net = monitor_workers.network()
    with gradrein.Monitor(net, record=folder / "alone.jsonl", clip=clip) as monitor:
        weights = monitor_workers.train(net, limit)
    return read_run(monitor.path), weights


@pytest.mark.parametrize(("limit", "clip"), [(None, None), (0.5, None), (None, 0.5), (None, "zscore")])
@pytest.mark.parametrize("kind", ["all", "mixed", "hybrid"])
def test_merged_numbers_are_those_of_one_process(request, tmp_path, kind, limit, clip):
    rank_processes = request.getfixturevalue("four" if kind == "hybrid" else "two")
    answers = rank_processes.run(monitor_workers.record, str(tmp_path / "run.jsonl"), kind, limit, clip)
    alone, weights = one_process(tmp_path, limit, clip)
    run = read_run(answers[-1][0])
    assert len(run.ranks) == rank_processes.size
    assert (run.names, run.sizes) == (alone.names, alone.sizes)
    if limit is not None and answers[0][2]:
        assert all(math.isnan(factor) for factor in run.clip)
        pytest.skip(f"torch {torch.__version__} has no norm of shards that is reduced: what it clipped is not known")
    for name, digits in {"loss": 1e-5, "norm": 1e-5, "peak": 1e-5, "update": 1e-5, "clip": 1e-5, "max_norm": 0}.items():
        found, true = getattr(run, name), getattr(alone, name)
        assert found == pytest.approx(true, rel=digits, nan_ok=True), name
    assert run.step_grad_cosine == pytest.approx(alone.step_grad_cosine, abs=1e-3, nan_ok=True)
    for found, true in zip(run.norms, alone.norms, strict=True):
        assert found == pytest.approx(true, rel=1e-5)
    assert warnings(run) == []
    for _, found, _ in answers:  # every rank has decided the same about clipping
        assert found == pytest.approx(weights, rel=1e-5)  # torch's own clipping of shards may round otherwise


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("kind", ["all", "mixed", "hybrid", "tensor"])
def test_norms_by_layer_are_those_of_one_process(request, tmp_path, kind, limit):
    processes = request.getfixturevalue("four" if kind == "hybrid" else "two")
    alone = monitor_workers.by_layer(tmp_path / "alone.jsonl", None, limit)
    for received in processes.run(monitor_workers.by_layer, str(tmp_path / "run.jsonl"), kind, limit):
        assert len(received) == len(alone) == monitor_workers.STEPS
        for here, there in zip(received, alone, strict=True):
            layered = [key for key in there if "/" in key]
            assert len(layered) == 9
            assert {k: here[k] for k in layered} == pytest.approx({k: there[k] for k in layered}, rel=1e-5)


def test_nothing_is_sent_for_it(two, tmp_path):
    alone, also = two.run(monitor_workers.messages, str(tmp_path / "run.jsonl"))[0]
    assert alone == also > 0


def test_what_ranks_have_not_added_up_is_named_and_not_guessed(two, tmp_path):
    path = two.run(monitor_workers.partial, str(tmp_path / "run.jsonl"), None)[0]
    run = read_run(path)
    assert math.isnan(run.norm[0])
    assert math.isnan(run.norms[0][0])
    assert run.norms[0][1] == 3.0
    assert warnings(run) == [
        "Not measured: the gradient of weight. Why: it is laid out as (Partial(sum),) and its parameter as (Replicate(),), "
        "so ranks would have to communicate to know its norm."
    ]


def test_clipping_has_to_communicate_and_then_knows_the_norm(two, tmp_path):
    path = two.run(monitor_workers.partial, str(tmp_path / "run.jsonl"), 1.0)[0]
    assert read_run(path).norm == pytest.approx([5.0])  # two ranks: four twos and a three


def test_clipping_that_could_not_be_the_same_on_all_ranks_is_refused(two):
    assert two.run(monitor_workers.refused, "auto") == ["nothing"] * 2  # it works on shards
    assert all("each rank would clip by its own norm" in text for text in two.run(monitor_workers.refused, "flattened"))


def test_flattened_parameters_are_not_measured(two, tmp_path):
    run = read_run(two.run(monitor_workers.flattened, str(tmp_path / "run.jsonl"))[0])
    assert math.isnan(run.norm[0])
    assert "use torch.distributed.fsdp.fully_shard" in warnings(run)[0]
    assert all(math.isnan(u) for u in run.update)


def test_a_model_that_was_never_wrapped_is_found_by_every_rank(ranks, tmp_path):
    for found in ranks.run(monitor_workers.alone, str(tmp_path / "run.jsonl")):
        assert found[0].startswith("rank_norms: the ranks do not train together")


@pytest.mark.parametrize("clip", ["auto", "zscore", 0.5])
def test_under_ddp_all_ranks_clip_the_same(ranks, tmp_path, clip):
    answers = ranks.run(monitor_workers.together, str(tmp_path / "run.jsonl"), clip)
    assert all(weights == answers[0][1] for _, weights in answers)
    run = read_run(answers[0][0])
    assert all(one.clip == run.clip for one in run.ranks)
    assert min(run.clip) < 1
    assert "rank_norms" not in {finding.name for finding in find(run)}
