"""Each finding: a run that shows it and a healthy one that does not."""

import math
import random

import pytest

from gradrein.watch.analysis.findings import TABLE, find
from gradrein.watch.run.run import NonfiniteStep

from .runs import NAMES, apart, healthy, late, left_out, starved

N = 400


def swinging():
    run = healthy()
    return healthy(loss=[v * (1 + 0.6 * math.sin(2 * math.pi * t / 25)) for t, v in enumerate(run.loss)])


def irregular():
    r = random.Random(1)
    level, losses = 1.0, []
    for t in range(N):
        if t % 40 == 0:
            level = r.choice([0.3, 2.5]) if level == 1.0 else 1.0
        losses.append(level * math.exp(0.1 * r.gauss(0, 1)))
    return healthy(loss=losses)


def growing():
    return healthy(loss=[1.0 + 0.02 * math.exp(3.5 * t / N) * (-1) ** t for t in range(N)])


def crossing_zero():
    r = random.Random(3)
    loss = [math.exp(-5 * t / N) - 0.5 + 0.6 * math.sin(t / 8) + 0.05 * r.gauss(0, 1) for t in range(N)]
    return healthy(loss=loss)


def with_test(values, every=20, origin="printed", **columns):
    run = healthy(**columns)
    run.notes.extend(
        {"curve": "val loss", "origin": origin, "value": v, "after": every * (i + 1)} for i, v in enumerate(values)
    )
    return run


def ends_high():
    """A test loss that rises once, late, while the training loss stays where it was: no swing, and not overfitted."""
    test = [2.0, 1.4, 1.0, 0.8, 0.6, 0.5, *(0.5 + 0.06 * i for i in range(1, 15))]
    loss = [max(0.5, 2.0 - t / 40) if t < 125 else 0.56 + 0.01 * (t % 3) for t in range(400)]
    return with_test(test, loss=loss)


def only_the_test_loss_swings():
    return with_test([2.0, 1.2, 0.6, 1.1, 0.5, 0.45, 0.9, 0.4, 0.38, 0.8, 0.35, 0.6])


def rises_for_good():
    run = healthy()
    return healthy(loss=[v * math.exp(max(0, t - 200) / 80) for t, v in enumerate(run.loss)])


def overfits():
    return with_test([2.0, 1.2, 0.8, 0.6, 0.55, 0.5, 0.53, 0.6, 0.68, 0.75, 0.85, 0.95])


def two_kinds():
    r = random.Random(5)
    return healthy(norm=[v * (7 if r.random() < 0.15 else 1) for v in healthy().norm])


def one_sample_outweighs():
    return healthy(sample_ratio=[80.0] * N)


def cubed():
    run = only_the_test_loss_swings()
    graph = {"power": 3.0, "of": "Abs", "weighted": True}
    run.notes.append({"site": "backward", "file": "train.py", "line": 41, "text": "", "loss_graph": graph})
    return run


def only_noise():
    r = random.Random(4)
    run = only_the_test_loss_swings()
    run.step_grad_cosine[:] = [r.uniform(-0.2, 0.2) for _ in range(N)]
    return run


def decayed():
    run = healthy(clip=[0.1] * N, update=[0.001] * N)
    run.settings.update(weight_decay=0.01, momentum=0.0)
    return run


def overflowing():
    run = healthy()
    run.notes.extend({"note": "scaler skipped", "after": 40 + 5 * i} for i in range(60))
    return run


def rounded_away():
    run = healthy(update=[1e-5] * N)
    run.dtypes.append("bfloat16")
    return run


def overshooting():
    return healthy(step_grad_cosine=[0.5 + 0.2 * math.sin(t) for t in range(N)])


def heavy_tailed():
    r = random.Random(2)
    return healthy(norm=[r.paretovariate(1.2) for _ in range(N)])


def spiking():
    run = healthy()
    norm = list(run.norm)
    norm[100] *= 50
    norm[250] *= 30
    return healthy(norm=norm, update=[0.5 if t in (98, 99, 248, 249) else u for t, u in enumerate(run.update)])


def dominated():
    return healthy(norms=[[100.0 if "blocks.2" in name else 1.0 for name in NAMES] for _ in range(N)])


def vanishing():
    return healthy(norms=[[10.0 ** int(name.split(".")[1]) for name in NAMES] for _ in range(N)])


def exploding():
    return healthy(norms=[[10.0 ** -int(name.split(".")[1]) for name in NAMES] for _ in range(N)])


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


def clipped_too_tightly():
    return healthy(clip=[0.05] * N, max_norm=[0.01] * N)


def noisy():
    return healthy(samples=[(16, n * n * 16 * 0.99) for n in healthy().norm])


TRIGGERS = {
    "oscillation": [swinging, irregular, growing, crossing_zero, only_the_test_loss_swings],
    "rising": [rises_for_good],
    "unsettled": [ends_high],
    "overfitting": [overfits],
    "cluster": [two_kinds],
    "sample_share": [one_sample_outweighs],
    "loss_power": [cubed],
    "clip_decay": [decayed],
    "precision": [overflowing, rounded_away],
    "edge_of_stability": [overshooting],
    "heavy_tail": [heavy_tailed],
    "spikes": [spiking],
    "dominant": [dominated],
    "depth": [vanishing, exploding],
    "dead": [dying, standing_still],
    "nonfinite": [nonfinite, with_origin],
    "clip_tight": [clipped_too_tightly],
    "noise_scale": [noisy, only_noise],
    "rank_norms": [apart, left_out],
    "straggler": [late, starved],
}


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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", [80, 200, 400, 2000])
def test_batches_that_differ_are_no_swing(n, seed):
    r = random.Random(seed)
    noisy = [(2 * math.exp(-3 * t / n) + 0.2) * math.exp(0.8 * r.gauss(0, 1)) for t in range(n)]
    assert "oscillation" not in {f.name for f in find(healthy(n=n, loss=noisy))}


@pytest.mark.parametrize("n", [150, 200, 400, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_an_exact_fit_has_no_heavy_tail(n, seed):
    """Norms fall by seven orders of magnitude and stay there: the first ones are far above the later ones, as is usual."""
    r = random.Random(seed)
    norm = [max(7 * 0.9**t, 7e-7) * math.exp(0.5 * r.gauss(0, 1)) for t in range(n)]
    assert "heavy_tail" not in {f.name for f in find(healthy(n=n, norm=norm, loss=[v * v for v in norm]))}


@pytest.mark.parametrize("of", ["Sub", "Rsub", "Add", "Abs"])
def test_a_squared_difference_is_no_power(of):
    run = cubed()
    run.notes[-1]["loss_graph"].update(power=2.0, of=of)
    assert "loss_power" not in {f.name for f in find(run)}
    run.notes[-1]["loss_graph"].update(power=2.5)
    assert "loss_power" in {f.name for f in find(run)}


def test_every_finding_has_a_trigger():
    assert {test.__name__ for test in TABLE} == set(TRIGGERS)
    assert len(set(TABLE)) == len(TABLE)


def test_the_period_is_that_of_the_run():
    found = next(f for f in find(swinging()) if f.name == "oscillation")
    assert found.evidence["period in steps"] == 25
    grown = next(f for f in find(growing()) if f.name == "oscillation")
    assert grown.evidence["period in steps"] == 2


@pytest.mark.parametrize("make", [only_the_test_loss_swings, overfits])
def test_a_test_loss_is_a_swing_or_overfitting_and_not_both(make):
    names = {f.name for f in find(make())}
    assert len(names & {"oscillation", "overfitting"}) == 1


def test_restarts_of_the_learning_rate_are_no_swing():
    r = random.Random(0)
    phase = [t % 100 / 100 for t in range(N)]
    wave = [1 + math.cos(2 * math.pi * p) for p in phase]
    loss = [(2 * math.exp(-t / 200) + w) * math.exp(0.05 * r.gauss(0, 1)) for t, w in enumerate(wave)]
    lr = [0.05 * (0.02 + w) for w in wave]
    assert "oscillation" in {f.name for f in find(healthy(loss=loss))}
    assert "oscillation" not in {f.name for f in find(healthy(loss=loss, lr=lr))}


def test_harder_data_is_no_swing():
    r = random.Random(0)
    loss = [(0.2 + 1.5 * math.exp(-(t % 130) / 30)) * math.exp(0.05 * r.gauss(0, 1)) for t in range(N)]
    assert "oscillation" not in {f.name for f in find(healthy(loss=loss))}
    thrown = [0.2 if t % 130 == 129 else u for t, u in enumerate(healthy().update)]
    assert "oscillation" in {f.name for f in find(healthy(loss=loss, update=thrown))}


def test_spikes_say_what_came_before():
    found = next(f for f in find(spiking()) if f.name == "spikes")
    assert found.evidence["steps"] == [100, 250]
    assert "unusually large updates before 2 of 2" in found.title


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
    assert "noise_scale" not in {f.name for f in find(run)}
    run = healthy(norm=[math.sqrt(1 + 480 / 16)] * N, samples=[(16, 481.0)] * N)
    found = next(f for f in find(run) if f.name == "noise_scale")
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
