import dataclasses
import json
import math
import re

import pytest

from gradrein.watch.analysis.actions import action_for
from gradrein.watch.analysis.advice import leaf_of
from gradrein.watch.analysis.divergence import divergence
from gradrein.watch.report.report import report_on
from gradrein.watch.run.run import NonfiniteStep

from .runs import healthy
from .test_findings import N, decayed, heavy_tailed, overfits, swinging, two_kinds, with_test


def test_a_healthy_run_is_left_alone():
    report = report_on(healthy(n=800, loss=[*healthy().loss, *[0.3] * 400]))
    assert (report.advice.threshold, report.advice.policy, report.advice.actions) == (None, None, [])
    assert "No findings. Of random runs like this, few would have ended better" in " ".join(str(report).split())
    assert "no change advised" in report.details()
    assert report_on(healthy(n=0)).advice.quantiles == {}


@pytest.mark.parametrize("make", [healthy, lambda: with_test([5 * 0.8**i for i in range(20)])])
def test_a_run_that_still_falls_is_told_to_go_on(make):
    report = report_on(make())
    assert report.findings == []
    assert re.search("begins at .* and ends at .*, still falling", report.verdict.what)
    assert report.advice.because.startswith("The loss still falls at the end: train longer, or raise the learning rate")


@pytest.mark.parametrize(
    "values",
    [
        [5.0, 4, 3, 2, 1, 0.5, 0.25, 0.12],  # too few to know the noise
        [*(5 * 0.8**i for i in range(12)), *[0.4] * 8],  # level at the end
        [3.0, 1] * 8 + [3.0, 0.9, 0.8, 0.7],  # noise as large as the fall
        [2.0, 0.1, *(2 * 0.9**i for i in range(14))],  # far above its lowest
        [1.0 - 0.1 * i for i in range(20)],  # below zero: no ratio
    ],
)
def test_a_loss_that_does_not_fall_to_its_end_is_not_said_to(values):
    assert "still fall" not in str(report_on(with_test(values)))


@pytest.mark.parametrize("make", [swinging, heavy_tailed, two_kinds, overfits])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_what_helped_most_comes_first_with_how_often(make, optimizer):
    run = dataclasses.replace(make(), optimizer=optimizer)
    report = report_on(run)
    _, changes = leaf_of(run, lost=False)
    way, helped, needed, harmed, spoken = changes[0]
    first = report.advice.actions[0]
    assert ("--clip auto" in first.try_with) == way.startswith("auto")
    assert ("--lr-scale" in first.try_with) == ("lr" in way)
    assert (first.try_with == "--try") == (way == "try")
    said = f"Helped in {helped / needed:.0%} of {needed} random runs like this, harmed {harmed} of {spoken}."
    assert first.why == said
    assert said in report.verdict.do
    assert "`gradrein watch --try` measures them" in report.advice.because
    assert len(report.advice.actions) == len(changes)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_which_random_runs_are_meant_is_said(optimizer):
    run = dataclasses.replace(swinging(), optimizer=optimizer)
    like, _ = leaf_of(run, lost=False)
    assert like.startswith("an optimizer like Adam" if optimizer == "Adam" else "SGD")
    assert like in report_on(run).advice.because


@pytest.mark.parametrize(
    ("way", "do", "options"),
    [
        ("auto", "clip gradients with `auto`", "--clip auto"),
        ("lr 1/10", "lower the learning rate to 0.01", "--lr-scale 0.1"),
        ("auto, lr 1/3", "clip gradients with `auto` and lower the learning rate to 0.033", "--clip auto --lr-scale 0.33"),
        ("clip 1/10", "clip gradients at a norm of 0.05", "--clip 0.05"),
        ("clip 1, lr 1/3", "clip gradients at a norm of 0.5 and lower the learning rate to 0.033",
         "--clip 0.5 --lr-scale 0.33"),
    ],
)  # fmt: skip
def test_a_way_is_a_change_in_words_in_options_and_in_lines(way, do, options):
    run = with_sites(healthy(norm=[0.5] * N))
    action = action_for(run, way, "because")
    assert (action.do, action.try_with) == (do, options)
    assert any("lr=0.0" in line for line in action.lines) == ("lr" in way)
    assert any("gradrein.Clipper(opt, " in line for line in action.lines) == ("auto" in way or "clip" in way)


def test_of_several_optimizers_all_become_slower():
    """Slower alone, one would lose its balance with the others."""
    action = action_for(dataclasses.replace(healthy(), n_optimizers=2), "lr 1/10", "")
    assert (action.do, action.lines) == ("divide every learning rate by 10", [])


@pytest.mark.parametrize("max_norm", [math.nan, 1e-9])
def test_what_clips_already_is_not_advised_again(max_norm):
    """Neither `auto` under a limit that adapts, nor a threshold above the one that does not hold it."""
    run = healthy(clip=[0.1] * N, max_norm=[max_norm] * N)
    adapts = math.isnan(max_norm)
    assert action_for(run, "clip 1", "") is None
    assert (action_for(run, "auto", "") is None) == adapts
    assert action_for(run, "auto, lr 1/3", "").try_with == (
        "--lr-scale 0.33" if adapts else "--clip auto --lr-scale 0.33"
    )


@pytest.mark.parametrize("make", [swinging, heavy_tailed])
@pytest.mark.parametrize("how", ["is clipped", "has another learning rate"])
def test_a_run_that_follows_the_advice_is_left_alone(make, how):
    """As the same curve is where nothing was changed: few runs that follow advice become better by more."""
    run = make()
    assert report_on(run).findings
    if how == "is clipped":
        run.clip[:] = [min(1.0, 0.3 / n) for n in run.norm]
    else:
        run.notes.append({"note": "lr-scale", "factor": 0.1, "after": 0})
    report = report_on(run)
    assert report.findings == []
    assert f"This run {how} already. Of random runs that were changed like this, few would" in report.advice.because
    assert "`gradrein report BEFORE run.jsonl`" in report.advice.because


def test_weight_decay_is_named_where_a_clipped_run_untrains():
    report = report_on(decayed())
    assert "from 0.01 to 0.001" in report.findings[1].advice
    assert "from 0.01 to 0.001" in report.verdict.do


def test_steps_that_were_not_finite_do_not_count():
    run = heavy_tailed()
    run.norm[7] = math.inf
    run.norm[8] = math.nan
    assert "nan" not in action_for(run, "clip 1", "").try_with


def test_json_is_json_even_with_numbers_that_are_not():
    run = heavy_tailed()
    run.lr[:] = [math.nan] * len(run.lr)
    found = report_on(run).to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["findings"][0]["name"] == "unsettled"
    assert again["advice"]["policy"] in ("auto", None)


def with_sites(run, library=None):
    place = {"file": "/home/me/train.py", **({"library": library} if library else {})}
    run.notes.append({"site": "backward", "line": 41, "text": "loss.backward()", **place})
    run.notes.append(
        {"site": "step", "opt": 0, "line": 44, "text": "opt.step()", "names": {"optimizer": "opt"}, **place}
    )
    return run


def test_a_divergence_does_not_move_the_threshold():
    run = healthy(norm=[0.5] * N)
    run.norm[300:] = run.loss[300:] = [10.0**t for t in range(100)]
    assert action_for(run, "clip 1", "").try_with == "--clip 0.5"


def test_the_report_says_first_what_happened_why_and_what_to_do():
    report = report_on(two_kinds())
    for text in (str(report), report.details()):
        first = " ".join(text.split())
        assert "The val loss goes up and down (4 rises, up to 2.1-fold) and ends at 0.6" in first
        assert "batches have far larger gradients than those around them" in first
        assert f"What to do: {report.advice.actions[0].do}" in first


def curve(*values):
    return [{"note": "val", "loss": v, "after": 10 * i} for i, v in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((2.34, 2.32, 2.33, 2.31, 2.32), "The val loss begins at 2.34 and ends at 2.32."),
        ((1.0, 0.6, 0.5, 0.4, 0.5), "The val loss begins at 1 and ends at 0.5, 1.2 times its lowest of step 30."),
        ((-1.0, -1.0, -1.0, -1.0, -1.0), "The val loss begins at -1 and ends at -1."),
    ],
)
def test_a_calm_loss_is_told_as_it_is(values, said):
    run = healthy(clip=[1.0] * N)  # by a limit that adapts and has nothing to do
    run.notes.extend(curve(*values))
    assert report_on(run).verdict.what == said


def diverging(healthy_steps, n, **columns):
    """A run of `n` steps whose loss and norms grow tenfold in each step after the healthy ones."""
    growth = [10.0 ** max(0, i - healthy_steps + 1) for i in range(n)]
    return healthy(n, loss=[11 * g for g in growth], norm=[8 * g for g in growth], **columns)


@pytest.mark.parametrize("n", [12, 31, 45])
def test_without_a_healthy_part_there_is_no_threshold(n):
    report = report_on(diverging(3, n))
    assert [f.name for f in report.findings][:1] == ["diverged"]
    assert report.advice.threshold is None
    assert "clip gradients with `auto` and lower the learning rate to 0.01." in report.verdict.do


def test_a_short_healthy_part_gives_the_threshold():
    assert action_for(diverging(12, 45), "clip 1/3", "").try_with == "--clip 2.7"


@pytest.mark.parametrize("n", [3, 6, 7, 8, 31])
def test_a_divergence_is_found_whatever_the_length(n):
    losses = [2.0 * 1e4**i for i in range(n)]
    assert "diverged" in [f.name for f in report_on(healthy(n, loss=losses)).findings]
    unknown = [math.nan] * n
    norms = report_on(healthy(n, loss=unknown, norm=losses))
    assert "the gradient norm diverges" in norms.details()
    assert "too short" not in str(norms)


@pytest.mark.parametrize(
    "losses",
    [
        [1e-9 * 2**i for i in range(25)],  # from next to nothing
        [2.0, 1e9, 1.5, 1.4, 1.3, 1.2, 1.1],  # one bad batch, and back
        [-3.0 - i for i in range(30)],
        [0.0] * 30,
        [1e7 / 3**i for i in range(30)],
        [2.0],
        [],
    ],
)
def test_what_does_not_end_far_above_does_not_diverge(losses):
    assert divergence(healthy(len(losses), loss=losses)) is None


def breaking(opt, step, n=60, end=math.nan):
    """A run that is not finite from a step on, of one of two optimizers."""
    run = healthy(n)
    run.loss[step:] = run.norm[step:] = run.peak[step:] = [end] * (n - step)
    run.nonfinite.extend(NonfiniteStep(i, {"blocks.0.weight": 1}, end) for i in range(step, n))
    return dataclasses.replace(run, opt=opt, n_optimizers=2)


@pytest.mark.parametrize(
    ("runs", "first"),
    [
        ((breaking(0, 8), breaking(1, 7)), 1),
        ((breaking(0, 7), breaking(1, 8)), 0),
        ((breaking(0, 8), breaking(1, 8)), 0),  # it steps first
        ((breaking(0, 41, 300), breaking(1, 7)), 1),  # five steps for each of the other
        ((breaking(0, 39, 300), breaking(1, 8)), 0),
        ((breaking(0, 40), dataclasses.replace(diverging(3, 60), opt=1, n_optimizers=2)), 1),
    ],
)
def test_the_optimizer_that_broke_first_is_blamed(runs, first):
    report = report_on(*runs)
    label = f"optimizer {first} (SGD)"
    assert report.findings[0].optimizer == label
    assert report.advice.optimizer == label
    assert f"O{label[1:]}: the training " in str(report)


def test_a_step_that_a_scaler_left_out_is_not_where_a_run_broke():
    early = breaking(0, 59)
    early.nonfinite[:] = [NonfiniteStep(0, {"blocks.0.weight": 1}, math.inf)]
    assert report_on(early, breaking(1, 30)).advice.optimizer == "optimizer 1 (SGD)"


@pytest.mark.parametrize(("end", "word"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_a_run_that_ends_without_a_number_says_so(end, word, tmp_path):
    report = report_on(breaking(0, 40, end=end))
    assert f" -> {word}" in str(report)
    report.write_page(tmp_path / "page.html")
    assert word in (tmp_path / "page.html").read_text()


def test_a_loss_that_was_not_recorded_at_the_end_is_not_nan():
    run = healthy()
    run.loss[-1] = math.nan
    assert f" -> {run.loss[-2]:.4g}" in str(report_on(run))
