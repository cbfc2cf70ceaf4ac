"""What is spent is what `dp-accounting` says, and what Opacus' RDP accountant said when it was asked."""

import json
import logging
import math
import pathlib
import sys

import dp_accounting
import pytest

from gradrein import errors, private

STORED = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "private-accounting.json"
ROWS = json.loads(STORED.read_text())["rows"]
SETTINGS = {"sample_rate": 0.01, "steps": 500, "delta": 1e-5}


def settings_of(row):
    return {key: row[key] for key in ("noise_multiplier", "sample_rate", "steps", "delta")}


def test_there_are_sixty_settings_and_all_agree():
    assert len(ROWS) == 60
    for row in ROWS:
        assert row["rdp"] == pytest.approx(row["dp_accounting_rdp"], abs=1e-6)
        assert row["pld"] == pytest.approx(row["dp_accounting_pld"], abs=1e-6)
        assert row["rdp"] == pytest.approx(row["opacus_rdp_more_orders"], abs=1e-3)
        assert row["pld"] <= row["rdp"]


@pytest.mark.parametrize("row", ROWS[::6], ids=lambda row: "-".join(map(str, list(row.values())[:4])))
def test_the_stored_figures_are_those_of_today(row):
    found = private.epsilon(**settings_of(row), accountant="rdp")
    assert found == pytest.approx(row["opacus_rdp_more_orders"], abs=1e-3)
    event = dp_accounting.PoissonSampledDpEvent(
        row["sample_rate"], dp_accounting.GaussianDpEvent(row["noise_multiplier"])
    )
    assert found == pytest.approx(
        dp_accounting.rdp.RdpAccountant().compose(event, row["steps"]).get_epsilon(row["delta"]), abs=1e-6
    )


def test_loss_distributions():
    row = ROWS[-1]
    assert private.epsilon(**settings_of(row)) == pytest.approx(row["dp_accounting_pld"], abs=1e-6)


@pytest.mark.parametrize("accountant", ["rdp", "unamplified"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("rate", [1.0, 0.05, 0.002])
def test_noise_for_a_budget(accountant, epsilon, rate):
    settings = {"sample_rate": rate, "steps": 300, "delta": 1e-6, "accountant": accountant}
    noise = private.noise_multiplier(epsilon=epsilon, **settings)
    assert epsilon * 0.998 <= private.epsilon(noise_multiplier=noise, **settings) <= epsilon


def test_noise_for_a_budget_by_loss_distributions():
    noise = private.noise_multiplier(epsilon=2.0, **SETTINGS)
    assert 1.996 <= private.epsilon(noise_multiplier=noise, **SETTINGS) <= 2.0
    assert noise < private.noise_multiplier(epsilon=2.0, **SETTINGS, accountant="rdp")


def test_hardly_any_noise_is_needed():
    assert private.noise_multiplier(epsilon=1e7, sample_rate=0.5, steps=1, delta=1e-3, accountant="rdp") < 0.01


def test_no_noise_is_enough():
    with pytest.raises(errors.ArgumentError, match="no noise multiplier up to 1e6"):
        private.noise_multiplier(epsilon=1e-9, sample_rate=1.0, steps=10_000, delta=1e-12, accountant="rdp")


def test_nothing_is_said_on_the_way(capfd, caplog):
    with caplog.at_level(logging.WARNING):
        private.noise_multiplier(epsilon=0.05, sample_rate=0.001, steps=10, delta=1e-8, accountant="rdp")
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("absl").disabled


def test_more_steps_less_noise_and_a_smaller_delta_cost_more():
    base = private.epsilon(noise_multiplier=1.0, **SETTINGS, accountant="rdp")
    for change in ({"steps": 501}, {"noise_multiplier": 0.99}, {"delta": 9e-6}, {"sample_rate": 0.0101}):
        assert private.epsilon(**{"noise_multiplier": 1.0, **SETTINGS, **change}, accountant="rdp") > base


def test_without_amplification_it_is_the_gaussian_mechanism_of_each_epoch():
    """Epsilon of normal noise on a sum that moves by twice the threshold, from the formula of Balle and Wang (2018)."""

    def delta_of(epsilon, mu):
        def normal(x):
            return math.erfc(-x / 2**0.5) / 2

        return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)

    for steps, epochs in ((1, 1), (10, 1), (11, 2), (40, 4)):
        settings = {"sample_rate": 0.1, "steps": steps, "delta": 1e-5, "accountant": "unamplified"}
        found = private.epsilon(noise_multiplier=6.0, **settings)
        assert delta_of(found, 2 * epochs**0.5 / 6.0) == pytest.approx(1e-5, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"sample_rate": 0.0},
        {"sample_rate": 1.5},
        {"steps": -1},
        {"steps": 1.5},
        {"delta": 0.0},
        {"delta": 1.0},
        {"accountant": "prv"},
    ],
    ids=str,
)
def test_arguments(change):
    with pytest.raises(errors.ArgumentError):
        private.epsilon(**{"noise_multiplier": 1.0, **SETTINGS, **change})


def test_nothing_taken_and_no_noise():
    assert private.epsilon(noise_multiplier=1.0, **{**SETTINGS, "steps": 0}) == 0
    assert private.epsilon(noise_multiplier=0.0, **SETTINGS) == math.inf


def test_without_dp_accounting(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'gradrein\[private\]'"):
        private.epsilon(noise_multiplier=1.0, **SETTINGS)
