"""How every benchmark here measures: contenders take turns, and a claim is a ratio.

Machines are noisy and drift, so times of two contenders are compared only within one round: in each round every
contender runs once, in an order that rotates, and the ratio of their times is taken there. What is reported is the
median of those ratios with its quartiles. The environment is stored beside the numbers.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch

RESULTS = pathlib.Path(__file__).parent / "results"


def interleave(
    contenders: dict[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = 3,
    before: Callable[[], object] = lambda: None,
    inner: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each contender in each round. `before` runs, untimed, ahead of every turn.

    A turn is repeated `inner` times (found by itself if None) so that it lasts at least a millisecond. What runs on
    one thread may be timed with `time.process_time`, which does not count the turns that other programs take.
    """
    names = list(contenders)
    for _ in range(warmup):
        for name in names:
            before()
            contenders[name]()
    if inner is None:
        start = clock()
        contenders[names[0]]()
        inner = max(1, min(1000, int(1e-3 / max(1e-9, clock() - start))))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            run = contenders[name]
            start = clock()
            for _ in range(inner):
                run()
            times[name].append((clock() - start) / inner)
    return times


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """How many times faster the second is: median and quartiles of the per-round ratios."""
    quotients = sorted(s / f for s, f in zip(slow, fast, strict=True))
    low, median, high = statistics.quantiles(quotients, n=4)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def show(r: dict[str, float]) -> str:
    return f"{r['median']:.2f}x [{r['low']:.2f}-{r['high']:.2f}]"


def environment() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": [round(x, 2) for x in os.getloadavg()],
        "date": datetime.date.today().isoformat(),
    }


def save(name: str, method: str, rows: list[dict[str, object]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    content = {"method": method, "environment": environment(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
