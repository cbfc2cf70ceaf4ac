"""Per-sample clipping against a plain step and against other libraries, each in its own process, in turns.

A step is forward, backward and a clipped gradient in ``.grad``. All methods take turns, so that a busy
machine disturbs them alike. In its turn a method of short steps runs one untimed, which fills the caches, and one that
is timed; reported is the median over rounds of the ratio to the plain step of the same
round, with its quartiles: by the clock, and by the processor time that was spent. A method that takes more than ten
plain steps takes part in the first rounds only. One that is not ready within `--limit` seconds, compiling included, or
that would write down more gradients than memory holds, is reported as such.
Every clipped gradient is compared with that of `torch.func` where it runs, else with ours. Peak memory is
measured in a fresh process for each method: the growth of the resident set during three steps, the first one
included, and during three more once it is warm. (What a compiler takes is in neither, except for the plain step.)
The allocator is told to hand back what is freed, for all methods alike: left to itself glibc keeps it, and adds
a fifth to a half that depends on little more than the order of sizes.

    python benchmarks/persample.py mlp cnn            # writes benchmarks/results/persample-<model>.json
    python benchmarks/persample.py mlp --methods plain "plain compiled" gradrein "gradrein compiled"
    python benchmarks/persample.py mlp --batch 8      # writes benchmarks/results/persample-mlp-8.json
    python benchmarks/persample.py --batches mlp      # how cost grows with the batch
    python benchmarks/persample.py --depths           # and with the depth of a language model of fixed width
    python benchmarks/persample.py --memories         # peak memory
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
import warnings

import torch

from contenders import Contender
from persample_methods import METHODS
from persample_models import MODELS, deep
from side_by_side import ratio, save, show

# A method that takes so many plain steps takes part in the first rounds only.
SLOW, ROUNDS_OF_SLOW = 10, 3


def gap(a, b):
    """Return how far one gradient is from another, relative to the latter."""
    pairs = [(torch.as_tensor(x).double(), torch.as_tensor(y).double()) for x, y in zip(a, b, strict=True)]
    return float((sum((x - y).square().sum() for x, y in pairs) / sum(y.square().sum() for _, y in pairs)).sqrt())


def measured(make, size, methods, options, seconds):
    """Return one row per method on the problem that `make` makes of a size, from rounds of so many seconds at least."""
    contenders = {}
    try:
        for method in methods:
            limit = 0 if method == "plain" else options.limit  # all are compared with it
            contenders[method] = Contender(make, size, method, limit, torch.get_num_threads())
        return rows_of(contenders, *take_turns(contenders, seconds, options.rounds))
    finally:
        for contender in contenders.values():
            contender.close()


def rows_of(contenders, clock, spent):
    truth = next((contenders[m].gradient for m in ("torch.func", "gradrein") if m in clock), None)
    rows = []
    for method, contender in contenders.items():
        if contender.refused:
            rows.append({"method": method, "refused": contender.refused})
            continue
        turns = len(clock[method])
        row = {
            "method": method,
            "clock": ratio(clock[method], clock["plain"][:turns]),
            "processor": ratio(spent[method], spent["plain"][:turns]),
            "milliseconds": round(1e3 * sorted(clock[method])[turns // 2], 2),
            "rounds": turns,
        }
        if contender.gradient is not None and truth is not None:
            row["gradient_error"] = float(f"{gap(contender.gradient, truth):.1e}")
        row["seconds_until_ready"] = round(contender.took, 1)
        eager = EAGER_OF.get(method)
        if eager in clock:
            saved = statistics.median(clock[eager]) - statistics.median(clock[method])
            row["steps_until_paid_back"] = round(contender.took / saved) if saved > 0 else None
        if contender.info:
            row["runs"] = " ".join(contender.info.split("\n  ")[1:])
        rows.append(row)
    return rows


def take_turns(contenders, seconds, rounds):
    """Return the seconds of each method in each round, by the clock and of the processor.

    Slow ones end early, and the time to measure begins after that.
    """
    running = {method: contender for method, contender in contenders.items() if not contender.refused}
    clock = {method: [] for method in running}
    spent = {method: [] for method in running}
    end = math.inf
    while time.perf_counter() < end or len(clock["plain"]) < rounds:
        for method, contender in running.items():
            by_clock, by_processor = contender.step()
            clock[method].append(by_clock)
            spent[method].append(by_processor)
        if len(clock["plain"]) == ROUNDS_OF_SLOW:
            running = {m: c for m, c in running.items() if min(clock[m]) <= SLOW * min(clock["plain"])}
            end = time.perf_counter() + seconds
    return clock, spent


# What a compiled method would be without the compiler.
EAGER_OF = {
    "plain compiled": "plain",
    "gradrein captured": "gradrein",
    "gradrein compiled": "gradrein",
    "gradrein fastest": "gradrein",
    "torch.func compiled": "torch.func",
}
CALLED_BEFORE = [method for method in EAGER_OF if method.startswith("gradrein")]
# What a growth is measured of; `--methods` chooses others.
GROWTH = ["plain", "plain compiled", "gradrein", "gradrein fastest"]
BATCHES, DEPTHS = (2, 8, 32, 128, 512), (2, 4, 8, 16, 32)


def growth(of, what, sizes, make, methods, options, name):
    """Measure several sizes, and save the rows under a name after each of them."""
    rows = []
    for size in sizes:
        found = measured(make, (size,), methods, options, options.seconds / len(sizes))
        report(f"{of}, {what} {size}", found)
        rows += [{what: size, **row} for row in found]
        save(name, __doc__, rows)


def peak_memory(model, method, limit):
    """Return by how many MB three steps make a fresh process grow, and three more once it is warm; None on failure."""
    command = [sys.executable, "-W", "ignore", __file__, "--memory", model, method]
    told = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=told, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    return [round(float(x)) for x in done.stdout.split()[-2:]] if done.returncode == 0 else None


def measure_memory(model, method):
    torch.manual_seed(0)
    problem = MODELS[model]()
    step = METHODS[method](problem)
    before = resident("VmHWM")
    for _ in range(3):
        step()
    fresh = resident("VmHWM") - before
    problem.model.zero_grad()
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the most that was held is what is held now
    before = resident("VmRSS")
    for _ in range(3):
        step()
    print(fresh, resident("VmHWM") - before)


def resident(what):
    """Return the MB this process holds, or has held at most; unlike `ru_maxrss` that does not start at its parent's."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+)", status)[1]) / 1024


def measure_memories(models, methods, limit):
    rows = []
    for name in models:
        grown = {method: peak_memory(name, method, limit) for method in methods}
        found = {method: both for method, both in grown.items() if both is not None}
        rows += [
            {
                "model": name,
                "method": method,
                # A step that `gradrein.compile` made has been called before: nothing is fresh.
                "megabytes": "" if method in CALLED_BEFORE else fresh,
                "over_plain": "" if method in CALLED_BEFORE else round(fresh / found["plain"][0], 2),
                "megabytes_warm": warm,
                "warm_over_plain": round(warm / found["plain"][1], 2),
            }
            for method, (fresh, warm) in found.items()
        ]
        print(name, found, flush=True)
        save("persample-memory", __doc__, rows)


def report(title, rows):
    print(f"\n{title}", flush=True)
    for row in rows:
        if "refused" in row:
            print(f"  {row['method']:17} {row['refused']}")
            continue
        error = f"error {row['gradient_error']:.0e}" if "gradient_error" in row else ""
        both = f"clock {show(row['clock'])}  processor {show(row['processor'])}"
        paid = f"paid back after {row['steps_until_paid_back']} steps" if row.get("steps_until_paid_back") else ""
        print(f"  {row['method']:17} {both}  {error} {paid} {row.get('runs', '')}")


def main():
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure each model")
    parser.add_argument("--rounds", type=int, default=3, help="how many rounds to measure at least")
    parser.add_argument("--limit", type=float, default=120, help="how many seconds a method may take to be ready")
    parser.add_argument("--batch", type=int, help="of each model, instead of its own")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), help="all, or those of GROWTH")
    parser.add_argument("--memories", action="store_true", help="measure peak memory instead")
    parser.add_argument("--threads", type=int, help="how many threads torch may use")
    parser.add_argument("--batches", action="store_true", help="measure growth with the batch instead")
    parser.add_argument("--depths", action="store_true", help="measure growth with the depth instead")
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(*options.memory)
        return
    if options.memories:
        measure_memories(options.models, options.methods or METHODS, options.limit)
        return
    if options.depths:
        growth("gpt", "depth", DEPTHS, deep, options.methods or GROWTH, options, "persample-depths")
        return
    for name in options.models:
        if options.batches:
            methods = options.methods or GROWTH
            growth(name, "batch", BATCHES, MODELS[name], methods, options, f"persample-batches-{name}")
            continue
        batch = (options.batch,) if options.batch else ()
        rows = measured(MODELS[name], batch, options.methods or list(METHODS), options, options.seconds)
        size = f"-{options.batch}" if options.batch else ""
        report(name + size, rows)
        save(f"persample-{name}{size}", __doc__, rows)


if __name__ == "__main__":
    main()
