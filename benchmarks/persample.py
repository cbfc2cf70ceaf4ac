"""Per-sample clipping against a plain step and against other libraries, interleaved in one process.

A step is forward, backward and a clipped gradient in ``.grad``. All methods take turns, so that a busy machine
disturbs them alike; what is reported is the median over rounds of the ratio to the plain step of the same
round, with the middle half of the ratios beside it. Every clipped gradient is compared with that of
`torch.func` where it runs, else with ours. Peak memory is measured in a fresh process for each method: the
growth of the resident set during three steps.

    python benchmarks/persample.py mlp cnn            # writes benchmarks/results/persample-<model>.json
    python benchmarks/persample.py --batches mlp      # how cost grows with the batch
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from persample_methods import METHODS, NOT_CLIPPED
from persample_models import MODELS

RESULTS = Path(__file__).parent / "results"


def ready(problem, method):
    """Return a warmed-up step and the clipped gradient it ends with; or why it cannot be."""
    mine = copy.deepcopy(problem)
    try:
        step = METHODS[method](mine)
        step()
        step()
        grads = None if method in NOT_CLIPPED else [q.grad.detach().clone() for q in mine.model.parameters()]
    except ImportError as error:
        return None, f"not installed: {error.name}", None
    except Exception as error:
        return None, f"cannot: {type(error).__name__}: {str(error).splitlines()[0][:160]}", None
    return step, None, grads


def gap(a, b):
    """Return how far one gradient is from another, relative to the latter."""
    far = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return (far / sum(float(y.double().square().sum()) for y in b)) ** 0.5


def timed(problem, methods, seconds):
    rows, steps, grads = {}, {}, {}
    for method in methods:
        step, reason, grad = ready(problem, method)
        if step is None:
            rows[method] = {"refused": reason}
            continue
        steps[method], grads[method] = step, grad
    truth = grads.get("torch.func") or grads.get("bridle")
    times = {method: [] for method in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 3:
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            times[method].append(time.perf_counter() - start)
    for method in steps:
        ratios = sorted(t / p for t, p in zip(times[method], times["plain"], strict=True))
        quarter = len(ratios) // 4
        rows[method] = {
            "ratio": round(statistics.median(ratios), 3),
            "middle_half": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
            "milliseconds": round(1e3 * statistics.median(times[method]), 2),
            "rounds": len(ratios),
        }
        if grads[method] is not None and truth is not None:
            rows[method]["gradient_error"] = float(f"{gap(grads[method], truth):.1e}")
    return rows


def peak_memory(model, method):
    """Return by how many MB three steps make a fresh process grow."""
    command = [sys.executable, __file__, "--memory", model, method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def measure_memory(model, method):
    torch.manual_seed(0)
    problem = MODELS[model]()
    step = METHODS[method](problem)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def environment():
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "processor": next(
            (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
            "",
        ),
        "background_threads": threading.active_count(),
    }


def show(name, rows):
    print(f"\n{name}")
    for method, row in rows.items():
        if "refused" in row:
            print(f"  {method:18} {row['refused']}")
            continue
        memory = f"{row['megabytes']:8.0f} MB" if row.get("megabytes") is not None else ""
        low, high = row["middle_half"]
        error = f"  error {row['gradient_error']:.0e}" if "gradient_error" in row else ""
        print(f"  {method:18} {row['ratio']:7.2f}x ({low:.2f}-{high:.2f}) {row['milliseconds']:9.1f} ms{memory}{error}")


def save(name, content):
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"persample-{name}.json"
    path.write_text(json.dumps({"environment": environment(), **content}, indent=1) + "\n")


def batches(model, seconds):
    """Measure how the cost of plain and clipped steps grows with the batch."""
    table = {}
    for batch in (8, 32, 128, 512):
        torch.manual_seed(0)
        rows = timed(MODELS[model](batch), ["plain", "bridle"], seconds / 4)
        table[batch] = rows
        show(f"{model}, batch {batch}", rows)
    save(f"batches-{model}", {"batches": table})


def main():
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batches", action="store_true", help="measure growth with the batch instead")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        return measure_memory(*options.memory)
    for name in options.models:
        if options.batches:
            batches(name, options.seconds)
            continue
        torch.manual_seed(0)
        rows = timed(MODELS[name](), list(METHODS), options.seconds)
        for method, row in rows.items():
            if "ratio" in row and not options.no_memory:
                row["megabytes"] = peak_memory(name, method)
        show(name, rows)
        save(name, {"model": name, "methods": rows})
    return None


if __name__ == "__main__":
    main()
