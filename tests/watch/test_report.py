"""One report value: built once, of every optimizer, with checks of one's own."""

import json
import math
import sys

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import ArgumentError
from gradrein.watch import Finding, read_report, register_finding
from gradrein.watch.analysis import findings
from gradrein.watch.report.report import report_on

from .processes import run_process
from .runs import healthy, left_out
from .test_findings import N, cubed, decayed, overfits, shrinking, swinging, two_kinds


def test_text_json_and_page_say_the_same(tmp_path):
    report = report_on(two_kinds())
    report.write_page(tmp_path / "page.html")
    page, found = (tmp_path / "page.html").read_text(), report.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False))["findings"][0]["title"] == report.findings[0].title
    assert report.findings[0].title[1:] in page
    assert report.findings[0].title[:40] in report.details()
    assert found["advice"]["policy"] == report.advice.policy


def train_two(steps=60, poison=None):
    """A generator and a discriminator, each with its own loss and optimizer."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    with gradrein.Monitor(nn.ModuleDict(dict(zip(("d", "g"), nets, strict=True)))) as monitor:
        for t in range(steps):
            for i, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                (net(torch.randn(16, 4)) - 1).square().mean().backward()
                if (i, t) == poison:
                    net.weight.grad[0, 0] = math.nan
                optimizer.step()
    return monitor


@pytest.mark.parametrize("which", [0, 1])
def test_every_optimizer_is_judged(which, tmp_path):
    monitor = train_two(poison=(which, 40))
    report = monitor.report()
    name = ("d", "g")[which]
    first = next(finding for finding in monitor.findings() if finding.name == "nonfinite")
    assert first.optimizer == f"optimizer {which} (Adam)"
    assert str(first).startswith(
        f"nonfinite: optimizer {which} (Adam): gradients were not finite: first at step 40, in {name}."
    )
    assert f"optimizer {which} (Adam): gradients were not finite" in report.details()
    report.write_page(tmp_path / "page.html")
    assert f"ptimizer {which} (Adam): gradients were not finite" in (tmp_path / "page.html").read_text()
    assert report.to_dict()["findings"][0]["optimizer"] == f"optimizer {which} (Adam)"
    one = read_report(monitor.path, optimizer=1 - which)  # asked for the other one only
    assert "nonfinite" not in {finding.name for finding in one.findings}


def test_two_healthy_optimizers_have_no_findings():
    report = train_two().report()
    assert report.findings == []
    assert [run.opt for run in (report.run, *report.others)] == [0, 1]
    assert "1 more optimizer in the record" in report.details()


LONGEST = [swinging, cubed, two_kinds, decayed, overfits, shrinking, left_out]


@pytest.mark.parametrize("make", LONGEST)
@pytest.mark.parametrize("warnings", [0, 3])
def test_a_report_has_eleven_lines_at_most(make, warnings):
    """The line about the page makes twelve."""
    run = make()
    run.warnings.extend(
        ["A sentence about something that is missing from the record, with a reason for it."] * warnings
    )
    run.header["argv"] = ["train.py", *(f"--option-{i}=value" for i in range(30))]
    report = report_on(run)
    text = str(report)
    assert text.count("\n") <= 11
    commands = [line for line in text.splitlines() if line.startswith("Try it without editing")]
    assert max(len(line) for line in text.splitlines() if line not in commands) <= 110
    for command in commands:  # whole, to be copied
        assert command.endswith("--option-29=value")
        assert ("(--try measures " in command) == (len(report.advice.actions) > 1 and "--try train" not in command)
    assert report.verdict.what[:40] in text
    assert all(action.lines[-1] in text for action in report.advice.actions[:1] if action.lines)


def test_the_sample_to_look_at_comes_with_the_first_lines():
    run = swinging()
    run.peak[:] = run.norm[:] = [v * (50 if t % 40 == 20 else 1) for t, v in enumerate(run.norm)]
    run.norm[100] = run.peak[100] = 1000.0
    assert "Look first at the batch of step 100." in str(report_on(run))
    run.notes.extend({"batch": [7, t], "dataset": 50_000, "opt": 0, "after": t} for t in range(20, N, 40))
    assert "Look first at sample 7 of the dataset, which is in far more of the bad batches" in str(report_on(run))


OWN = """
import torch
import gradrein
from gradrein.watch import Chart, Finding, Run, register_finding

@register_finding
def steps(run: Run) -> Finding | None:
    if len(run.steps) < 3:
        return None
    return Finding(
        name="steps", title=f"{len(run.steps)} steps & counting", weight=0.5, criterion="at least 3 steps",
        evidence={"steps": len(run.steps)}, advice="Take more.", chart=Chart("loss", {"loss": run.loss}, run.steps),
    )

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
report = gradrein.watch.read_report("run.jsonl")
print([finding.name for finding in report.findings])
report.write_page("own.html")
"""


def test_a_finding_can_be_written_outside_the_package(tmp_path):
    assert "._" not in OWN  # nothing private
    (tmp_path / "own.py").write_text(OWN)
    command = [sys.executable, "-m", "gradrein", "watch", "--verbose", "--record", "run.jsonl", "own.py"]
    done = run_process(command, cwd=tmp_path)
    assert done.stdout == "['steps']\n", done.stderr
    assert "1. 40 steps & counting [steps]" in done.stderr
    assert "40 steps &amp; counting" in (tmp_path / "own.html").read_text()


def test_what_is_no_check_is_refused():
    with pytest.raises(ArgumentError, match="a check is a function from a Run to a Finding or None; found 3"):
        register_finding(3)
    with pytest.raises(ArgumentError, match="is registered already"):
        register_finding(findings.SYMPTOMS[0])

    def always(run):
        return Finding("always", "it is there", 0.01, "none", {}, "Nothing.")

    assert register_finding(always) is always
    with pytest.raises(ArgumentError, match="is registered already"):
        register_finding(always)
    report = report_on(healthy())
    assert [finding.name for finding in report.findings] == ["always"]
