"""`--fail-on`: an exit code for CI."""

import json
import random

import pytest

from gradrein.watch.command.fail_on import EXIT_CODE
from gradrein_cli import main

from .forked import run_forked
from .test_anything import HEADER, valid

SCRIPT = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    weight.square().sum().backward()
    if step == 3:
        weight.grad[0] = float("nan")
    optimizer.step()
print("end")
sys.exit(int(sys.argv[2]))
"""


def watch(folder, names, *args):
    (folder / "train.py").write_text(SCRIPT)
    return run_forked(folder, "-m", "gradrein", "watch", "--fail-on", names, "train.py", *args)


def test_a_script_that_ends_well_fails_by_its_findings(tmp_path):
    done = watch(tmp_path, "unsettled,nonfinite", "10", "0")
    assert done.returncode == EXIT_CODE == 99
    assert done.stdout == "end\n"
    assert done.stderr.startswith("gradrein: --fail-on: nonfinite: gradients were not finite")
    assert "10 steps recorded" in done.stderr  # the report is there as well


def test_other_findings_and_the_scripts_own_exit_code_pass(tmp_path):
    assert watch(tmp_path, "unsettled", "10", "0").returncode == 0
    assert watch(tmp_path, "any", "10", "4").returncode == 4


def test_what_was_not_recorded_cannot_be_vouched_for(tmp_path):
    done = watch(tmp_path, "unsettled", "0", "0")
    assert done.returncode == EXIT_CODE
    assert "the run was not recorded to its end, so nothing could be checked" in done.stderr


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [HEADER, *valid(random.Random(3))[1:]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_report_fails_by_its_findings(record, capsys):
    assert main(["report", "--text", record]) == 0
    assert main(["report", "--text", "--fail-on", "nonfinite", record]) == EXIT_CODE
    assert main(["report", "--json", "--fail-on", "any", record]) == EXIT_CODE
    assert "nonfinite" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["unsettle", "", "unsettled,tail", ","])
def test_a_name_that_is_none_is_refused(record, names, capsys):
    assert main(["report", "--text", "--fail-on", names, record]) == 2
    assert "--fail-on" in capsys.readouterr().err


def test_several_processes_are_told_to_ask_afterwards(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["watch", "--fail-on", "unsettled", str(tmp_path / "train.py")]) == 2
    assert "gradrein report --fail-on" in capsys.readouterr().err
