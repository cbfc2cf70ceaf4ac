"""For tests on the simulated device, in a process of their own: `pytest -p plugin`, with this folder on the path."""

import pytest
import simulated
import torch

import gradrein.persample.gate.unsupported

if simulated.KIND == "sim":  # its device guard is a Python function, which the search for hooks takes for a hook
    gradrein.persample.gate.unsupported.hooks_registered = lambda: 0


@pytest.fixture
def device():
    return simulated.DEVICE


@pytest.fixture
def counted():
    """Count launches and host reads: `with counted() as counts`."""
    return simulated.counted


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def no_host_reads():
    """Fail where the host waits for the device: `with no_host_reads()`."""
    return simulated.no_host_reads


@pytest.fixture(params=["plain", "flash", "efficient", "cudnn"] if simulated.KIND == "cuda" else ["plain"])
def attention(request):
    """Let torch choose one kernel of attention after the other."""
    if simulated.KIND == "cuda":
        simulated.hooks.choose_attention(["plain", "flash", "efficient", "cudnn"].index(request.param))
    yield request.param
    if simulated.KIND == "cuda":
        simulated.hooks.choose_attention(0)


def host(value):
    """Return what a test looks at on the host: tensors, and containers of them."""
    return torch.utils._pytree.tree_map(
        lambda v: simulated.on_host(v.detach()).clone() if isinstance(v, torch.Tensor) else v, value
    )


def compare(here, there, **tolerance):
    if isinstance(here, str) or isinstance(there, str):
        assert there == here
    else:
        torch.testing.assert_close(there, here, **tolerance)


def on_both(function):
    """Return what a function gives where tensors are made on the host and on the device, from the same random numbers.

    Errors of gradrein are outcomes too: the name of the class. Their texts name ops, which differ by device.
    """
    from gradrein.errors import GradreinError

    outcomes = []
    for where in (torch.device("cpu"), simulated.DEVICE):
        torch.manual_seed(0)
        try:
            with where:
                outcomes.append(host(function()))
        except GradreinError as error:
            outcomes.append(type(error).__name__)
    return outcomes


def assert_same(function, **tolerance):
    """Compare what a function gives on the host and on the device: numbers, or the kind of refusal."""
    here, there = on_both(function)
    compare(here, there, **tolerance)
