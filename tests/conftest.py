import doctest

import pytest
import torch

from bridle import _kernels
from bridle._torch import saved

# What tests need of torch that not every torch we support has.
FEATURES = {
    "DLPack exchange table": _kernels.cpu.exchange_table() is not None,
    "SavedTensor.data": saved.READS_HANDLES,
    "Tensor.grad_dtype": hasattr(torch.Tensor, "grad_dtype"),
}


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        if not FEATURES[mark.args[0]]:
            pytest.skip(f"torch {torch.__version__} has no {mark.args[0]}")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def without_kernels(monkeypatch):
    """As where no compiler was: torch operations only."""
    monkeypatch.setitem(_kernels.BACKENDS, "cpu", None)


@pytest.fixture
def as_on_a_device(monkeypatch, without_kernels):
    """Take the way an accelerator takes: no value of a tensor may be read."""
    monkeypatch.setattr("bridle._devices.readable_now", lambda grads: False)


doctest.ELLIPSIS_MARKER = "[...]"
