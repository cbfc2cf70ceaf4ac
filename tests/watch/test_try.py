"""`gradrein watch --try`: the script as it is, then with what was advised, side by side."""

import dataclasses
import math
import re
import signal
import sys
import time

import pytest
import torch

from gradrein.errors import ArgumentError
from gradrein.watch import read_run
from gradrein.watch.analysis.compare import over_lowest
from gradrein.watch.command.lr_scale import scale_learning_rates
from gradrein.watch.command.try_script import candidates, comparison, label_of_trial, record_of_trial
from gradrein.watch.report.report import report_on

from .forked import run_forked
from .processes import killed_after, start
from .test_findings import N, swinging, with_test

# Full-batch descent on a quadratic-like loss at a step that makes it bounce, by design and on any machine.
BOUNCES = """
import torch
weight = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
optimizer = torch.optim.SGD([weight], lr=0.9, momentum=0.95)
for step in range(150):
    optimizer.zero_grad()
    loss = (weight.square() * torch.tensor([1.0, 0.02])).sum() + 0.1
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        with torch.no_grad():
            print("step", step, "val loss", float(weight.square().sum()) + 0.1, flush=True)
"""


def test_the_runs_are_compared_and_kept(tmp_path):
    (tmp_path / "train.py").write_text(BOUNCES)
    options = ["--try", "--record", "tried", "--steps", "120"]
    done = run_forked(tmp_path, "-m", "gradrein", "watch", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "run 1: as it is" in done.stderr
    assert "as it is  " in done.stderr
    assert "learning rate x " in done.stderr
    assert "To keep it, in train.py" in done.stderr or "none of the changes is better" in done.stderr
    page = (tmp_path / "tried" / "try.html").read_text()
    assert "What was tried" in page
    assert "Measured by <code>gradrein watch --try</code>" in page
    assert page.count("<li><b>") == 1  # what is kept, and none of what else was advised
    assert re.search(r"What to do: .*\. Keep", page)
    other = next((tmp_path / "tried").glob("*lr-scale*.jsonl"))
    first, slower = read_run(tmp_path / "tried" / "as-it-is.jsonl"), read_run(other)
    assert len(first.steps) == len(slower.steps) == 120
    assert slower.lr[0] == pytest.approx(0.9 * float(other.stem.rpartition("-")[2]))
    assert first.loss[0] == slower.loss[0]
    assert [note["factor"] for note in slower.notes if note.get("note") == "lr-scale"] == [
        float(other.stem.rpartition("-")[2])
    ]


def test_a_change_of_two_options_is_one_trial(tmp_path):
    assert label_of_trial("--clip 0.5 --lr-scale 0.33") == "clip 0.5, learning rate x 0.33"
    assert record_of_trial("--clip 0.5 --lr-scale 0.33", tmp_path) == tmp_path / "clip-0.5-lr-scale-0.33.jsonl"
    assert label_of_trial("") == "as it is"


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_what_is_advised_is_tried(optimizer):
    report = report_on(dataclasses.replace(swinging(), optimizer=optimizer))
    trials = candidates(report)
    assert 2 <= len(trials) <= 6
    assert "--try" not in trials
    assert set(trials) <= {action.try_with for action in report.advice.actions}


def test_one_interrupt_keeps_what_is_there(tmp_path):
    (tmp_path / "train.py").write_text(BOUNCES.replace("range(150)", "range(10**9)"))
    command = [sys.executable, "-m", "gradrein", "watch", "--try", "--record", "tried", "train.py"]
    process = start(command, cwd=tmp_path)
    with killed_after(200, process):
        record = tmp_path / "tried" / "as-it-is.jsonl"
        until = time.monotonic() + 120
        while time.monotonic() < until and (not record.exists() or record.stat().st_size < 100_000):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert "interrupted: what was recorded is kept" in err
    assert "as it is  " in err or "There is nothing to try" in err  # by what was recorded until then
    assert len(read_run(record).steps) > 30


def test_a_script_that_fails_is_shown(tmp_path):
    fails = "    if step == 60:\n        raise ValueError('no data')\n"
    for script, steps in (("raise ValueError('no data')", 0), (BOUNCES + fails, 61)):
        (tmp_path / "train.py").write_text(script)
        done = run_forked(tmp_path, "-m", "gradrein", "watch", "--try", "--record", f"t{steps}", "train.py")
        assert done.returncode == 1
        assert f"as it is: the script failed after {steps} steps: ValueError: no data (see" in done.stderr


def test_a_healthy_script_is_run_once(tmp_path):
    (tmp_path / "train.py").write_text(BOUNCES.replace("lr=0.9, momentum=0.95", "lr=0.05"))
    done = run_forked(tmp_path, "-m", "gradrein", "watch", "--try", "--record", "t", "train.py")
    assert done.returncode == 0
    assert "There is nothing to try" in done.stderr
    assert [p.name for p in (tmp_path / "t").glob("*.jsonl")] == ["as-it-is.jsonl"]


def ends_at(end, rise=1.0):
    """A run whose test loss ends so, and whose training loss ends so many times above its lowest."""
    loss = [1.0] * 200 + [rise] * 200
    return with_test(
        [1.1, *[1.0] * 8, end], every=40, loss=loss if math.isfinite(end) else [*loss[:390], *[math.nan] * 10]
    )


def test_the_change_to_keep_is_said_with_how_much_better_it_is():
    def said(*after):
        return comparison([("as it is", ends_at(1.0)), ("clip auto, learning rate x 0.5", ends_at(*after))], N)

    table = said(0.5)
    assert "Keep: clip auto, learning rate x 0.5. The val loss ends at 0.5 instead of 1, 2 times lower." in table
    assert "training loss rises" not in table
    assert "Keep the script as it is" in said(2.0)
    assert "Keep the script as it is" in said(math.inf)
    assert "But its training loss rises: its last fifth is 1.5 times its lowest." in said(0.5, 1.5)
    assert "still falls" not in table
    falling = with_test([3 * 0.8**i for i in range(20)], every=20)
    assert "It still falls at the end: train longer" in comparison([("as it is", ends_at(1.0)), ("auto", falling)], N)
    heads, first, second = table.splitlines()[:3]  # columns are aligned
    assert heads.index("val loss") == first.index("█") == second.index("█")


def test_the_learning_rate_is_scaled_under_a_scheduler_and_put_back():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    hooks = scale_learning_rates(0.1)
    try:
        for expected in (0.1, 0.05):
            before = weight.item()
            weight.grad = torch.ones(1)
            optimizer.step()
            schedule.step()
            assert before - weight.item() == pytest.approx(expected, rel=1e-5)
        assert optimizer.param_groups[0]["lr"] == 0.25
    finally:
        for hook in hooks:
            hook.remove()
    with pytest.raises(ArgumentError, match="a finite number above 0"):
        scale_learning_rates(0.0)


def test_over_the_lowest():
    assert over_lowest([3.0, 2.0, 1.0]) == 1
    assert over_lowest([1.0, 10.0, 100.0]) == pytest.approx(10)
    assert math.isnan(over_lowest([1.0, -1.0]))
