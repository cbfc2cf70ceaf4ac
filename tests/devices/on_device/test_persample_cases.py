"""Awkward models: the same per-sample gradients on the device as on the CPU."""

import pytest
from persample_answers import answers, simulated
from plugin import assert_same
from tests.persample.cases import CASES

pytestmark = [pytest.mark.usefixtures("in_float64"), pytest.mark.filterwarnings("ignore:Using padding=.same.")]


@pytest.mark.parametrize("name", simulated(CASES))
def test_case(name):
    def run():
        model, losses = CASES[name]()
        return [answers(model, losses()) for _ in range(2)]  # the second time owners are known

    assert_same(run)
