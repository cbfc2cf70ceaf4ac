"""What a record holds is never overwritten, mixed with another's, or lost."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError, RecordWriteError
from gradrein.watch import read_run


def train(steps, optimizer=None):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer or torch.optim.SGD([weight], lr=0.1)
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(steps):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    return optimizer


def test_a_second_run_under_one_name_is_numbered(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    with gradrein.Monitor(record=path):
        train(3)
    first = path.read_bytes()
    with gradrein.Monitor(record=path) as second:
        train(5)
    assert f"{path} is not empty: this run is recorded in {second.path}." in capsys.readouterr().err
    assert path.read_bytes() == first
    assert second.path == str(tmp_path / "run-2.jsonl")
    assert len(read_run(second.path).steps) == 5


def test_a_file_that_is_no_record_is_left_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    with gradrein.Monitor(record=script):
        train(1)
    assert script.read_text() == "print(1)\n"


def test_an_empty_file_is_used(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    with gradrein.Monitor(record=path):
        train(2)
    assert len(read_run(path).steps) == 2


def test_two_monitors_at_once_have_a_file_each(tmp_path):
    path = tmp_path / "run.jsonl"
    with gradrein.Monitor(record=path) as one:
        train(1)
        with gradrein.Monitor(record=path) as two:
            train(2)
    assert [len(read_run(m.path, optimizer=0).steps) for m in (one, two)] == [1, 2]
    assert read_run(one.path).n_optimizers == 2


def test_two_processes_have_a_file_each(tmp_path):
    code = "import sys; from pathlib import Path; from gradrein.watch.record.claim import claim\n"
    code += "sys.stdin.readline(); p = claim(Path('run.jsonl'), None); p.write_text('x'); print(p.name)"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    children = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    names = {child.communicate(timeout=300)[0].strip() for child in children}
    assert names == {"run.jsonl", "run-2.jsonl", "run-3.jsonl"}


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    import os

    path = tmp_path / "there"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(ArgumentError, match=r"`record` names the file to write; .*there is"):
        gradrein.Monitor(record=path).start()


def test_a_record_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    monitor = gradrein.Monitor(record=tmp_path / "file" / "run.jsonl")
    before = torch.autograd.backward
    with pytest.raises(RecordWriteError, match=r"run\.jsonl cannot be written: ") as caught, monitor:
        pass
    assert isinstance(caught.value, OSError)
    assert torch.autograd.backward is before


def test_a_dangling_link_is_left_alone(tmp_path):
    (tmp_path / "run.jsonl").symlink_to(tmp_path / "nowhere")
    with gradrein.Monitor(record=tmp_path / "run.jsonl") as monitor:
        train(1)
    assert Path(monitor.path).name == "run-2.jsonl"


def test_a_record_that_was_deleted_between_two_blocks_begins_anew(tmp_path):
    monitor = gradrein.Monitor(record=tmp_path / "run.jsonl")
    with monitor:
        optimizer = train(2)
    Path(monitor.path).unlink()
    with monitor:
        train(3, optimizer)
    assert read_run(monitor.path).steps == [2, 3, 4]


def test_a_file_that_takes_the_place_of_the_record_is_left_alone(tmp_path, capsys):
    """It is somebody else's: recording stops, the program goes on."""
    monitor = gradrein.Monitor(record=tmp_path / "run.jsonl")
    with monitor:
        optimizer = train(2)
        other = tmp_path / "other"  # made while the record is there, so that it is another file
        other.write_text("mine\n")
        other.replace(monitor.path)
        train(2, optimizer)
    assert "the file was replaced by another while it was written" in monitor.stopped_because
    assert "recording stopped at step 3, the program continues" in capsys.readouterr().err
    assert Path(monitor.path).read_text() == "mine\n"
    assert monitor.steps == 4


def test_notes_go_into_the_record_also_after_the_run(tmp_path):
    monitor = gradrein.Monitor(record=tmp_path / "run.jsonl")
    with pytest.raises(ArgumentError, match="start"):
        monitor.note("test", loss=1.0)
    with monitor:
        train(2)
        monitor.note("test", loss=torch.tensor(0.5), step=7)
    monitor.note("test", loss=0.25)
    run = read_run(monitor.path)
    assert run.steps == [0, 1]  # the value called `step` makes no step of it
    assert run.noted_losses("test") == [(2, 0.5), (2, 0.25)]


@pytest.mark.parametrize("values", [{"loss": torch.ones(2)}, {"loss": [1.0]}, {"after": 3}, {"note": "x"}])
def test_a_note_that_a_line_cannot_hold_is_refused(tmp_path, values):
    with gradrein.Monitor(record=tmp_path / "run.jsonl") as monitor, pytest.raises(ArgumentError, match="note: "):
        monitor.note("test", **values)
    assert read_run(monitor.path).notes == []


def test_notes_do_not_make_the_record_be_rewritten_at_each_step(tmp_path, monkeypatch):
    from gradrein.watch.record.file import RecordFile

    rewritten = []
    original = RecordFile.rewrite
    monkeypatch.setattr(RecordFile, "rewrite", lambda self, data: (rewritten.append(1), original(self, data)))
    with gradrein.Monitor(record=tmp_path / "run.jsonl", max_bytes=10_000) as monitor:
        optimizer = train(1)
        for _ in range(300):
            monitor.note("epoch", text="x" * 100)
            train(1, optimizer)
    assert len(rewritten) < 15
    assert sum("note" in line for line in read_run(monitor.path).notes) == 300
