"""The numbers and tables of `benchmarks/steady.py`, on cases small enough to compute by hand."""

import importlib
import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def steady():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("steady")


def made(steady, task="waves", swings=True):
    """Return runs of two seeds: the best threshold ends at 1 and 4, a geometric mean of 2; ten times that at 4x."""
    finals = {**dict.fromkeys(steady.FIXED, (2, 8)), "by_norm(1)": (1, 4), "auto": (2, 2), "none": (8, 8)}

    def judged(final):
        return {"final": final, "best": final / 2, "swing": 0.5, "swings": swings}

    return [
        {"task": task, "way": way, "seed": seed, "1x": judged(final), "4x": judged(10 * final)}
        for way, both in finals.items()
        for seed, final in enumerate(both)
    ]


def test_each_way_is_beside_the_best_threshold_of_its_seed(steady):
    found = steady.summary(made(steady))
    row = found["1x"]["waves"]
    assert (row["best_fixed"], row["seeds"], row["swings"]) == ("by_norm(1)", 2, True)
    assert row["final_of_best_fixed"] == pytest.approx(2)
    assert row["ways"]["none"]["final"] == pytest.approx(4)  # 8 / 1 and 8 / 4
    assert row["ways"]["auto"]["final"] == pytest.approx(1)  # 2 / 1 and 2 / 4
    assert found["4x"]["waves"]["final_of_best_fixed"] == pytest.approx(20)


def test_a_seed_without_all_thresholds_is_left_out(steady):
    some = [one for one in made(steady) if (one["way"], one["seed"]) != ("by_norm(0.1)", 1)]
    row = steady.summary(some)["1x"]["waves"]
    assert (row["seeds"], row["ways"]["none"]["final"]) == (1, pytest.approx(8))


def test_means_are_over_tasks_that_swing(steady):
    calm = [{**one, "1x": {**one["1x"], "final": 1.0}} for one in made(steady, "calm", swings=False)]
    text = steady.tables(steady.summary(made(steady) + calm))
    assert "| waves | 2 | by_norm(1) | 4.00, 4.00, 0.50 | 1.00, 1.00, 0.50 |" in text
    assert "| calm (does not swing) |" in text
    assert "mean, worst** | | | 4.00, 4 | 1.00, 1 | - |" in text


def test_judge(steady):
    found = steady.judge([10, 1, 10, 1, 1, 1, 4])
    assert found == pytest.approx({"final": 2, "best": 1, "swing": 1 / 6 + math.log10(4) / 6, "swings": True})
    assert not steady.judge([8, 7, 6, 5, 4, 3, 2, 1, 1])["swings"]
    assert steady.judge([8, 4, 2, 1, 1, 1.1, 2, 3, 3])["swings"]  # ends at more than twice its best
    assert not steady.judge([1, 2, 1, 2, *[1] * 12])["swings"]  # in the first quarter only
    assert steady.judge([1.0, 0.0, 0.0, 0.0])["swing"] == 0
    with pytest.raises(AssertionError, match="not negative"):
        steady.judge([1.0, -1.0, 1.0])
