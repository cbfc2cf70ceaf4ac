import json
import math

import pytest

from bridle.watch.report.report import report_on

from .runs import healthy
from .test_findings import heavy_tailed, spiking, vanishing


def test_a_healthy_run_needs_no_clipping():
    advice = report_on(healthy()).advice
    assert advice.threshold is None
    assert advice.policy is None
    text = str(report_on(healthy()))
    assert "No findings: none of the 21 checks fired." in text
    assert "no change advised" in text


def test_a_heavy_tail_gets_a_threshold_with_what_it_would_have_changed():
    run = heavy_tailed()
    advice = report_on(run).advice
    assert advice.policy == "auto"
    above = [n for n in run.norm if n > advice.threshold]
    assert advice.effect.clipped == pytest.approx(len(above) / len(run.norm))
    taken = sum(n - advice.threshold for n in above) / sum(run.norm)
    assert advice.effect.removed == pytest.approx(taken)
    assert advice.quantiles["50%"] < advice.quantiles["99%"] <= advice.quantiles["largest"]
    assert advice.effect in advice.candidates


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


def test_a_run_that_clipping_holds_is_left_alone():
    run = heavy_tailed()
    run.clip[:] = [min(1.0, 2.0 / n) for n in run.norm]
    advice = report_on(run).advice
    assert advice.threshold is None
    assert "clipped already" in advice.because
