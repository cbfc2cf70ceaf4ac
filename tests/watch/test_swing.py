"""The definition of swinging: causal, so never lost again; independent of scale; silent on what does not swing."""

import importlib.util
import random
from pathlib import Path

import pytest

from gradrein.watch.analysis.swing import find_swing

PATH = Path(__file__).parents[2] / "benchmarks" / "swing_calibration.py"
SPEC = importlib.util.spec_from_file_location("swing_calibration", PATH)
CURVES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CURVES)


def curves(kinds, count):
    return [(name, seed) for name in kinds for seed in range(count)]


def made(name, seed):
    make, batches = {**CURVES.HEALTHY, **CURVES.SWINGING}[name]
    return make(random.Random(f"test {name} {seed}"))[:1500], batches


@pytest.mark.parametrize("name", CURVES.HEALTHY)
def test_a_healthy_kind_is_silent(name):
    found = [find_swing(values, batches=batches) is not None for values, batches in (made(name, s) for s in range(15))]
    assert sum(found) <= 1  # built for one in a hundred


@pytest.mark.parametrize("name", CURVES.SWINGING)
def test_a_swinging_kind_is_found(name):
    make, batches = CURVES.SWINGING[name]
    found = [find_swing(make(random.Random(f"test {name} {s}")), batches=batches) is not None for s in range(12)]
    assert sum(found) >= 9


@pytest.mark.parametrize(("name", "seed"), curves(CURVES.SWINGING, 2))
def test_what_a_part_shows_the_whole_shows(name, seed):
    values, batches = made(name, seed)
    whole = find_swing(values, batches=batches)
    for share in (0.2, 0.4, 0.6, 0.8):
        part = find_swing(values[: int(share * len(values))], batches=batches)
        assert part is None or whole is not None
        if part is not None:
            assert find_swing(values[: part.since + 1], batches=batches) is not None  # found as soon as it says


@pytest.mark.parametrize(("name", "seed"), curves(CURVES.SWINGING, 1))
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_units_do_not_matter(name, seed, scale):
    values, batches = made(name, seed)
    plain, scaled = find_swing(values, batches=batches), find_swing([scale * v for v in values], batches=batches)
    assert (plain is None) == (scaled is None)
    if plain is not None:
        assert len(plain.rises) == len(scaled.rises)


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 50, [0.0] * 50, [-1.0] * 50, [1.0, 0.0] * 3])
@pytest.mark.parametrize("batches", [True, False])
def test_nothing_to_see(values, batches):
    assert find_swing(values, batches=batches) is None or values == [1.0, 0.0] * 3
