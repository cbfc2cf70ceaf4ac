import subprocess
import sys

import pytest

PACKAGES = {
    "lightning": "lightning",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "notebook": "IPython",
}


@pytest.fixture(scope="module")
def said():
    """What each integration says where none of the packages is there."""
    code = f"""
import importlib, sys
packages = {PACKAGES!r}
sys.modules.update(dict.fromkeys(packages.values()))
import gradrein
for name in packages:
    try:
        importlib.import_module("gradrein.integrations." + name)
    except gradrein.errors.MissingDependencyError as error:
        print(name, isinstance(error, ImportError), error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_extra_is_said_with_the_line_that_brings_it(name, said):
    assert said[name].startswith("True")
    assert f"pip install {PACKAGES[name].lower()}." in said[name]


def test_gradrein_brings_none_of_them():
    code = f"import gradrein, sys; print([m for m in {[*PACKAGES.values(), 'rich']!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
