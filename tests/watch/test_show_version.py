"""`gradrein --version` says what a bug report needs."""

import platform
import sys

import pytest
import torch

import gradrein
import gradrein_cli
from gradrein.watch.command import versions
from gradrein.watch.command.fail_on import EXIT_CODE

from .processes import run_process


def test_it_says_what_is_in_use(capsys):
    with pytest.raises(SystemExit) as ended:
        gradrein_cli.main(["--version"])
    assert ended.value.code == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first == f"gradrein {gradrein.__version__}"
    assert second.startswith(f"torch {torch.__version__}")
    assert third == f"Python {platform.python_version()}"
    assert fourth == f"clipping on the CPU: {gradrein.kernel_status()}"


def test_a_torch_that_was_not_tested_is_no_secret(monkeypatch):
    monkeypatch.setattr(versions, "CHECKED", ("1.0.0", "1.1.0"))
    assert f"torch {torch.__version__} (tested with 1.0.0, 1.1.0)" in versions.versions()
    monkeypatch.setattr(versions, "CHECKED", (torch.__version__.partition("+")[0],))
    assert f"torch {torch.__version__}\n" in versions.versions()


def test_the_kernels_switched_off():
    done = run_process([sys.executable, "-m", "gradrein", "--version"], env={"GRADREIN_NATIVE": "0"})
    assert done.returncode == 0
    assert "torch operations: GRADREIN_NATIVE=0 is set" in done.stdout


def test_the_help_does_not_wait_for_torch():
    code = "import sys, gradrein_cli\ntry: gradrein_cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = run_process([sys.executable, "-c", code])
    assert "watch" in done.stdout
    assert done.stdout.endswith("False\n"), done.stdout


def test_the_help_names_the_exit_code(capsys):
    with pytest.raises(SystemExit):
        gradrein_cli.main(["watch", "--help"])
    assert f"exit with {EXIT_CODE} if" in capsys.readouterr().out
