"""Where a change goes has the script's file, line and names, and the lines do what `gradrein watch` would."""

import dataclasses

import pytest

from gradrein.watch import read_run
from gradrein.watch.analysis.sites import label_of
from gradrein.watch.analysis.snippets import clipper_lines, rate_lines
from gradrein.watch.record.call_sites import _assignment
from gradrein.watch.report.report import report_on

from .forked import run_forked
from .test_findings import swinging

TWO = """\
import torch

one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
first = torch.optim.Adam(one.parameters(), lr=0.5)
second = torch.optim.Adam(two.parameters(), lr=0.1)
for _ in range(3):
    for net, opt in ((one, first), (two, second)):
        opt.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
    first.step()
    second.step()
print(one.weight.grad.norm() <= 0.011, two.weight.grad.norm() <= 0.011)
"""


@pytest.mark.parametrize("clip", [0.01, "auto"])
def test_the_lines_work_where_they_are_said_to_go(tmp_path, clip):
    script = tmp_path / "train.py"
    script.write_text(TWO)
    assert run_forked(tmp_path, "-m", "gradrein", "watch", "--record", "run.jsonl", "train.py").returncode == 0
    run = read_run(tmp_path / "run.jsonl")
    assert label_of(run) == "first (Adam)"
    where, lines = clipper_lines(run, clip)
    assert where == "in train.py, below line 4: first = torch.optim.Adam(one.parameters(), lr=0.5)"
    assert len(lines) == 3  # the import, and a clipper for each
    source = TWO.splitlines()
    script.write_text("\n".join([*source[:5], *lines, *source[5:]]))
    done = run_forked(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tensor(True) tensor(True)\n" or clip == "auto"


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        ("import a\nopt = make(1)\n", "opt", 2),
        ("class A:\n    def f(self):\n        self.opt: O = make(lr=1e-3)\n", "self.opt", 3),
        ("opt = make(1)\nopt = wrap(opt)\n", "opt", None),
        ("if opt == make(1): pass\n", "opt", None),
        ("", "opt", None),
    ],
)
def test_a_line_is_named_only_where_it_is_the_only_one(source, name, line, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(source)
    assert _assignment(str(file), name) == line


def test_without_a_known_line_the_place_is_said_in_words():
    run = swinging()
    assert clipper_lines(run, 1.5)[0] == "once, after the optimizer is made and before the training loop"
    assert rate_lines(run, 0.1) == ("where the optimizer is made", ["SGD(..., lr=0.1)"])
    run.notes.append({"site": "step", "opt": 0, "file": "/me/train.py", "line": 44, "text": "scaler.step(opt)"})
    assert clipper_lines(run, 1.5)[0] == "in train.py, once, before the loop of line 44: scaler.step(opt)"
    run.notes.append({"site": "made", "opt": 0, "file": "/me/train.py", "line": 5, "text": "opt = build(cfg)"})
    assert rate_lines(run, 0.1)[0] == "in train.py, line 5: opt = build(cfg)"


@pytest.mark.parametrize(
    ("library", "rate"),
    [("lightning", "SGD(..., lr=0.1)"), ("transformers", "TrainingArguments(..., learning_rate=0.1)")],
)
def test_a_trainer_is_told_where_it_is_made(library, rate):
    run = swinging()
    run.notes.append({"site": "step", "opt": 0, "file": "x.py", "line": 1, "text": "", "library": library})
    assert rate_lines(run, 0.1)[1] == [rate]
    assert clipper_lines(run, "auto") == (
        "where the trainer is made",
        [
            f"from gradrein.integrations.{library} import MonitorCallback",
            'Trainer(..., callbacks=[MonitorCallback(clip="auto")])',
        ],
    )


def test_optimizers_are_called_by_their_names_where_these_differ():
    run = dataclasses.replace(swinging(), n_optimizers=2)
    place = {"site": "step", "file": "a.py", "line": 5, "text": "opt.step()"}
    run.notes[:0] = [{**place, "opt": i, "names": {"optimizer": name}} for i, name in enumerate(("optD", "optG"))]
    assert label_of(run) == "optD (SGD)"
    other = dataclasses.replace(run, opt=1)
    report = report_on(other, run)
    assert report.verdict.what.startswith("optG (SGD): the")  # a name keeps its letters
    run.notes[1]["names"] = {"optimizer": "optD"}
    assert label_of(run) == "optimizer 0 (SGD)"
