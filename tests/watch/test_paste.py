"""The lines to paste have the script's names, stand at the right line, and do what `gradrein watch` would."""

import dataclasses
import re
from pathlib import Path

import pytest

from gradrein.watch import read_run
from gradrein.watch.analysis.paste import paste_auto, paste_clip, paste_rate, paste_rate_and_auto, paste_rates
from gradrein.watch.analysis.sites import label_of
from gradrein.watch.record.assignment import find_assignment
from gradrein.watch.report.report import report_on

from .forked import run_forked
from .test_findings import swinging

ONE = """\
import torch

def main(rate):
    net = torch.nn.Linear(2, 1)
    made = torch.optim.SGD(
        net.parameters(),
        lr=rate,  # as it was given
    )
    for _ in range(3):
        step(net, made)
    print(made.param_groups[0]["lr"])

def step(net, opt):
    opt.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    opt.step()

main(0.5)
"""
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
print(first.param_groups[0]["lr"], second.param_groups[0]["lr"])
"""


def run_python(folder: Path, source: str, *options: str) -> str:
    (folder / "train.py").write_text(source)
    done = run_forked(folder, *(["-m", "gradrein", "watch", *options] if options else []), "train.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


def watched(folder: Path, source: str):
    run_python(folder, source, "--record", "run.jsonl")
    return read_run(folder / "run.jsonl")


def pasted(source: str, paste) -> str:
    """Return a script with lines pasted as somebody who reads `where` would."""
    lines = source.splitlines()
    place, first, last = re.search(r"(before|after|in place of) lines? (\d+)(?: to (\d+))?:", paste.where).groups()
    first, last = int(first), int(last or first)
    before, rest = {
        "before": (first - 1, first - 1),
        "after": (last, last),
        "in place of": (first - 1, last),
    }[place]
    return "\n".join([*lines[:before], *paste.lines, *lines[rest:]]) + "\n"


def test_every_line_works_where_it_is_said_to_go(tmp_path):
    run = watched(tmp_path, ONE)
    assert paste_auto(run).where.startswith("train.py, after lines 5 to 8: made = torch.optim.SGD(")
    assert (
        paste_auto(run).lines[-1]
        == '    clipper = gradrein.Clipper(made, gradrein.policies.ByOvershoot(), nonfinite="skip")'
    )
    assert run_python(tmp_path, pasted(ONE, paste_auto(run))) == "0.5\n"
    assert run_python(tmp_path, pasted(ONE, paste_clip(run, 1.5))) == "0.5\n"
    assert "clip_grad_norm_(net.parameters(), 1.5)" in paste_clip(run, 1.5).lines[0]
    assert run_python(tmp_path, pasted(ONE, paste_rate(run, 0.25))) == "0.25\n"
    both = pasted(ONE, paste_rate_and_auto(run, 0.25))
    assert run_python(tmp_path, both) == "0.25\n"
    assert both.count("made = ") == both.count("gradrein.Clipper(made,") == 1


def test_of_several_optimizers_all_are_changed_as_the_options_do(tmp_path):
    run = watched(tmp_path, TWO)
    assert label_of(run) == "first (Adam)"
    clip = paste_auto(run)
    assert clip.where.startswith("train.py, after line 5: second = ")
    assert clip.lines[-1].endswith("for one in (first, second)]")
    assert run_python(tmp_path, pasted(TWO, clip)) == "0.5 0.1\n"
    assert run_python(tmp_path, pasted(TWO, paste_rates(run, 2.0))) == "0.25 0.05\n"


@pytest.mark.parametrize(
    ("source", "name", "found"),
    [
        ("opt = make(1)\n", "opt", "opt = make(1)"),
        ("class A:\n    def f(self):\n        self.opt = make(lr=1e-3)\n", "self.opt", "self.opt = make(lr=0.001)"),
        ("opt = make(1)\nopt = wrap(opt)\n", "opt", None),
        ("opt = make(1)\nfor opt in many: pass\n", "opt", None),
        ("opt, other = make(1)\n", "opt", None),
        ("a = opt = make(1)\n", "opt", None),
        ("opt = other\n", "opt", None),
        ("x = 1; opt = make(1)\n", "opt", None),
        ("", "opt", None),
    ],
)
def test_a_statement_is_named_only_where_it_is_sure(source, name, found, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(source)
    statement = find_assignment(str(file), name)
    assert (statement and statement.text) == found


def test_a_rate_that_the_statement_does_not_set_is_said_in_words():
    run = swinging()
    made = {"site": "made", "opt": 0, "file": "/home/me/train.py", "line": 5, "end": 5, "indent": 0}
    for text in ("opt = build(cfg)", "opt = build(", "opt = both(a(lr=1), b(lr=2))"):
        run.notes[:] = [{**made, "text": text}]
        assert paste_rate(run, 0.1).where == "train.py, where the optimizer is made"
    both = paste_rate_and_auto(run, 0.1)
    assert both.where == "train.py, where the optimizer is made, and once after it"


@pytest.mark.parametrize(
    ("library", "place", "line"),
    [
        ("lightning", "in configure_optimizers", "SGD(..., lr=0.1)"),
        ("transformers", "where the trainer is configured", "TrainingArguments(..., learning_rate=0.1)"),
    ],
)
def test_a_framework_is_told_where_it_is_configured(library, place, line):
    run = swinging()
    run.notes.append({"site": "step", "opt": 0, "file": "x.py", "line": 1, "text": "", "indent": 0, "library": library})
    assert (paste_rate(run, 0.1).place, paste_rate(run, 0.1).lines) == (place, [line])
    assert paste_auto(run).place == "where the trainer is configured"
    assert f"from gradrein.integrations.{library} import MonitorCallback" in paste_auto(run).lines
    assert "in where" not in str(report_on(run))


def test_damaged_places_are_left_out():
    run = swinging()
    for broken in ({}, {"line": "5"}, {"text": None}, {"indent": None}):
        place = {"site": "made", "opt": 0, "file": "a.py", "line": 5, "text": "opt = a(lr=1)", "indent": 0, **broken}
        run.notes.append(place if broken else {"site": "made"})
    assert paste_rate(run, 0.1).where == "where the optimizer is made"


def test_optimizers_are_called_by_their_names_where_these_differ():
    run = dataclasses.replace(swinging(), n_optimizers=2)
    place = {"site": "step", "file": "a.py", "line": 5, "text": "opt.step()", "indent": 0}
    run.notes[:] = [{**place, "opt": i, "names": {"optimizer": name}} for i, name in enumerate(("optD", "optG"))]
    assert label_of(run) == "optD (SGD)"
    other = dataclasses.replace(run, opt=1)
    report = report_on(other, run)
    assert report.verdict.what.startswith("optG (SGD): the")  # a name keeps its letters
    run.notes[1]["names"] = {"optimizer": "optD"}
    assert label_of(run) == "optimizer 0 (SGD)"
