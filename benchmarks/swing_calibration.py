"""How often is a loss that does not swing said to, and how often is one that does found?

    python benchmarks/swing_calibration.py            300 curves of each kind, to benchmarks/results/swing.json
    python benchmarks/swing_calibration.py --count 50 --out /dev/null

Built for false alarms on at most 1% of the curves of any healthy kind. Curves are synthetic, so what is true of each is
known; lengths, noise and seeds are drawn at random for each curve. The last two columns are about the same curves cut
short: the share that was found in some shorter part and lost in the whole (0 by construction), and the median part of
the curve after which it is found.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from gradrein.watch.analysis.swing import find_swing

Curve = list[float]
TARGET = 0.01


def falling(n: int, r: random.Random) -> Curve:
    """A level that falls as training losses do, to a share of where it began."""
    start, end, rate = math.exp(r.gauss(0.5, 1)), math.exp(r.uniform(-5, -0.5)), r.uniform(2, 12)
    return [start * (end + (1 - end) * math.exp(-rate * t / n)) for t in range(n)]


def noisy(level: Curve, r: random.Random, sd: float, tails: float = 0.0) -> Curve:
    """Noise in the logarithm; with `tails`, some values far off."""
    return [v * math.exp(sd * r.gauss(0, 1) + (r.random() < tails) * r.uniform(0.5, 3)) for v in level]


def batches(r: random.Random) -> Curve:
    """Independent batches of any noise."""
    n = int(math.exp(r.uniform(math.log(80), math.log(6000))))
    return noisy(falling(n, r), r, math.exp(r.uniform(-4, 0)))


def rare_batches(r: random.Random) -> Curve:
    """Single bad batches that leave no trace."""
    n = int(math.exp(r.uniform(math.log(80), math.log(6000))))
    return noisy(falling(n, r), r, math.exp(r.uniform(-3, -0.5)), tails=r.choice((0.003, 0.02, 0.1)))


def around_zero(r: random.Random) -> Curve:
    """A loss that falls through zero, as of a policy or a density."""
    n = int(math.exp(r.uniform(math.log(80), math.log(6000))))
    sd = math.exp(r.uniform(-4, 1))
    return [2 * math.exp(-4 * t / n) - 1 + sd * r.gauss(0, 1) for t in range(n)]


def plateaus(r: random.Random) -> Curve:
    """A schedule that drops in steps, with plateaus between."""
    n = r.randint(200, 4000)
    drops = sorted(r.sample(range(n), 3))
    level = [2.0 * 0.5 ** sum(t > d for d in drops) + 0.1 for t in range(n)]
    return noisy(level, r, math.exp(r.uniform(-4, -0.5)))


def harder(r: random.Random) -> Curve:
    """A curriculum with one harder stage."""
    n = r.randint(200, 4000)
    at = r.randint(n // 4, 3 * n // 4)
    level = [math.exp(-3 * t / n) + 0.2 + (1.5 * math.exp(-5 * (t - at) / n) if t > at else 0) for t in range(n)]
    return noisy(level, r, math.exp(r.uniform(-4, -0.5)))


def tests(r: random.Random) -> Curve:
    """Test losses that fall, with little noise: the same data each time."""
    n = r.randint(5, 200)
    return noisy(falling(n, r), r, r.uniform(0, 0.06))


def overfitted(r: random.Random) -> Curve:
    """Test losses that fall and then rise, once."""
    n = r.randint(8, 200)
    best, climb = r.uniform(0.2, 0.7), r.uniform(0.5, 6)
    level = [math.exp(-5 * t / n) + 0.3 + climb * max(0.0, t / n - best) for t in range(n)]
    return noisy(level, r, r.uniform(0, 0.05))


def waves(r: random.Random) -> Curve:
    """Slow swings of at least a factor of two in the loss of batches."""
    n = r.randint(200, 6000)
    period, size, level = r.uniform(0.05, 0.25) * n, r.uniform(0.4, 1.2), falling(n, r)
    return noisy(
        [v * math.exp(size * math.sin(2 * math.pi * t / period)) for t, v in enumerate(level)], r, r.uniform(0.02, 0.5)
    )


def thrown(r: random.Random) -> Curve:
    """Weights are thrown off a few times and recover."""
    n, level = r.randint(200, 6000), 0.0
    times = {int(n * (i + 1 + r.uniform(-0.3, 0.3)) / 7): r.uniform(0.8, 2.5) for i in range(6)}
    found = []
    for t, v in enumerate(falling(n, r)):
        level = level * (1 - 25 / n) + times.get(t, 0.0)
        found.append(v * math.exp(level))
    return noisy(found, r, r.uniform(0.02, 0.4))


def alternating(r: random.Random) -> Curve:
    """Every other step up, every other down, and growing."""
    n, size = r.randint(100, 2000), r.uniform(0.3, 0.8)
    return noisy([1 + size * (t / n) * (-1) ** t for t in range(n)], r, r.uniform(0, 0.03))


def zero_waves(r: random.Random) -> Curve:
    """Slow swings of a loss that crosses zero."""
    n = r.randint(200, 4000)
    period, sd = r.uniform(0.05, 0.25) * n, r.uniform(0.01, 0.4)
    return [
        math.exp(-5 * t / n) - 0.5 + 0.6 * math.sin(2 * math.pi * t / period) + sd * r.gauss(0, 1) for t in range(n)
    ]


def erratic_tests(r: random.Random) -> Curve:
    """Test losses that go up and down by factors from one to the next."""
    n = r.randint(10, 100)
    return noisy(falling(n, r), r, r.uniform(0.35, 1.0))


def test_bumps(r: random.Random) -> Curve:
    """Test losses with three bumps."""
    n = r.randint(15, 150)
    size, width = r.uniform(0.4, 1.5), n / 25
    level = [
        v * math.exp(size * sum(math.exp(-(((t - n * c) / width) ** 2)) for c in (0.35, 0.6, 0.85)))
        for t, v in enumerate(falling(n, r))
    ]
    return noisy(level, r, r.uniform(0, 0.05))


HEALTHY: dict[str, tuple[Callable[[random.Random], Curve], bool]] = {
    f.__name__: (f, kind)
    for kind, group in ((True, (batches, rare_batches, around_zero, plateaus, harder)), (False, (tests, overfitted)))
    for f in group
}
SWINGING: dict[str, tuple[Callable[[random.Random], Curve], bool]] = {
    f.__name__: (f, kind)
    for kind, group in ((True, (waves, thrown, alternating, zero_waves)), (False, (erratic_tests, test_bumps)))
    for f in group
}


def judge(make: Callable[[random.Random], Curve], kind: bool, count: int) -> dict[str, float]:
    """The share of curves that are found, lost again, and how early they are."""
    found, lost, early = 0, 0, []
    for seed in range(count):
        curve = make(random.Random(f"{make.__name__} {seed}"))
        whole = find_swing(curve, batches=kind)
        found += whole is not None
        if whole is not None:
            early.append((whole.since + 1) / len(curve))
        if seed % 10 == 0:  # cutting is slow
            parts = (curve[: int(len(curve) * share)] for share in (0.3, 0.5, 0.7, 0.9))
            lost += whole is None and any(find_swing(part, batches=kind) is not None for part in parts)
    return {"found": found / count, "lost": lost, "after": sorted(early)[len(early) // 2] if early else math.nan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "swing.json")
    options = parser.parse_args()
    results = {}
    for name, (make, kind) in {**HEALTHY, **SWINGING}.items():
        results[name] = {"healthy": name in HEALTHY, **judge(make, kind, options.count)}
        row = results[name]
        over = "  ABOVE TARGET" if row["healthy"] and row["found"] > TARGET else ""
        print(f"{name:16}{row['found']:8.1%}{row['lost']:6.0f}{row['after']:8.2f}{over}", flush=True)
    plain = {k: {a: None if b != b else b for a, b in v.items()} for k, v in results.items()}
    options.out.write_text(json.dumps({"count": options.count, "target": TARGET, "kinds": plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
