"""Install each file of a folder into an empty environment with nothing but torch, and use it: make dist.

A source distribution is installed twice, with and without a compiler.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
SMOKE = """
import sys, torch, gradrein
assert "site-packages" in gradrein.__file__, gradrein.__file__
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gradrein.Monitor(model, record="run.jsonl"):
    for _ in range(3):
        losses = model(torch.randn(6, 4)).square().squeeze(1)
        norms = gradrein.per_sample(losses, model).norms()
        losses.mean().backward()
        before = gradrein.clip_grad_norm_(model.parameters(), 1e-3)
        after = gradrein.get_total_norm([p.grad for p in model.parameters()])
        assert norms.shape == (6,) and before > 1e-3 and after <= 1.001e-3
        optimizer.step()
print(gradrein.kernel_status().partition(":")[0])
"""


def main(folder: Path) -> None:
    """Check every file that `make dist` has built."""
    wheels = {found.name.split("-", 2)[2]: found for found in folder.glob("*.whl")}
    (source,) = folder.glob("*.tar.gz")
    (pure,) = [found for tag, found in wheels.items() if tag == "py3-none-any.whl"]
    (native,) = [found for tag, found in wheels.items() if tag.startswith("cp310-abi3-manylinux")]
    check_contents(source)
    with tempfile.TemporaryDirectory() as scratch:
        python = environment(Path(scratch) / "env")
        missing = {"CC": str(Path(scratch) / "no-such-compiler")}
        for file, environ, expected in (
            (native, {}, "C kernel"),
            (pure, {}, "torch operations"),
            (source, {}, "C kernel"),
            (source, missing, "torch operations"),
        ):
            pip(python, "install", "--force-reinstall", "--no-deps", "--no-cache-dir", str(file.resolve()), **environ)
            found = run([python, "-c", SMOKE], cwd=scratch).split("\n")[-2]
            assert found == expected, f"{file.name}: {found}, not {expected}"
            told = run([python.parent / "gradrein", "--version"], cwd=scratch)
            assert f"clipping on the CPU: {expected}" in told, told
            run([python.parent / "gradrein", "report", "--text", "run.jsonl"], cwd=scratch)
            (Path(scratch) / "run.jsonl").unlink()
            print(f"{file.name}{' without a compiler' if environ else ''}: {expected}")


def check_contents(source: Path) -> None:
    """Fail if something that others need to build and test is not in the source distribution."""
    names = run(["tar", "tzf", source]).split()
    for wanted in ("CHANGELOG.md", "LICENSE", "tests/conftest.py", "src/gradrein/_kernels/cpu.c", "setup.py"):
        assert any(name.endswith(f"/{wanted}") for name in names), f"{source.name} has no {wanted}"


def environment(folder: Path) -> Path:
    """Make an environment with torch alone, and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip(python, "install", TORCH)
    return python


def pip(python: Path, *args: str, **environ: str) -> None:
    """Run pip in an environment."""
    run([python, "-m", "pip", "--disable-pip-version-check", "-q", *args], env={**os.environ, **environ})


def run(command: list, **options) -> str:
    """Return what a command prints, or exit with all it said if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
