"""Random training runs: the same from the same number, the same at once as alone, and resumable; their calibration."""

import importlib
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

import gradrein
from gradrein.watch.analysis import calibrated

FOLDER = Path(__file__).parents[2] / "benchmarks" / "random_runs"
MODULES = ("ranges", "task", "together", "run", "judge", "calibrate", "looks", "printing")


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in MODULES}


def test_a_number_is_one_task_and_lists_share_none(parts):
    draw, numbers = parts["task"].draw, parts["ranges"].NUMBERS
    assert draw("build", 7) == draw("build", 7) != draw("build", 8)
    assert {which: len(each) for which, each in numbers.items()} == {
        "build": 800, "held": 300, "wide": 600, "unseen": 300, "last": 300,
    }  # fmt: skip
    assert len(set().union(*numbers.values())) == 2300


@pytest.mark.parametrize("of", ["models", "losses", "optimizers", "schedules", "activations"])
def test_the_last_tasks_are_of_other_kinds(parts, of):
    ranges = parts["ranges"]
    known = set().union(*(_values(getattr(ranges.RANGES[which], of)) for which in ranges.TO_BUILD_ON))
    assert len(_values(getattr(ranges.LAST, of)) - known) >= 3
    assert all(ranges.RANGES[which].prints[1] <= ranges.LAST.prints[0] for which in ranges.TO_BUILD_ON)


def _values(choices):
    """Return the choices, where they are by kind of data or output with these and each of theirs."""
    nested = isinstance(choices, dict) and all(isinstance(each, tuple) for each in choices.values())
    named = {name for each in choices.values() for name in each if isinstance(name, str)} if nested else set()
    return set(choices) | named


def small(parts, number, **changes):
    return {**parts["task"].draw("build", number), "steps": 40, "prints": 8, **changes}


@pytest.mark.parametrize(
    ("optimizer", "clip"), [("momentum", None), ("adamw", "auto"), ("rmsprop", 0.1), ("sgd", "auto")]
)
def test_at_once_is_as_alone(parts, optimizer, clip):
    """Rows of one matrix end where models with torch's optimizer and our clipping do."""
    task = small(parts, 50, optimizer=optimizer, lr=0.01, scale=1.0, outliers=0.0)
    way = parts["together"].Way(0, 0, clip, 0.5)
    found = parts["together"].train_together([task], [way, parts["together"].Way(0, 1)]).looks[-1][0].item()
    training = parts["task"].Training(task, 0, 0.5)
    if clip is not None:
        policy = clip if clip == "auto" else gradrein.by_norm(clip)
        gradrein.Clipper(training.optimizer, policy, nonfinite="skip")
    for _ in range(task["steps"]):
        training.step()
    assert found == pytest.approx(training.look(), rel=1e-3)


def test_a_record_is_what_a_monitor_writes(parts, tmp_path):
    task = small(parts, 50, lr=0.003, scale=1.0, outliers=0.0, print=0)
    traces = parts["together"].train_together([task], [parts["together"].Way(0, 0)], traced=True)
    parts["run"].write_record(task, parts["together"].Way(0, 0), traces, 0, tmp_path / "ours.jsonl")
    training = parts["task"].Training(task, 0)
    with gradrein.Monitor(training.model, training.optimizer, record=tmp_path / "theirs.jsonl"):
        for _ in range(task["steps"]):
            training.step()
    ours, theirs = gradrein.watch.read_run(tmp_path / "ours.jsonl"), gradrein.watch.read_run(tmp_path / "theirs.jsonl")
    assert ours.names == theirs.names
    for column in ("loss", "norm", "lr", "update"):
        assert getattr(ours, column) == pytest.approx(getattr(theirs, column), rel=1e-2, abs=1e-6), column
    assert ours.step_grad_cosine[1:] == pytest.approx(theirs.step_grad_cosine[1:], abs=0.02)


def test_what_is_done_is_not_done_again(parts, tmp_path):
    spec = importlib.util.spec_from_file_location("random_runs_main", FOLDER / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    done = [{"task": {"number": n}} for n in range(10)]
    (tmp_path / "build.jsonl").write_text("".join(json.dumps(line) + "\n" for line in done))
    main.run_all("build", tmp_path, 1, count=10)
    assert main.read("build", tmp_path) == done


END = "test loss, end over lowest"


def line(number, data, sign, base=1.0, best=1.0, optimizer="sgd"):
    """Return a task whose alternatives all end at `best`."""
    ways = dict.fromkeys(("clip 3", "clip 1", "clip 1/3", "clip 1/10", "lr 1/3", "lr 1/10", "lr 1/30"), best)
    ways |= {"clip 1, lr 1/3": best, "auto": best, "auto, lr 1/3": 1.1 * best}
    signs = {END: sign, "longest step, of the weights": 0.3}
    seeds = [{"seed": s, "base": base, "first": 2.0, "ways": ways, "signs": signs, "norm": 1.0} for s in (0, 1)]
    return {"task": {"number": number, "data": data, "optimizer": optimizer, "which": "build"}, "seeds": seeds}


def test_truth_is_what_would_have_helped_with_both_seeds(parts):
    truth = parts["judge"].truth
    assert [truth(line(0, "text", 0.0, best=b)) for b in (0.5, 0.8, 0.95)] == ["help", "between", "fine"]
    assert truth(line(0, "text", 0.0, base=None, best=0.5)) == "help"
    split = line(0, "text", 0.0, best=0.5)
    split["seeds"][1] = line(0, "text", 0.0)["seeds"][1]
    assert truth(split) == "between"


def calibrated_on(parts, best=0.4, optimizer="sgd"):
    kinds = ("text", "images", "classes")
    fine = [line(i, kinds[i % 3], 0.02 * (i % 7), optimizer=optimizer) for i in range(60)]
    needy = [line(60 + i, kinds[i % 3], 0.8 + 0.1 * (i % 5), best=best, optimizer=optimizer) for i in range(30)]
    other = "adam" if optimizer == "sgd" else "sgd"
    lines = [*fine, *needy, *(line(90 + i, kind, 0.0, optimizer=other) for i, kind in enumerate(kinds))]
    return lines, *parts["calibrate"].fit_all(lines)


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "plain"), ("rmsprop", "adaptive")])
def test_calibration_tells_signs_from_noise_and_is_reproducible(parts, optimizer, kind):
    calibrate, (lines, rules, limit) = parts["calibrate"], calibrated_on(parts, optimizer=optimizer)
    assert set(rules[f"{kind}, test loss"]["weights"]) == {END}  # the other says nothing
    heard = [calibrate.score(one, seed, rules, limit) > 0 for one in lines[60:90] for seed in one["seeds"]]
    assert all(heard)
    leaves = calibrate.advice(lines, rules, limit)
    text = calibrate.constants(len(lines), rules, limit, leaves)
    assert text == calibrate.constants(len(lines), rules, limit, calibrate.advice(lines, rules, limit))
    constants = json.loads(text)
    assert set(constants["weights"]) == set(constants["starts"]) == set(calibrate.RULES)
    _, changes = constants["advice"][kind][0]
    assert changes[0] == ["clip 3", 60, 60, 0, 60]  # the first of those that end alike
    assert len(changes) == calibrate.CHANGES


def test_where_no_change_is_safe_it_is_advised_to_measure(parts):
    lines, rules, limit = calibrated_on(parts)
    for i, one in enumerate(lines[60:90]):
        for seed in one["seeds"]:
            seed["ways"] = dict.fromkeys(seed["ways"], 3.0) | {("clip 3", "clip 1", "lr 1/3")[i % 3]: 0.4}
    _, changes = parts["calibrate"].advice(lines, rules, limit)["plain"][0]
    assert changes[0] == ("try", 60, 60, 0, 60)
    assert {way for way, *_ in changes[1:4]} == {"clip 3", "clip 1", "lr 1/3"}
    assert changes[1][1:] == (20, 60, 40, 60)


def test_constants_are_those_of_the_results(parts):
    calibrate, results = parts["calibrate"], json.loads((FOLDER.parent / "results" / "random-runs.json").read_text())
    lines = [line for which in parts["ranges"].TO_BUILD_ON for line in results[which]]
    assert len(lines) == calibrated.TASKS
    rules, limit = calibrate.fit_all(lines)
    assert pytest.approx(limit, rel=0.01) == calibrated.LIMIT
    for name, one in rules.items():
        assert calibrated.WEIGHTS[name] == pytest.approx(one["weights"], rel=0.01)
        assert calibrated.STARTS[name] == pytest.approx(one["start"], rel=0.01)
    assert json.loads(json.dumps(calibrate.advice(lines, rules, limit))) == calibrated.ADVICE


def test_intervals_are_wilsons(parts):
    low, high = parts["judge"].interval(9, 10)
    assert (round(low, 2), round(high, 2)) == (0.6, 0.98)
    assert all(math.isfinite(v) for v in parts["judge"].interval(0, 0))


def test_random_numbers_of_one_run_do_not_reach_another(parts):
    task = small(parts, 50)
    first = parts["task"].Training(task, 0)
    torch.rand(10)
    second = parts["task"].Training(task, 0)
    assert first.step() == second.step()
