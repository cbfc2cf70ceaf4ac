import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    """Let no graph of one test be found by another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
