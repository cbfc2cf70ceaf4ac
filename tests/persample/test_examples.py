"""The examples run, and end in what they promise."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["dp_sgd", "outliers", "noise_scale", "noisy_labels"])
def test_example(name, capsys):
    torch.set_default_dtype(torch.float32)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out
