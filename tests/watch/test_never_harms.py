"""The program that is watched runs to its own end, whatever happens to its record."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

import gradrein
from gradrein.watch import read_run

from .forked import run_forked
from .processes import run_process

TRAINS = """
import os, sys
import torch
weight = torch.nn.Parameter(torch.ones(200))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
    if step == 20:
        {event}
print("end", round(float(weight.detach().sum()), 3), flush=True)
{last}
"""


def watch(folder, *options, event="pass", last="sys.exit(3)"):
    (folder / "train.py").write_text(TRAINS.format(event=event, last=last))
    return run_forked(folder, "-m", "gradrein", "watch", *options, "train.py")


def ours(done):
    """What gradrein says, without the report."""
    return [line for line in done.stderr.splitlines() if line.startswith("gradrein: ")]


def check(done, *words):
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("end ")
    assert "Traceback" not in done.stderr, done.stderr
    assert words[0] in ours(done)[0]


def test_a_full_disk(tmp_path):
    event = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat('run.jsonl').st_size + 99,) * 2)"
    done = watch(tmp_path, "--record", "run.jsonl", event=event)
    check(done, "recording stopped at step 22, the program continues: the record ")
    assert "SGD, 21 steps recorded" in done.stderr
    assert len(ours(done)) == 2
    assert read_run(tmp_path / "run.jsonl").steps == list(range(21))  # whole lines only


def test_a_record_that_is_deleted(tmp_path):
    done = watch(tmp_path, "--record", "run.jsonl", event="os.remove('run.jsonl')")
    check(done, "cannot be written: the file was moved or deleted while it was written")
    assert len(ours(done)) == 1
    assert not (tmp_path / "run.jsonl").exists()


def test_descriptors_that_are_closed_and_used_for_something_else(tmp_path):
    event = "os.closerange(3, 64); kept = [open(f'own{i}', 'w') for i in range(30)]"
    last = "[f.write('mine') for f in kept]; [f.close() for f in kept]; sys.exit(3)"
    done = watch(tmp_path, "--record", "run.jsonl", event=event, last=last)
    assert done.returncode == 3, done.stderr
    assert {(tmp_path / f"own{i}").read_text() for i in range(30)} == {"mine"}
    assert len(read_run(tmp_path / "run.jsonl").steps) == 60


@pytest.mark.parametrize("place", ["file/run.jsonl", "/proc/none/run.jsonl", "x" * 300])
def test_a_place_where_nothing_can_be_written(tmp_path, place):
    (tmp_path / "file").touch()
    done = watch(tmp_path, "--record", place)
    check(done, "the program runs without recording: the record ")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_folder_is_made_and_a_name_that_is_taken_is_numbered(tmp_path):
    for name in ("run.jsonl", "run-2.jsonl"):
        done = watch(tmp_path, "--record", "logs/run.jsonl")
        assert done.returncode == 3
        assert f"The page: gradrein report {tmp_path / 'logs' / name}" in done.stderr
        assert len(read_run(tmp_path / "logs" / name).steps) == 60
    first, second = tmp_path / "logs" / "run.jsonl", tmp_path / "logs" / "run-2.jsonl"
    assert f"gradrein: {first} is not empty: this run is recorded in {second}." in done.stderr


def test_without_stderr_nothing_goes_to_stdout_or_into_the_record(tmp_path):
    event = "os.write(2, b'to stderr') if sys.stderr else None"
    (tmp_path / "train.py").write_text(TRAINS.format(event=event, last="sys.exit(3)"))
    command = [sys.executable, "-m", "gradrein", "watch", "--record", "run.jsonl", "train.py"]
    done = run_process(command, cwd=tmp_path, preexec_fn=lambda: os.close(2))
    assert done.returncode == 3
    assert done.stdout.splitlines() == [done.stdout.strip()]
    assert len(read_run(tmp_path / "run.jsonl").steps) == 60


def test_a_script_that_exits_at_once_leaves_a_whole_record(tmp_path):
    done = watch(tmp_path, "--record", "run.jsonl", last="os._exit(5)")
    assert done.returncode == 5
    assert len(read_run(tmp_path / "run.jsonl").steps) == 60


def test_scripts_without_steps_are_told_what_is_observed(tmp_path):
    (tmp_path / "hand.py").write_text("import torch\nw = torch.ones(1, requires_grad=True)\n(w * 2).sum().backward()\n")
    (tmp_path / "none.py").write_text("import torch\n")
    hand, none = (run_forked(tmp_path, "-m", "gradrein", "watch", f"{name}.py") for name in ("hand", "none"))
    assert "1 backward pass was seen" in hand.stderr
    assert "There was no backward pass either" in none.stderr
    assert hand.returncode == none.returncode == 0


def test_a_folder_is_run_as_python_runs_it(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "beside.py").write_text("X = 7\n")
    (tmp_path / "app" / "__main__.py").write_text("import sys, beside\nprint(beside.X, sys.argv, __name__)\n")
    plain = run_process([sys.executable, "app", "a"], cwd=tmp_path)
    done = run_process([sys.executable, "-m", "gradrein", "watch", "app", "a"], cwd=tmp_path)
    assert done.stdout == plain.stdout
    assert (tmp_path / "app.gradrein.jsonl").exists()
    (tmp_path / "app" / "__main__.py").unlink()
    done = run_process([sys.executable, "-m", "gradrein", "watch", "app"], cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == "gradrein: can't run 'app': it is a folder without a __main__.py. Name the script in it, such as app/beside.py.\n"
    )


def steps(count, optimizer):
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(count):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path, monkeypatch, optimizer, capsys):
    original, steps_written, full = os.write, [], []

    def fill(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if b'"norms"' in bytes(data):
            steps_written.append(data)
        if len(steps_written) < 2:
            return original(descriptor, data)
        full.append(True)
        return original(descriptor, data[: len(data) // 2])

    with gradrein.Monitor(None, optimizer, record=tmp_path / "run.jsonl") as monitor:
        monkeypatch.setattr(os, "write", fill)
        steps(4, optimizer)
        monkeypatch.undo()
    assert "No space left on device" in monitor.stopped_because
    assert monitor.steps == 4
    assert Path(monitor.path).read_bytes().endswith(b"}\n")
    assert read_run(monitor.path).steps == [0]
    assert capsys.readouterr().err.count("\n") == 1
    with monitor:  # there is room again
        steps(2, optimizer)
    assert monitor.stopped_because is None
    assert read_run(monitor.path).steps == [0, 4, 5]


def test_a_record_that_cannot_be_thinned_stops_and_leaves_nothing_behind(tmp_path, monkeypatch, optimizer):
    def refuse(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with gradrein.Monitor(None, optimizer, record=tmp_path / "run.jsonl", max_bytes=10_000) as monitor:
        monkeypatch.setattr(Path, "write_bytes", refuse)
        steps(100, optimizer)
    assert "No space left" in monitor.stopped_because
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
    assert len(read_run(monitor.path).steps) > 30


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_file_in_its_place_is_not_touched(tmp_path, optimizer, how):
    path = tmp_path / "run.jsonl"
    with gradrein.Monitor(None, optimizer, record=path, max_bytes=10_000) as monitor:
        steps(5, optimizer)
        path.rename(tmp_path / "elsewhere.jsonl")
        if how == "replaced":
            path.write_text("another")
        steps(100, optimizer)
    assert f"the file was {how}" in monitor.stopped_because
    assert how == "moved" or path.read_text() == "another"
    assert len(read_run(tmp_path / "elsewhere.jsonl").steps) == 5


def test_a_forked_child_writes_nothing(tmp_path, optimizer):
    with gradrein.Monitor(None, optimizer, record=tmp_path / "run.jsonl") as monitor:
        steps(2, optimizer)
        child = os.fork()
        if child == 0:
            try:
                steps(5, optimizer)
                monitor.note("test", loss=1.0)
                monitor.stop()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        steps(1, optimizer)
    run = read_run(monitor.path)
    assert run.steps == [0, 1, 2]
    assert not any("note" in line for line in run.notes)


def test_lbfgs_is_told_what_clipping_does_to_it():
    weight = torch.nn.Parameter(torch.full((3,), 5.0))
    lbfgs = torch.optim.LBFGS([weight], lr=0.5, max_iter=3)

    def closure():
        lbfgs.zero_grad()
        loss = weight.pow(4).sum()
        loss.backward()
        return loss

    with gradrein.Monitor(None, lbfgs, clip=1.0) as monitor:
        lbfgs.step(closure)
        lbfgs.step(closure)
    assert any("LBFGS is clipped" in warning for warning in monitor.report().warnings)
    with gradrein.Monitor(None, lbfgs) as monitor:
        lbfgs.step(closure)
    assert monitor.report().warnings == []
