"""Records of several ranks: how they are named, found and put together."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError, RecordError
from gradrein.watch import read_run
from gradrein.watch.analysis.rank_table import warnings
from gradrein.watch.command import watch
from gradrein.watch.format.rank_files import (
    RankInfo,
    default_name,
    free_name,
    one_file_per_run,
    rank_file,
    rank_info,
    run_file,
)
from gradrein.watch.report.report import report_on
from gradrein_cli import main

from .test_monitor import model, train

SIZES = {"w": (7, 3), "v": (5,)}


def write(folder, rank, steps, *, world=2, launch="here", shards=(None, None), end=(None,), name="run.jsonl", more=()):
    """A record of one rank, of two parameters."""
    header = {"gradrein": 2, **vars(RankInfo(rank, world, launch))}
    optimizer = {"optimizer": "SGD", "opt": 0, "names": ["w", "v"], "sizes": [21, 5],
                 "trained": [True, True], "shards": list(shards)}  # fmt: skip
    lines = [header, optimizer, *steps, *more, *({"ended": why, "after": len(steps)} for why in end)]
    path = rank_file(folder / name, rank)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def step(t, norms, **rest):
    return {"step": t, "opt": 0, "norms": norms, "n_steps": 1, "loss": 0.5, "lr": [0.1], **rest}


def as_rank(monkeypatch, rank, world=2, launch="one"):
    for key, found in {"RANK": rank, "WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": launch}.items():
        monkeypatch.setenv(key, str(found))


@pytest.mark.parametrize("name", ["run.jsonl", "train.gradrein.jsonl", "run", "a.b/run.jsonl", "x.rank3.jsonl"])
def test_a_name_goes_with_its_rank_and_back(name):
    file = rank_file(Path(name), 12)
    assert ".rank12" in file.name
    assert run_file(file) == Path(name)


def test_one_process_is_no_rank(monkeypatch):
    assert rank_info() is None
    as_rank(monkeypatch, 0, world=1)
    assert rank_info() is None
    monkeypatch.setenv("RANK", "first")
    assert rank_info() is None


def test_a_monitor_names_its_record_by_its_rank(tmp_path, monkeypatch):
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with gradrein.Monitor(net, optimizer, record=tmp_path / "run.jsonl") as monitor:
            train(net, optimizer, 3)
        assert monitor.path == str(tmp_path / f"run.rank{rank}.jsonl")
    run = read_run(tmp_path / "run.rank1.jsonl")  # any of them leads to all
    assert [one.rank for one in run.ranks] == [0, 1]
    assert [one.end for one in run.ranks] == ["", ""]
    assert run.missing_ranks == []
    assert warnings(run) == []


def test_an_error_is_said_to_have_ended_it(tmp_path, monkeypatch):
    as_rank(monkeypatch, 0)
    net = model()
    monitor = gradrein.Monitor(net, record=tmp_path / "run.jsonl")

    def fail():
        with monitor:
            train(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
            raise KeyError("lost")

    with pytest.raises(KeyError):
        fail()
    run = read_run(monitor.path)
    assert warnings(run) == [
        "Rank 1 left no record of this run.",
        "Rank 0 stopped early, after 2 steps: KeyError: 'lost'.",
    ]


def test_a_run_of_one_process_has_the_record_it_had(tmp_path):
    net = model()
    with gradrein.Monitor(net, record=tmp_path / "run.jsonl") as monitor:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    lines = [json.loads(line) for line in Path(monitor.path).read_text().splitlines()]
    assert set(lines[0]) == {"gradrein", "torch", "python", "argv", "clip", "every"}
    assert "shards" not in lines[1]
    assert "partial_sums" not in lines[-1]
    assert lines[-1]["step"] == 1


def test_ranks_of_one_launch_find_the_same_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert free_name(default_name("train.py"), None) == Path("train.gradrein.jsonl")
    for launch, expected in (("first", "train.gradrein.jsonl"), ("second", "train-2.gradrein.jsonl")):
        for rank in (1, 0):
            here = RankInfo(rank, 2, launch)
            assert free_name(default_name("train.py"), here) == Path(expected)
            write(tmp_path, rank, [], launch=launch, name=expected)
    # An earlier run of which one rank left nothing does not lead the next one astray.
    rank_file(Path("train-2.gradrein.jsonl"), 0).unlink()
    assert {free_name(default_name("train.py"), RankInfo(rank, 2, "third")) for rank in (0, 1)} == {
        Path("train-3.gradrein.jsonl")
    }
    assert free_name(default_name("train.py"), None) == Path("train-3.gradrein.jsonl")


def test_shards_are_put_together_and_copies_count_once(tmp_path):
    """The twin: norms of the whole tensors, by hand."""
    r = random.Random(0)
    whole = {
        t: {name: [r.gauss(0, 1) for _ in range(math.prod(shape))] for name, shape in SIZES.items()} for t in range(4)
    }
    slices = {0: slice(0, 9), 1: slice(9, 21)}  # of w, uneven; v is whole on every rank
    for rank in range(4):
        index = rank % 2
        lines = []
        for t, grads in whole.items():
            part = grads["w"][slices[index]]
            counted = [part if rank < 2 else [], grads["v"] if rank == 0 else []]
            moved = sum(0.01 * x * x for one in counted for x in one)
            sums = [moved, 100 * moved, None, None, None]
            lines.append(
                step(
                    t,
                    [math.hypot(*part), math.hypot(*grads["v"])],
                    partial_sums=sums,
                    unmoved=[0] if rank < 2 else [0, 1],
                )
            )
        write(tmp_path, rank, lines, world=4, shards=([index, 2], None))
    run = read_run(tmp_path / "run.rank2.jsonl")
    for t, grads in whole.items():
        assert run.norms[t] == pytest.approx([math.hypot(*grads["w"]), math.hypot(*grads["v"])])
        assert run.norm[t] == pytest.approx(math.hypot(*grads["w"], *grads["v"]))
        assert run.update[t] == pytest.approx(0.1)
    assert run.peak == run.norm
    assert run.unmoved[0] == {0}
    assert all(math.isnan(t) for t in run.step_grad_cosine)


def test_the_cosine_follows_from_the_sums(tmp_path):
    for rank, sums in enumerate([[1, 1, 3.0, 4.0, 9.0], [1, 1, 1.0, 5.0, 7.0]]):
        write(tmp_path, rank, [step(0, [1.0, 1.0], partial_sums=sums)], shards=([rank, 2], None))
    assert read_run(tmp_path / "run.rank0.jsonl").step_grad_cosine == pytest.approx([4.0 / math.sqrt(9.0 * 16.0)])


def test_without_all_shards_nothing_is_claimed(tmp_path):
    lines = [step(t, [3.0, 4.0], partial_sums=[1.0] * 5) for t in range(3)]
    write(tmp_path, 0, lines, shards=([0, 2], None))
    run = read_run(tmp_path / "run.rank0.jsonl")
    assert run.missing_ranks == [1]
    assert math.isnan(run.norms[0][0])
    assert run.norms[0][1] == 4.0
    assert all(math.isnan(v) for v in run.norm + run.update + run.step_grad_cosine)
    write(tmp_path, 1, lines[:2], shards=([1, 2], None), end=())  # killed before its third step
    run = read_run(tmp_path / "run.rank0.jsonl")
    assert run.norm[:2] == pytest.approx([math.hypot(3, 3, 4)] * 2)
    assert math.isnan(run.norm[2])
    assert "Rank 1 stopped early: its record breaks off after 2 steps" in str(report_on(run))


def test_a_norm_that_clipping_has_found_is_kept(tmp_path):
    for rank in (0, 1):
        write(tmp_path, rank, [step(0, ["nan", 4.0], norm=6.0, peak=6.0)], shards=([rank, 2], None))
    assert read_run(tmp_path / "run.rank0.jsonl").norm == [6.0]


def test_values_that_are_not_finite_are_counted_over_shards(tmp_path):
    for rank in (0, 1, 2, 3):
        bad = {"w": 2 + rank % 2, **({"v": 1} if rank == 3 else {})}
        write(tmp_path, rank, [step(0, ["nan", 1.0], nonfinite=bad)], world=4, shards=([rank % 2, 2], None))
    events = read_run(tmp_path / "run.rank0.jsonl").nonfinite
    assert [(event.step, event.offenders) for event in events] == [(0, {"w": 5, "v": 1})]


def test_what_other_ranks_noted_is_reported(tmp_path):
    write(tmp_path, 0, [step(0, [1.0, 1.0])])
    more = [{"unmeasured": "w", "reason": "it is partial", "after": 0}, {"stopped": "OSError: full", "after": 1},
            {"anomaly": "Function 'X' returned nan values", "after": 0}, {"note": "test", "loss": 1.0, "after": 0}]  # fmt: skip
    write(tmp_path, 1, [step(0, [1.0, 1.0])], more=more)
    run = read_run(tmp_path / "run.rank0.jsonl")
    assert "Recording of rank 1 stopped after 1 steps: OSError: full." in warnings(run)
    assert "Not measured: the gradient of w. Why: it is partial." in warnings(run)
    assert run.noted_losses("test") == []  # its own affair
    assert any("anomaly" in note for note in run.notes)


def test_files_of_another_launch_are_left_out(tmp_path):
    write(tmp_path, 0, [step(0, [1.0, 1.0])], launch="new")
    write(tmp_path, 1, [step(0, [1.0, 1.0])], launch="old")
    assert read_run(tmp_path / "run.rank0.jsonl").missing_ranks == [1]


def test_a_report_takes_any_rank_or_all(tmp_path, capsys):
    files = [str(write(tmp_path, rank, [step(0, [1.0, 1.0])])) for rank in (0, 1)]
    for args in ([files[1]], files):
        assert main(["report", *args, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert main(["report", files[1]]) == 0
    assert (tmp_path / "run.html").exists()
    assert "<h2>Ranks</h2>" in (tmp_path / "run.html").read_text()


def test_more_than_two_runs_are_refused():
    with pytest.raises(ArgumentError, match="found 3"):
        one_file_per_run(["a.jsonl", "b.jsonl", "c.jsonl"])


def test_an_optimizer_that_only_one_rank_has_got_to(tmp_path):
    write(tmp_path, 0, [step(0, [1.0, 1.0])])
    rank_file(tmp_path / "run.jsonl", 1).write_text(json.dumps({"gradrein": 2, **vars(RankInfo(1, 2, "here"))}) + "\n")
    run = read_run(tmp_path / "run.rank0.jsonl")
    assert [len(one.steps) for one in run.ranks] == [1, 0]
    with pytest.raises(RecordError, match="no optimizer 3"):
        read_run(tmp_path / "run.rank0.jsonl", optimizer=3)


def test_rank_0_names_the_command_that_reports_on_all(tmp_path, monkeypatch, capsys):
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        monitor = gradrein.Monitor(record=tmp_path / "run.jsonl").start()
        watch._conclude(monitor, False, [], os.getpid(), rank_info())
    first = tmp_path / "run.rank0.jsonl"
    assert capsys.readouterr().err == f"gradrein: when all 2 ranks have ended: gradrein report {first}\n"
