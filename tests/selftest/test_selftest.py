"""`gradrein selftest` on the CPU; tests/devices runs its checks on a simulated accelerator."""

import json
import subprocess
import sys

import pytest

from gradrein.selftest import _checks, _run, _speed, main


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_speed, "_ROUNDS", 2)
    monkeypatch.setattr(_speed, "per_sample", lambda device: list(PER_SAMPLE(device))[:1])


PER_SAMPLE = _speed.per_sample


def test_everything_is_right_here_and_one_file_says_so(quick, tmp_path, capsys):
    assert main("cpu", str(tmp_path / "found.json")) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {*found["checks"].values()} == {"right"}
    assert len(found["checks"]) == len(_checks.CHECKS) > 25
    assert found["environment"]["device"] == "cpu"
    assert {"torch, ms", "gradrein"} <= {*found["speed"]["clip 300 of 32 x 32, float32"]}
    assert {"plain, ms", "gradrein", "torch.func"} <= {*found["speed"]["step MLP 256"]}
    assert "29 of 29 checks are right" in capsys.readouterr().out


def test_what_is_wrong_is_named_and_fails(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_run, "CHECKS", {"clip_grad_norm_": _checks.CHECKS["clip_grad_norm_, order 2, float32"]})
    monkeypatch.setattr(_checks, "_norm", lambda parameters, p: 2 * float("nan") + parameters[0].grad.sum())
    monkeypatch.setattr(_run._speed, "clipping", lambda device: ())
    assert main("cpu", str(tmp_path / "found.json")) == 1
    assert "WRONG  clip_grad_norm_: AssertionError" in capsys.readouterr().out


def test_a_device_that_is_not_there(capsys):
    assert main("cuda", None) == 2
    assert "--device cuda: torch cannot use it here" in capsys.readouterr().err
    run = subprocess.run([sys.executable, "-m", "gradrein", "selftest", "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert "--device" in run.stdout
