"""`pip install` with a compiler builds the kernel; without one it succeeds all the same."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
USE = """
import torch, gradrein
from gradrein import _kernels
p = torch.nn.Parameter(torch.zeros(2))
p.grad = torch.tensor([3.0, 4.0])
assert gradrein.clip_grad_norm_([p], 1.0).item() == 5
assert gradrein.clip_(p, gradrein.by_value(0.7)).clipped
print("kernels" if _kernels.BACKENDS["cpu"] else "torch only")
"""


@pytest.mark.parametrize(
    "compiler", [pytest.param("found", marks=pytest.mark.needs("DLPack exchange table")), "missing"]
)
def test_install(compiler, tmp_path):
    if compiler == "found" and not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("no C compiler on this machine")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    hidden = {} if compiler == "found" else {"CC": str(tmp_path / "no-such-compiler")}
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(target), str(source)]
    subprocess.run(pip, check=True, env={**os.environ, **hidden}, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(target), "GRADREIN_NATIVE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE], check=True, env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == ("kernels" if compiler == "found" else "torch only")


def test_kernels_can_be_switched_off():
    env = {**os.environ, "GRADREIN_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", USE], check=True, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "torch only"
