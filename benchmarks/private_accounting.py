"""Epsilon of 60 settings: ours, dp-accounting asked by itself, and Opacus' RDP accountant.

    pip install --no-deps opacus opt_einsum
    python benchmarks/private_accounting.py

Writes benchmarks/results/private-accounting.json, which the tests compare with what gradrein says today.
"""

import itertools
import json
import warnings
from pathlib import Path

import dp_accounting
from opacus.accountants import RDPAccountant

from gradrein import private

OUT = Path(__file__).parent / "results" / "private-accounting.json"
RATES, NOISES, STEPS, DELTAS = (0.001, 0.004, 0.01), (1.0, 1.25, 1.5, 2.5, 4.0), (200, 2000), (1e-5, 1e-6)
# Where the two differ: dp-accounting bounds the divergence of orders that are no whole numbers from above.
BEYOND = [(0.01, 0.7, 2000, 1e-5), (0.05, 0.7, 200, 1e-5), (0.05, 0.7, 2000, 1e-5), (0.05, 1.0, 2000, 1e-5)]


def by_dp_accounting(rate, noise, steps, delta, accountant):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return accountant.get_epsilon(delta)


def by_opacus(rate, noise, steps, delta):
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    # Orders up to 1024: with its own, which end at 63, it warns that the best is the last for small epsilons.
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accountant.get_epsilon(delta), accountant.get_epsilon(delta, alphas=orders)


def ask(rate, noise, steps, delta):
    settings = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps, "delta": delta}
    default, more = by_opacus(rate, noise, steps, delta)
    return {
        **settings,
        "rdp": private.epsilon(**settings, accountant="rdp"),
        "pld": private.epsilon(**settings, accountant="pld"),
        "dp_accounting_rdp": float(by_dp_accounting(rate, noise, steps, delta, dp_accounting.rdp.RdpAccountant())),
        "dp_accounting_pld": float(by_dp_accounting(rate, noise, steps, delta, dp_accounting.pld.PLDAccountant())),
        "opacus_rdp": float(default),
        "opacus_rdp_more_orders": float(more),
    }


def main():
    rows = [ask(*settings) for settings in itertools.product(RATES, NOISES, STEPS, DELTAS)]
    beyond = [ask(*settings) for settings in BEYOND]
    OUT.write_text(json.dumps({"versions": versions(), "rows": rows, "beyond": beyond}, indent=1) + "\n")
    for key in ("opacus_rdp", "opacus_rdp_more_orders"):
        print(key, "largest difference", max(abs(r["rdp"] - r[key]) for r in rows))


def versions():
    from importlib.metadata import version

    return {name: version(name) for name in ("dp-accounting", "opacus")}


if __name__ == "__main__":
    main()
