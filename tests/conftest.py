import doctest
import gc
import os
import sys

# Some virtual machines advertise AMX and do not let it run: torch's products in bfloat16 then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from features import FEATURES
from gradrein import _kernels


def pytest_collection_finish():
    """Take what was imported out of the collector's sight: tests that collect, or look at live objects, are many."""
    gc.collect()
    gc.freeze()
    do_without_stacks()


def do_without_stacks():
    """Keep torch from writing down the whole stack at each seed and each op of its database: a third of our time."""
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name)
        if not device.is_available():  # the seed would wait, with a stack, for a device that does not come
            device.manual_seed_all = lambda seed: None
    for name in ("common_utils", "opinfo.core"):
        database = sys.modules.get(f"torch.testing._internal.{name}")
        if database is not None:  # looks for a test of torch's among our frames
            database.extract_test_fn = lambda: None


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        for feature in mark.args:
            if not FEATURES[feature]():
                pytest.skip(f"torch {torch.__version__} has no {feature}")


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
    monkeypatch.setattr("gradrein._devices.readable_now", lambda grads: False)


doctest.ELLIPSIS_MARKER = "[...]"
