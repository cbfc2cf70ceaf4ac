"""Runs the tests of `on_device/` on simulated devices, each in a process of its own: torch cannot forget a device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "on_device").glob("test_*.py"))
checked = pytest.mark.skipif(torch.__version__.split("+")[0] != "2.13.0", reason="simulated for torch 2.13.0 alone")


RUNS = [
    (kind, file) for kind in ("cuda", "sim") for file in FILES if (kind, file) != ("sim", "test_persample_routings.py")
]


@checked
@pytest.mark.parametrize(("kind", "file"), RUNS)
def test_on_device(kind, file):
    if kind == "cuda" and not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("the simulated CUDA needs a C++ compiler")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GRADREIN_DEVICE": kind, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "--tb=short"]
    run = subprocess.run(
        [*command, str(HERE / "on_device" / file)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
