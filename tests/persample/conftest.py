import pytest
import torch


@pytest.fixture(autouse=True)
def in_float64():
    """Compare in float64, with the same numbers every time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
