"""Each finding: a run that shows it and a healthy one that does not."""

import dataclasses
import math
import random

import pytest

from gradrein.watch.analysis.findings import check_names, find
from gradrein.watch.analysis.findings.noise_scale import noise_scale
from gradrein.watch.analysis.losses import rises
from gradrein.watch.analysis.signs import score_of
from gradrein.watch.report.report import report_on
from gradrein.watch.run.run import NonfiniteStep

from .runs import NAMES, apart, healthy, left_out

N = 400


def with_test(values, every=20, origin="printed", **columns):
    run = healthy(**columns)
    run.notes.extend(
        {"curve": "val loss", "origin": origin, "value": v, "after": every * (i + 1)} for i, v in enumerate(values)
    )
    return run


def swinging():
    """A test loss that goes up and down, and ends above its lowest."""
    return with_test([2.0, 1.2, 0.6, 1.1, 0.5, 0.45, 0.9, 0.4, 0.38, 0.8, 0.35, 0.6], update=[0.03] * N)


def long_steps():
    """No test loss; the training loss climbs again, by steps of a fifth of the weights."""
    loss = [v * math.exp(max(0, t - 200) / 40) for t, v in enumerate(healthy().loss)]
    return healthy(loss=loss, update=[0.2] * N)


def shrinking():
    """Under Adam the test loss falls to the end, and gradients become a hundred times smaller."""
    run = with_test([2.0 * 0.8**i for i in range(12)], norm=[v * 0.988**t for t, v in enumerate(healthy().norm)])
    return dataclasses.replace(run, optimizer="Adam")


def grows_without_end():
    return healthy(loss=[1e-2 * 1.1**t for t in range(N)])


def overfits():
    return with_test([2.0, 1.2, 0.8, 0.6, 0.55, 0.5, 0.53, 0.6, 0.68, 0.75, 0.85, 0.95])


def two_kinds():
    r = random.Random(5)
    run = swinging()
    run.peak[:] = run.norm[:] = [v * (7 if r.random() < 0.15 else 1) for v in run.norm]
    return run


def one_sample_outweighs():
    run = swinging()
    run.sample_ratio[:] = [80.0] * N
    return run


def cubed():
    run = swinging()
    graph = {"power": 3.0, "of": "Abs", "weighted": True}
    run.notes.append({"site": "backward", "file": "train.py", "line": 41, "text": "", "loss_graph": graph})
    return run


def decayed():
    run = with_test([2.0, 0.5, 0.2, 0.1, *(0.1 * 1.6**i for i in range(1, 10))], clip=[0.1] * N, update=[0.001] * N)
    run.loss[:] = [math.exp(-t / 20) + math.exp((t - N) / 20) for t in range(N)]
    run.settings.update(weight_decay=0.01, momentum=0.0)
    return run


def below_eps(optimizer="Muon"):
    """One matrix has a gradient of 1e12, and all are clipped by the norm of all."""
    norms = [[1e12, *[1.0] * (len(NAMES) - 1)] for _ in range(N)]
    run = healthy(norms=norms, norm=[1e12] * N, clip=[1e-12] * N, max_norm=[1.0] * N)
    return dataclasses.replace(run, optimizer=optimizer)


def sign_of_clipped():
    return dataclasses.replace(healthy(clip=[0.1] * N, max_norm=[1.0] * N), optimizer="Lion")


def overflowing():
    run = healthy()
    run.notes.extend({"note": "scaler skipped", "after": 40 + 5 * i} for i in range(60))
    return run


def rounded_away():
    run = healthy(update=[1e-5] * N)
    run.dtypes.append("bfloat16")
    return run


def overshooting():
    run = swinging()
    run.step_grad_cosine[:] = [0.5 + 0.2 * math.sin(t) for t in range(N)]
    return run


def heavy_tailed():
    r = random.Random(2)
    run = swinging()
    run.peak[:] = run.norm[:] = [r.paretovariate(1.2) for _ in range(N)]
    return run


def vanishing(power=1):
    run = swinging()
    run.norms[:] = [[10.0 ** (power * int(name.split(".")[1])) for name in NAMES] for _ in range(N)]
    return run


def exploding():
    return vanishing(-1)


def dying():
    rows = healthy().norms
    return healthy(norms=[[None if i == 3 else 0.0 if i == 4 else v for i, v in enumerate(row)] for row in rows])


def standing_still():
    return healthy(unmoved=[{5} for _ in range(N)])


def nonfinite():
    run = healthy()
    run.nonfinite.append(NonfiniteStep(120, {"blocks.3.weight": 7}, 0.4))
    return run


def with_origin():
    run = healthy()
    run.notes.append(
        {
            "anomaly": "Origin: LogBackward0 after Net.body (train.py, line 9: y = x.log()) made NaN or infinity.",
            "after": 9,
        }
    )
    return run


def noisy():
    run = swinging()
    run.samples[:] = [(16, n * n * 16 * 0.99) for n in run.norm]
    return run


TRIGGERS = {
    "unsettled": [swinging, long_steps, shrinking, overfits],
    "diverged": [grows_without_end],
    "nonfinite": [nonfinite, with_origin],
    "overfitting": [overfits],
    "outliers": [two_kinds, heavy_tailed],
    "sample_share": [one_sample_outweighs],
    "loss_power": [cubed],
    "clip_decay": [decayed],
    "clip_scale": [below_eps, sign_of_clipped],
    "precision": [overflowing, rounded_away],
    "edge_of_stability": [overshooting],
    "depth": [vanishing, exploding],
    "dead": [dying, standing_still],
    "noise_scale": [noisy],
    "rank_norms": [apart, left_out],
}


def test_where_the_first_nan_comes_from_is_what_to_change():
    """Not what else was found: a power in the loss made no NaN."""
    run = with_origin()
    run.notes.extend(cubed().notes)
    report = report_on(run)
    assert {"nonfinite", "loss_power"} <= {one.name for one in report.findings}
    assert "guard it" in report.verdict.do
    assert report.advice.actions == []


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makes in TRIGGERS.items() for make in makes])
def test_a_run_that_shows_it_is_found(name, make):
    found = {finding.name: finding for finding in find(make())}
    assert name in found
    finding = found[name]
    assert finding.title
    assert finding.criterion
    assert finding.evidence
    assert finding.advice
    assert 0 < finding.weight <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_shows_nothing(seed):
    assert find(healthy(seed=seed)) == []


@pytest.mark.parametrize("n", [80, 400, 2000])
@pytest.mark.parametrize("seed", range(5))
def test_batches_that_differ_are_left_alone(n, seed):
    r = random.Random(seed)
    noisy = [(2 * math.exp(-3 * t / n) + 0.2) * math.exp(0.8 * r.gauss(0, 1)) for t in range(n)]
    assert find(healthy(n=n, loss=noisy, update=[0.5 / n] * n)) == []


@pytest.mark.parametrize("make", [overshooting, heavy_tailed, one_sample_outweighs, cubed, noisy, vanishing])
def test_causes_are_named_only_where_something_happened(make):
    run = make()
    run.notes[:] = [note for note in run.notes if "curve" not in note]
    run.update[:] = healthy().update
    assert find(run) == []


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Muon"])
def test_a_clip_of_all_that_only_one_gradient_survives_names_both(optimizer):
    found = {finding.name: finding for finding in find(below_eps(optimizer))}["clip_scale"]
    assert found.title.startswith("clipping takes the gradients of 11 of 12 parameters below the eps")
    assert found.evidence["largest gradient"] == NAMES[0]
    assert NAMES[0] not in found.evidence["parameters"]


@pytest.mark.parametrize("change", [{"max_norm": [math.nan] * N}, {"clip": [1.0] * N}, {"optimizer": "SGD"}])
def test_a_clip_of_parts_or_of_nothing_or_before_plain_steps_is_left_alone(change):
    assert "clip_scale" not in {finding.name for finding in find(dataclasses.replace(below_eps(), **change))}


def test_units_do_not_matter():
    for scale in (1e-6, 1e6):
        run = swinging()
        for note in run.notes:
            note["value"] *= scale
        assert score_of(run) == pytest.approx(score_of(swinging()))


@pytest.mark.parametrize("of", ["Sub", "Rsub", "Add", "Abs"])
def test_a_squared_difference_is_no_power(of):
    run = cubed()
    run.notes[-1]["loss_graph"].update(power=2.0, of=of)
    assert "loss_power" not in {f.name for f in find(run)}
    run.notes[-1]["loss_graph"].update(power=2.5)
    assert "loss_power" in {f.name for f in find(run)}


def test_every_finding_has_a_trigger():
    assert set(check_names()) == set(TRIGGERS)
    assert len(set(check_names())) == len(check_names())


def test_a_curve_is_told_as_it_is():
    assert rises([1.0, 1.1, 1.0, 0.9]) == []
    assert rises([1.0, 2.0, 3.0, 1.0, 1.5, 1.0]) == [3.0, 1.5]
    story = next(f for f in find(swinging()) if f.name == "unsettled").plain
    assert (
        story
        == "the val loss goes up and down (4 rises, up to 2.1-fold) and ends at 0.6, 1.7 times its lowest of step 220"
    )


def test_outliers_say_when_and_whether_they_are_regular():
    run = swinging()
    run.peak[:] = run.norm[:] = [v * (50 if t % 40 == 20 else 1) for t, v in enumerate(run.norm)]
    found = next(f for f in find(run) if f.name == "outliers")
    assert found.evidence["steps"] == list(range(20, N, 40))
    assert found.evidence["regular"] == "every 40 steps"
    assert "10 of 400 batches" in found.title


def test_depth_says_which_way():
    assert "vanish" in next(f for f in find(vanishing()) if f.name == "depth").title
    assert "explode" in next(f for f in find(exploding()) if f.name == "depth").title


def test_dead_parameters_are_named_by_kind():
    found = next(f for f in find(dying()) if f.name == "dead")
    assert found.evidence["no gradient"] == ["blocks.1.bias"]
    assert found.evidence["gradient always zero"] == ["blocks.2.weight"]


def test_frozen_on_purpose_is_not_dead():
    run = dying()
    run.trained[3] = run.trained[4] = False
    assert find(run) == []


def test_the_noise_scale_of_known_noise():
    # Samples with unit gradient plus noise of variance 15: the scale is 15, one batch of 16 is not too small.
    run = healthy(norm=[math.sqrt(1 + 15 / 16)] * N, samples=[(16, 16.0)] * N)
    assert noise_scale(run) is None
    run = healthy(norm=[math.sqrt(1 + 480 / 16)] * N, samples=[(16, 481.0)] * N)
    found = noise_scale(run)
    assert found.evidence["noise scale"] == pytest.approx(480)


@pytest.mark.parametrize("size", [1e200, math.inf])
def test_a_run_that_went_astray_can_still_be_read(size):
    rows = [[size] * len(NAMES) if t > 300 else row for t, row in enumerate(healthy().norms)]
    find(
        healthy(norms=rows, norm=[math.hypot(*row) for row in rows], loss=[size if t > 300 else 1.0 for t in range(N)])
    )


def test_a_short_run_shows_nothing():
    assert find(healthy(n=5)) == []
    assert find(healthy(n=0)) == []
