"""Numbers that stand for parameters and states, the same in every process."""

import subprocess
import sys

import pytest
import torch

from gradrein.distributed import fingerprint, parameters_fingerprint, state_fingerprint

PROGRAM = """
import torch
from gradrein.distributed import parameters_fingerprint, state_fingerprint
ps = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
print(parameters_fingerprint(["a", "b"], ps, [None, torch.ones(4)]), state_fingerprint({"x": torch.ones(3), "n": 2}))
"""


def test_the_same_in_every_process():
    found = [subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True).stdout for _ in range(2)]
    assert found[0] == found[1] != ""


def number(names=None, shapes=((2, 3), (4,)), dtype=torch.float32, missing=()):
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    grads = [None if i in missing else torch.zeros_like(p) for i, p in enumerate(parameters)]
    return parameters_fingerprint(names, parameters, grads)


@pytest.mark.parametrize(
    "other", [{"names": ["a", "b"]}, {"shapes": ((4,), (2, 3))}, {"dtype": torch.float64}, {"missing": (1,)}], ids=str
)
def test_every_difference_counts(other):
    assert number() == number() != number(**other)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool]
)
def test_states_are_compared_by_bits_in_their_order(dtype):
    values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    assert state_fingerprint(values) == state_fingerprint(values.repeat(2)[5:])
    assert state_fingerprint(values) != state_fingerprint(values.flip(0).roll(1))


def test_states_are_compared_in_float32():
    state = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    near = {"x": state["x"] * (1 + 1e-15)}
    assert state_fingerprint(state) == state_fingerprint(near) != state_fingerprint({"x": state["x"] * 2})
    assert fingerprint("a") != fingerprint("b")
