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


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_extra_is_said_with_the_line_that_brings_it(name):
    code = f"""
import sys
sys.modules[{PACKAGES[name]!r}] = None
import bridle
try:
    import bridle.integrations.{name}
except bridle.errors.MissingDependencyError as error:
    print(isinstance(error, ImportError), error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith("True")
    assert f"pip install 'bridle[{name}]'" in done.stdout


def test_bridle_brings_none_of_them():
    code = f"import bridle, sys; print([m for m in {[*PACKAGES.values(), 'rich']!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
