import json
from pathlib import Path

import torch

import gradrein
from gradrein.watch import read_run
from gradrein.watch.format import schema
from gradrein.watch.record.writer import Writer, rounded

HEADER = {"gradrein": 2}
OPTIMIZER = {"optimizer": "SGD", "opt": 0, "names": ["w"], "sizes": [1], "trained": [True]}


def step(t, **more):
    return {"step": t, "opt": 0, "norm": 1.0, "norms": [1.0], "n_steps": 1, "peak": 1.0, "loss": 0.5, **more}


def write(path, steps, max_bytes=10_000_000):
    writer = Writer(path, max_bytes)
    writer.open()
    writer.write(HEADER)
    writer.write(OPTIMIZER)
    for line in steps:
        writer.write_step(line)
    return writer


def test_every_line_is_on_disk_before_the_next_step(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = write(path, [step(0)])
    assert read_run(path).steps == [0]  # not closed, not flushed
    writer.close()


def test_a_last_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, [step(t) for t in range(3)]).close()
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole[:-cut])
        assert read_run(path).steps == [0, 1]


def test_a_long_run_stays_within_its_size_and_keeps_its_peaks(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = write(path, [], max_bytes=20_000)
    for t in range(5000):
        size = 99.0 if t == 3333 else 1.0
        writer.write_step(step(t, norm=size, peak=size))
        assert path.stat().st_size < 21_000
    writer.close()
    run = read_run(path)
    assert sum(run.n_steps) == 5000
    assert max(run.peak) == 99.0
    assert run.steps == sorted(run.steps)
    assert max(run.n_steps) > 1
    assert not list(tmp_path.glob("*.thinner"))


def test_steps_whose_norm_no_rank_knows_are_thinned_as_well(tmp_path):
    path = tmp_path / "run.jsonl"
    steps = [{k: v for k, v in step(t).items() if k not in ("norm", "peak")} for t in range(2000)]
    write(path, steps, max_bytes=20_000).close()
    assert sum(read_run(path).n_steps) == 2000
    assert path.stat().st_size < 21_000


def test_a_step_that_was_not_finite_outlives_its_neighbours(tmp_path):
    path = tmp_path / "run.jsonl"
    bad = {"nonfinite": {"w": 2}, "norm": "nan", "peak": "nan"}
    write(path, [step(t, **(bad if t == 1234 else {})) for t in range(3000)], max_bytes=20_000).close()
    assert [(e.step, e.offenders) for e in read_run(path).nonfinite] == [(1234, {"w": 2})]


def test_numbers_that_json_has_not_become_words():
    assert rounded([float("nan"), float("inf"), None, 1.23456789]) == ["nan", "inf", None, 1.23457]


def test_every_key_is_in_the_schema(tmp_path, monkeypatch):
    """Of a rank, with clipping, a non-finite gradient, per-sample norms, a note."""
    for key, found in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, found)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with gradrein.Monitor(None, optimizer, record=tmp_path / "run.jsonl", clip=0.5) as monitor:
        for t in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                weight.square().sum().backward()
            if t == 3:
                weight.grad[0] = float("nan")
            monitor.per_sample(torch.ones(4))
            optimizer.step()
            print("epoch", t, "val loss 0.5")
        monitor.note("test", loss=0.5)
    header, *lines = map(json.loads, Path(monitor.path).read_text().splitlines())
    for line in lines:
        assert set(line) <= set(next(keys for kind, keys in schema.KEYS.items() if kind in line))
    known = set().union(*schema.KEYS.values())
    of_other_runs = {"shards", "partial_sums", "anomaly", "stopped", "unmeasured", "reason", "unnamed", "library"}
    assert known - set(header).union(*lines) - {"batch", "dataset", "rank"} == of_other_runs
