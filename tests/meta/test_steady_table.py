"""The numbers and tables of `benchmarks/steady.py`, on cases small enough to compute by hand."""

import importlib
import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FIXED = ["by_norm(0.1)", "by_norm(1)"]


@pytest.fixture(scope="module")
def table():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("steady_table")


def outcome(final, **more):
    """Return what `judge` would of one length."""
    return {"final": final, "best": final / 2, "settled": final / 4, "swing": 0.5, "swings": True, **more}


def made(way, seed, final, task="waves", which="third", **more):
    """Return a run; four times as long, its final loss is ten times as large."""
    return {
        "list": which,
        "task": task,
        "way": way,
        "seed": seed,
        "1x": outcome(final, **more),
        "4x": outcome(10 * final, **more),
    }


def two_seeds(**more):
    """Return runs of two seeds: the better threshold ends at 1 and 4, a geometric mean of 2."""
    finals = {
        "by_norm(0.1)": (2, 8),
        "by_norm(1)": (1, 4),
        "auto": (2, 2),
        "none": (8, 8),
        "advised": (2, 1),
        "lr/3": (4, 4),
    }
    found = [made(way, seed, f, **more) for way, both in finals.items() for seed, f in enumerate(both)]
    watched = [made("watched", seed, 8, findings=names, **more) for seed, names in enumerate((["oscillation"], []))]
    return found + watched


def test_summary(table):
    found = table.summary(two_seeds(), ["none", "auto", "tried"], FIXED)
    row = found["lists"]["third"]["1x"]["waves"]
    assert (row["best_fixed"], row["thresholds"], row["seeds"]) == ("by_norm(1)", 2, 2)
    assert row["final_of_best_fixed"] == pytest.approx(2)  # of 1 and 4
    assert (row["swing"], row["seen"], row["watched"]) == (2, 1, 2)  # one of two that swing has a finding
    none, auto, tried = (row["ways"][way] for way in ("none", "auto", "tried"))
    assert none["final"] == pytest.approx(4)  # 8 / 1 and 8 / 4
    assert none["worst"] == pytest.approx(8)
    assert auto["final"] == pytest.approx(1)  # 2 / 1 and 2 / 4
    assert auto["worst"] == pytest.approx(2)
    assert auto["best"] == pytest.approx(1)
    assert auto["final_over_lowest"] == pytest.approx(4)
    assert auto["swing"] == pytest.approx(0.5)
    # The lowest of what `--try` runs at 1x: `auto` or `advised` of seed 0 (2), `advised` of seed 1 (1).
    assert tried["final"] == pytest.approx(math.sqrt(2 / 1 * 1 / 4))
    assert found["lists"]["third"]["4x"]["waves"]["final_of_best_fixed"] == pytest.approx(20)
    assert found["lists"]["seen"] == {"1x": {}, "4x": {}}


def test_a_seed_without_all_thresholds_is_left_out(table):
    some = [run for run in two_seeds() if (run["way"], run["seed"]) != ("by_norm(0.1)", 1)]
    row = table.summary(some, ["none", "tried"], FIXED)["lists"]["third"]["1x"]["waves"]
    assert (row["seeds"], row["best_fixed"]) == (1, "by_norm(1)")
    assert row["ways"]["none"] | {"swing": 0} == pytest.approx(
        {"final": 8, "best": 8, "swing": 0, "final_over_lowest": 4, "seeds": 1, "worst": 8}
    )
    without = [run for run in two_seeds() if run["way"] not in FIXED]
    row = table.summary(without, ["none"], FIXED)["lists"]["third"]["1x"]["waves"]
    assert row == {"ways": {}, "swing": 2, "seen": 1, "watched": 2}


def test_healthy_runs(table):
    def healthy(task, seed, *findings):
        return made("watched", seed, 1, task, "healthy", findings=list(findings))

    runs = [healthy("overfits", 0, "overfitting"), healthy("calm", 0), healthy("calm", 1, "spikes", "dead")]
    found = table.summary(runs, [], FIXED)["healthy"]
    assert found["overfits"]["1x"] == {"runs": 1, "alarms": 0, "findings": []}  # what it really does
    assert found["calm"]["4x"] == {"runs": 2, "alarms": 1, "findings": ["dead", "spikes"]}
    text = table.tables(table.summary(runs, [], FIXED))
    assert (
        "| overfits | 0 of 1 | 0 of 1 |  |\n| calm | 1 of 2 | 1 of 2 | dead, spikes |\n| **all** | 1 of 3 | 1 of 3 |"
        in text
    )
    kept = table.keep(table.summary(runs[1:2], [], FIXED), table.summary(runs, [], FIXED))
    text = table.tables(kept)
    assert "| calm* | 1 of 2 | 1 of 2 | dead, spikes |" in text
    assert "they are of an earlier state" in text


def cells(text, start):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(start)]


def test_tables(table):
    other = [{**run, "task": "calm"} for run in two_seeds(swings=False)]
    text = table.tables(table.summary(two_seeds() + other, ["none", "auto"], FIXED))
    assert text.count("### ") == 2  # a list at two lengths
    assert "Of each task 2 seeds with 2 fixed thresholds" in text
    assert "Tasks that did not swing at either length: `calm`." in text
    assert cells(text, "| waves")[0] == ["waves", "2", "by_norm(1)", "2, 1, 2", "4.00, 4.00, 0.50", "1.00, 1.00, 0.50"]
    assert cells(text, "| calm")[0][3] == "0, 0, 2"
    assert cells(text, "| **mean of final, 1 that swing")[0][3:] == ["", "4.00", "1.00"]
    assert cells(text, "| **mean of final, all 2")[0][3:] == ["2, 1, 4", "4.00", "1.00"]
    assert cells(text, "| **worst single run, all 2")[0][4:] == ["8.00", "2.00"]
    assert cells(text, "| **final over lowest, worst run, all 2")[0][4:] == ["4.0", "4.0"]


def test_keep_takes_what_has_more_seeds(table):
    one = [run for run in two_seeds() if run["seed"] == 0]
    new, old = (table.summary(runs, ["none", "auto"], FIXED) for runs in (one, two_seeds()))
    row = table.keep(new, old)["lists"]["third"]["1x"]["waves"]
    assert (row["seeds"], row["watched"], row["earlier"]) == (2, 2, True)
    text = table.tables(new)
    assert cells(text, "| waves*")[0][:4] == ["waves*", "2", "by_norm(1)", "2, 1, 2*"]
    assert "Rows with * were not run again" in text
    new, old = (table.summary(runs, ["none", "auto"], FIXED) for runs in (two_seeds(), one))
    assert "earlier" not in table.keep(new, old)["lists"]["third"]["1x"]["waves"]
    assert "*:" not in table.tables(new).replace("**", "")


def test_judge(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    runs = importlib.import_module("steady_run")
    found = runs.judge([10, 1, 10, 1, 1, 1, 4])
    assert found == pytest.approx(
        {"final": 2, "best": 1, "settled": 1, "swing": 1 / 6 + math.log10(4) / 6, "swings": True}
    )
    assert not runs.judge([8, 7, 6, 5, 4, 3, 2, 1, 1])["swings"]
    assert runs.judge([8, 4, 2, 1, 1, 1.1, 2, 3, 3])["swings"]  # ends at more than twice its best
    assert not runs.judge([1, 2, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])["swings"]  # in the first quarter only
    assert runs.judge([1.0, 0.0, 0.0, 0.0])["swing"] == 0
    with pytest.raises(AssertionError, match="not negative"):
        runs.judge([1.0, -1.0, 1.0])
