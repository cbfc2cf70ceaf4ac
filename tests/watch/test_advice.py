import dataclasses
import json
import math

import pytest

from gradrein.watch.analysis.divergence import divergence
from gradrein.watch.analysis.statistics import quantile
from gradrein.watch.analysis.verdict import verdict_on
from gradrein.watch.report.report import report_on
from gradrein.watch.run.run import NonfiniteStep

from .runs import healthy
from .test_findings import (
    clipped_too_tightly,
    decayed,
    heavy_tailed,
    only_the_test_loss_swings,
    rises_for_good,
    spiking,
    swinging,
    two_kinds,
    vanishing,
    with_test,
)


def test_a_healthy_run_needs_no_clipping():
    advice = report_on(healthy()).advice
    assert advice.threshold is None
    assert advice.policy is None
    text = str(report_on(healthy()))
    assert "No findings: none of the 20 checks fired." in text
    assert "Nothing in this run calls for clipping" in text
    assert "no change advised" in report_on(healthy()).details()


def test_a_heavy_tail_gets_auto_and_a_threshold():
    advice = report_on(heavy_tailed()).advice
    assert advice.policy == "auto"
    assert advice.quantiles["10%"] / 3 < advice.threshold < advice.quantiles["50%"]
    assert advice.quantiles["50%"] < advice.quantiles["99%"] <= advice.quantiles["largest"]


def test_what_clipping_cannot_mend_is_no_reason_to_clip():
    assert report_on(vanishing()).advice.threshold is None


def test_few_steps_are_not_judged():
    assert "too few" in report_on(healthy(n=10)).advice.because
    assert report_on(healthy(n=0)).advice.quantiles == {}


def test_steps_that_were_not_finite_do_not_count():
    run = spiking()
    run.norm[7] = math.inf
    run.norm[8] = math.nan
    assert math.isfinite(report_on(run).advice.threshold)


def test_json_is_json_even_with_numbers_that_are_not():
    run = spiking()
    run.lr[:] = [math.nan] * len(run.lr)
    found = report_on(run).to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["findings"][0]["name"] == "spikes"
    assert again["advice"]["policy"] == "auto"


def with_sites(run, library=None):
    place = {"file": "/home/me/train.py", **({"library": library} if library else {})}
    run.notes.append({"site": "backward", "line": 41, "text": "loss.backward()", **place})
    run.notes.append(
        {"site": "step", "opt": 0, "line": 44, "text": "opt.step()", "names": {"optimizer": "opt"}, **place}
    )
    return run


@pytest.mark.parametrize("make", [swinging, heavy_tailed, spiking, two_kinds])
def test_the_threshold_is_not_above_what_healthy_steps_need(make):
    run = make()
    assert report_on(run).advice.threshold <= quantile(run.norm, 0.5)


def test_a_divergence_does_not_move_the_threshold():
    calm = report_on(swinging()).advice.threshold
    run = swinging()
    run.norm[300:] = [10.0**t for t in range(100)]
    run.loss[300:] = [10.0**t for t in range(100)]
    assert report_on(run).advice.threshold == pytest.approx(calm, rel=0.5)


def test_for_adam_a_lower_learning_rate_comes_with_auto():
    run = with_sites(dataclasses.replace(swinging(), optimizer="Adam"))
    advice = report_on(run).advice
    assert advice.threshold is None  # nothing stands out, and the scale divides out
    assert advice.actions[0].do == "lower the learning rate to 0.05 and clip gradients with `auto`"
    assert advice.actions[0].try_with == "--clip auto --lr-scale 0.5"
    assert advice.actions[0].lines == [
        "Adam(..., lr=0.05)",
        "import gradrein",
        'clipper = gradrein.Clipper(opt, "auto", nonfinite="skip")',
    ]
    assert advice.actions[1].do == "lower the learning rate to 0.05"
    assert (advice.policy, advice.learning_rate) == ("auto", 0.05)
    spiky = dataclasses.replace(spiking(), optimizer="AdamW")
    advice = report_on(spiky).advice
    assert advice.actions[0].try_with == "--clip auto --lr-scale 0.5"
    assert advice.actions[-1].do.startswith("clip gradients at")


def test_of_several_optimizers_none_is_made_slower_first():
    """Slower alone, it would lose its balance with the others."""
    advice = report_on(dataclasses.replace(swinging(), optimizer="Adam", n_optimizers=2)).advice
    assert advice.actions[0].try_with == "--clip auto"
    assert "balance with the other optimizers" in advice.because


def test_for_adam_under_auto_the_learning_rate_is_left():
    run = dataclasses.replace(swinging(), optimizer="Adam")
    run.clip[:] = [0.5 if i % 2 else 1.0 for i in range(len(run.clip))]
    run.max_norm[:] = [math.nan] * len(run.clip)
    advice = report_on(run).advice
    assert [action.try_with for action in advice.actions] == ["--lr-scale 0.5"]
    assert advice.policy is None


@pytest.mark.parametrize("make", [swinging, heavy_tailed, spiking, two_kinds, rises_for_good])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_auto_leads_wherever_clipping_helps(make, optimizer):
    advice = report_on(dataclasses.replace(make(), optimizer=optimizer)).advice
    assert advice.actions[0].try_with.startswith("--clip auto")
    assert advice.policy == "auto"


def test_a_loss_that_rises_under_clipping_is_not_left_alone():
    run = rises_for_good()
    run.clip[:] = [0.5] * len(run.clip)
    report = report_on(run)
    assert "Keep it as it is" not in str(report)
    assert report.advice.actions


def test_a_steady_rise_under_clipping_is_not_told_to_clip():
    """It is no single step; weight decay, which is not clipped, may be what un-trains it."""
    run = rises_for_good()
    run.clip[:] = [0.5] * len(run.clip)
    run.settings["weight_decay"] = 0.3
    advice = report_on(run).advice
    assert advice.threshold is None
    assert [action.do.split(" to ")[0] for action in advice.actions] == [
        "lower the learning rate",
        "lower weight_decay from 0.3, or set it",
    ]
    assert "a tighter limit will not stop it" in advice.because


@pytest.mark.parametrize(("max_norm", "left"), [(math.nan, "clip gradients at"), (1e-9, "clip gradients with")])
def test_what_clips_already_is_not_advised_again(max_norm, left):
    """Neither `auto` under a limit that adapts, nor a threshold above the one that does not hold it."""
    run = swinging()
    run.clip[:] = [0.5 if i % 2 else 1.0 for i in range(len(run.clip))]
    run.max_norm[:] = [max_norm] * len(run.clip)
    advice = report_on(run).advice
    assert [a.do for a in advice.actions if "clip" in a.do and not a.do.startswith(left)] == []
    assert [a.do for a in advice.actions if a.do.startswith(left)]
    assert "already clipped, and that does not stabilise it" in advice.because
    assert (advice.threshold is None) == (left == "clip gradients with")


def test_a_higher_threshold_goes_where_the_script_clips():
    """A second limit beside a lower one would change nothing."""
    run = clipped_too_tightly()
    raised = report_on(run).advice.actions[0]
    assert f"from {run.threshold:g} to" in raised.do
    assert (raised.lines, raised.try_with) == ([], "")
    run.header["clip"] = run.threshold
    assert report_on(run).advice.actions[0].try_with.startswith("--clip ")


def test_what_came_before_a_break_down_is_said():
    run = diverging(3, 45)
    run.nonfinite.append(NonfiniteStep(44, {run.names[0]: 1}, math.nan))
    assert report_on(run).verdict.why.startswith("Before that: the training diverges: the training loss grows from")
    findings = [dataclasses.replace(f, optimizer="opt (SGD)") for f in report_on(run).findings]
    verdict = verdict_on(run, findings, report_on(run).advice)
    assert verdict.what.startswith("opt (SGD): the training broke down")
    assert verdict.why.startswith("Before that: the training diverges")  # its name has been said


@pytest.mark.parametrize(("weight", "called"), [(0.55, "A possible cause: "), (0.6, "The likely cause: ")])
def test_a_weak_cause_is_called_possible(weight, called):
    run = swinging()
    (swing,) = (f for f in report_on(run).findings if f.name == "oscillation")
    cause = dataclasses.replace(swing, name="spikes", weight=weight)
    assert verdict_on(run, [swing, cause], report_on(run).advice).why.startswith(called)


def test_two_optimizers_may_work_against_each_other():
    run = dataclasses.replace(swinging(), n_optimizers=2)
    (finding,) = (f for f in report_on(run).findings if f.name == "oscillation")
    assert "as in a GAN, their losses need not settle" in finding.advice


def test_tight_clipping_is_raised_and_never_lowered_as_well():
    report = report_on(clipped_too_tightly())
    assert report.advice.actions[0].do.startswith("raise the threshold")
    assert "no change advised" not in report.details()
    assert report.advice.threshold is None


def test_weight_decay_is_lowered_where_the_limit_adapts():
    """`auto` has no threshold to raise, and is what was advised before."""
    run = decayed()
    assert run.threshold is None
    first, second = report_on(run).advice.actions
    assert first.do == "lower weight_decay from 0.01 to 0.001"
    assert second.do.startswith("clip at a norm of ")
    assert second.do.endswith(" instead of by an adaptive limit")
    run.max_norm[:] = [0.5] * len(run.steps)
    assert report_on(run).advice.actions[0].do.startswith("raise the threshold from 0.5 to ")


def test_the_report_says_first_what_happened_why_and_what_to_do():
    run = only_the_test_loss_swings()
    run.norm[100] *= 50
    run.peak[:] = run.norm
    for text in (str(report_on(run)), report_on(run).details()):
        first = " ".join(text.split())
        assert "The val loss goes up and down instead of settling" in first
        assert "The likely cause: once a single step had a gradient far larger than usual" in first
        assert "What to do: clip gradients with `auto`." in first
    calm = " ".join(str(report_on(healthy())).split())
    assert "The training loss goes from 2" in calm
    assert "(medians over some steps) and does not swing." in calm  # the line above has the loss of one step


def test_a_swing_that_is_overfitting_in_part_says_so():
    both = with_test([2.0, 1.2, 0.4, 0.9, 0.45, 1.0, 0.7, 1.2, 0.9, 1.3, 1.2, 1.4])
    (finding,) = (f for f in report_on(both).findings if f.name == "oscillation")
    assert "so a part of it is overfitting" in report_on(both).verdict.what
    assert "keep the weights of the lowest test loss" in finding.advice.replace("val", "test")
    assert "overfitting" not in str(report_on(only_the_test_loss_swings()))
    assert "overfitting" not in str(report_on(swinging()))


def curve(*values):
    return [{"note": "val", "loss": v, "after": 10 * i} for i, v in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((2.34, 2.32, 2.33, 2.31, 2.32), "The val loss hardly falls: it goes from 2.34 to 2.32, and does not swing."),
        ((1.0, 0.6, 0.5, 0.48, 0.56), "The val loss goes from 1 to 0.56 (its lowest is 0.48) and does not swing."),
        ((1.0, 0.6, 0.5, 0.48, 0.5), "The val loss goes from 1 to 0.5 and does not swing."),
        ((-1.0, -1.0, -1.0, -1.0, -1.0), "The val loss goes from -1 to -1 and does not swing."),
    ],
)
def test_a_calm_loss_is_told_as_it_is(values, said):
    run = healthy()
    run.notes.extend(curve(*values))
    assert report_on(run).verdict.what == said


def test_a_calm_run_at_its_highest_rate_is_not_told_to_change_and_to_stay():
    run = healthy()
    run.step_grad_cosine[:] = [0.4] * len(run.steps)
    run.clip[:] = [0.9 if i % 10 == 0 else 1.0 for i in range(len(run.steps))]
    text = " ".join(report_on(run).details().split())
    assert "Keep it as it is" in text
    assert "What to do: Nothing has to change while the loss falls." in text
    assert "too high" not in text


def test_a_run_that_clipping_holds_is_left_alone():
    run = heavy_tailed()
    run.clip[:] = [min(1.0, 2.0 / n) for n in run.norm]
    advice = report_on(run).advice
    assert advice.threshold is None
    assert "already clipped" in advice.because


def diverging(healthy_steps, n, **columns):
    """A run of `n` steps whose loss and norms grow tenfold in each step after the healthy ones."""
    growth = [10.0 ** max(0, i - healthy_steps + 1) for i in range(n)]
    return healthy(n, loss=[11 * g for g in growth], norm=[8 * g for g in growth], **columns)


@pytest.mark.parametrize("n", [12, 31, 45])
def test_without_a_healthy_part_there_is_no_threshold(n):
    report = report_on(diverging(3, n))
    assert [f.name for f in report.findings][:1] == ["rising"]
    assert report.advice.threshold is None
    assert "Healthy steps before it diverged: 3," in report.advice.because
    assert [action.do[:5] for action in report.advice.actions] == ["clip ", "lower"]
    assert "clip gradients with `auto`" in report.verdict.do


def test_a_short_healthy_part_gives_the_threshold():
    report = report_on(diverging(12, 45))
    assert report.advice.threshold == pytest.approx(8 / 3, rel=0.1)


@pytest.mark.parametrize("n", [3, 6, 7, 8, 31])
def test_a_divergence_is_found_whatever_the_length(n):
    losses = [2.0 * 1e4**i for i in range(n)]
    assert "rising" in [f.name for f in report_on(healthy(n, loss=losses)).findings]
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
