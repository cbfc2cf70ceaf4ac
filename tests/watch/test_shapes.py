"""Scripts in the shapes that people write run under `gradrein watch` as they run alone."""

import sys

import pytest

from gradrein.watch import read_run

from .forked import run_forked
from .processes import run_process
from .shapes import EXPECTED, write


def run_real(folder, *args):
    return run_process([sys.executable, *args], cwd=folder)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_output_is_the_same(tmp_path, name):
    script, steps, code = write(tmp_path)[name]
    run = run_real if name == "workers" else run_forked
    plain = run(tmp_path, script.name)
    watched = run(tmp_path, "-m", "gradrein", "watch", script.name)
    assert plain.returncode == watched.returncode == code, watched.stderr
    assert watched.stdout == plain.stdout
    assert plain.stdout.count("\n") >= 2
    assert watched.stderr.startswith(plain.stderr)
    record = tmp_path / f"{name}.gradrein.jsonl"
    runs = [read_run(record, optimizer=opt) for opt in range(len(steps))]
    assert [len(run.steps) for run in runs] == steps
    assert all(loss == loss for run in runs for loss in run.loss)  # known at every step
    assert f"{sum(runs[0].n_steps)} steps recorded" in watched.stderr
