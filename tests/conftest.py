import doctest

import pytest
import torch

from bridle import _kernels


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
