import pytest
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique")


class NoReads(TorchDispatchMode):
    """Fail where a value of a tensor is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS:
            raise AssertionError(f"a value was read from a tensor by {name}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_reads(as_on_a_device):
    """Whatever is done under it may not read a value of a tensor."""
    return NoReads
