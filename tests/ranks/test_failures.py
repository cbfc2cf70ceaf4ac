"""One rank with a NaN, too many parameters for a message, a rank that is killed, late, or holds something else."""

import math

import failures
import pytest


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("mode", ["raise", "skip", "zero", "propagate"])
def test_all_ranks_decide_the_same_about_one_that_is_not_finite(ranks, mode, value):
    assert len(set(ranks.run(failures.nonfinite, mode, value))) == 1


def test_torchs_name_raises_on_all_ranks(ranks):
    ranks.run(failures.nonfinite_by_torchs_name, math.nan)
    ranks.run(failures.nonfinite_by_torchs_name, math.inf)


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_nan_in_another_stage(ranks, mode):
    ranks.run(failures.nan_in_another_stage, mode)


def test_all_ranks_hear_of_a_nan_in_one_small_mesh(four):
    for found, text in four.run(failures.nan_in_one_mesh):
        assert found == "NonFiniteGradientError"
        assert "p1 (1 value)" in text


def test_numbers_in_dtensors(two):
    two.run(failures.a_limit_in_parts)
    two.run(failures.a_norm_in_parts)


CASES = [failures.values, failures.extremes, failures.many]
CASES += [failures.plain_gradients_are_not_sent, failures.partial_of_a_nan]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_as_one_process(ranks, case):
    ranks.run(case)
