"""A few of the random faults that `make fuzz-ranks` runs by the thousand."""

import pytest
import random_faults


@pytest.fixture(scope="module")
def fuzzer():
    made = random_faults.Fuzzer()
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(16))
def test_faults_that_ranks_survive(fuzzer, seed):
    _, wrong = fuzzer.try_one(seed)
    assert not wrong


@pytest.mark.parametrize("seed", [0, 1])
def test_faults_that_they_do_not(fuzzer, seed):
    fuzzer.close()
    _, wrong = fuzzer.try_one(seed, fatal=True)
    assert not wrong
