import doctest
import gc
import sys

import pytest
import torch

from bridle import _kernels
from bridle._kernels.cpu import exchange_table
from bridle._torch import saved
from bridle._torch.amp import takes_grad_scale
from bridle._torch.fx import RECORDS_WHAT_RUNS

# What tests need of torch that not every torch we support has.
FEATURES = {
    "DLPack exchange table": lambda: exchange_table() is not None,
    "GraphExecGroup": lambda: hasattr(torch.utils.checkpoint, "GraphExecGroup"),
    "SavedTensor.data": lambda: saved.READS_HANDLES,
    "Tensor.grad_dtype": lambda: hasattr(torch.Tensor, "grad_dtype"),
    "autograd_would_have_decomposed": lambda: RECORDS_WHAT_RUNS,
    "compiler that traces context managers": lambda: hasattr(torch._dynamo.config, "enable_trace_contextlib"),
    "dicts for torch.autograd.grad": lambda: "dict[" in str(torch.autograd.grad.__annotations__["inputs"]),
    "fully_shard on the CPU": lambda: hasattr(torch.cpu.Stream, "record_event"),
    "fused Adagrad on the CPU": lambda: takes_grad_scale(torch.optim.Adagrad([torch.zeros(1)], fused=True)),
    "trace_autograd_ops": lambda: hasattr(torch._dynamo.config, "trace_autograd_ops"),
}


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
    monkeypatch.setattr("bridle._devices.readable_now", lambda grads: False)


doctest.ELLIPSIS_MARKER = "[...]"
