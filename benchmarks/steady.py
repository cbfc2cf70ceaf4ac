"""Does clipping stop the swinging? Ten seeds of every way to clip, on three tasks that swing and one that does not.

    python benchmarks/steady.py                     all of it, to benchmarks/results/steady.json
    python benchmarks/steady.py --tasks powered --seeds 3 --out /dev/null
    python benchmarks/steady.py --table             the recorded results as the table of docs/adaptive.md

Needs scikit-learn for the data of one task. Two processes of one thread each; nothing here is a timing.

For every run the test loss is looked at fifty times or so:
- swing: the mean of log10(test loss / lowest test loss so far). 0 for a curve that only falls, 1 for one that
  stands ten times above its best on average;
- final: the mean of the last three test losses;
- diverged: whether that is worse than before the first step.
A test loss that is not finite, or above ten times that at the start, counts as ten times that at the start.

How far `auto` is behind the best fixed threshold is the mean difference of the final test loss over the same seeds
(negative: it is ahead), next to the standard error of that difference and to the spread of the best threshold over
its seeds. The best threshold is chosen by looking at these very results, which no one can do beforehand.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path

import torch

import bridle
from steady_tasks import TASKS

SWEEP = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
# What `--clip auto` stands for: a policy that has seen nothing of the task beforehand.
AUTO = "auto (ByOvershoot)"
POLICIES: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    **{f"by_value({v})": lambda v=v: bridle.by_value(v) for v in (0.003, 0.03, 0.3)},
    **{f"by_norm({v})": lambda v=v: bridle.by_norm(v) for v in SWEEP},
    "ByZScore": bridle.policies.ByZScore,
    "ByQuantile": bridle.policies.ByQuantile,
    "ByTrackedQuantile": bridle.policies.ByTrackedQuantile,
    "ByMedian": bridle.policies.ByMedian,
    "ByRunningNorm": bridle.policies.ByRunningNorm,
    "ByStableNorm": bridle.policies.ByStableNorm,
    "ByElementSpike": bridle.policies.ByElementSpike,
    "SkipSpikes": bridle.policies.SkipSpikes,
    AUTO: bridle.policies.ByOvershoot,
}


def run(job: tuple[str, str, int]) -> dict[str, float]:
    """One run: task, policy, seed."""
    task_name, policy_name, seed = job
    torch.set_num_threads(1)
    task, policy = TASKS[task_name](seed), POLICIES[policy_name]()
    if policy is not None:
        bridle.Clipper(task.optimizer, policy, nonfinite="skip")
    first = task.test_loss()
    best, above, last = first, [], []
    for step in range(1, task.steps + 1):
        task.optimizer.zero_grad()
        loss = task.step_loss()
        if policy_name == "SkipSpikes":
            policy.see(loss)
        loss.backward()
        task.optimizer.step()
        if step % task.every == 0:
            found = task.test_loss()
            found = min(found, 10 * first) if math.isfinite(found) else 10 * first
            best = min(best, found)
            above.append(math.log10(found / best))
            last = [*last[-2:], found]
    final = statistics.fmean(last)
    return {"swing": statistics.fmean(above), "final": final, "diverged": float(final > first)}


def summary(runs: list[dict[str, float]]) -> dict[str, object]:
    """Mean and spread over the seeds, with the runs themselves."""
    found: dict[str, object] = {}
    for key in ("swing", "final"):
        values = [r[key] for r in runs]
        found[key] = {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0}
    return {**found, "diverged": statistics.fmean(r["diverged"] for r in runs), "runs": runs}


def verdict(results: dict[str, dict]) -> dict[str, object]:
    """Auto against no clipping, and against the fixed threshold that turned out best."""
    fixed = {name: r for name, r in results.items() if name.startswith("by_norm(")}
    best = min(fixed, key=lambda name: fixed[name]["final"]["mean"])
    auto, none = results[AUTO], results["none"]
    pairs = zip(auto["runs"], fixed[best]["runs"], strict=True)
    behind = [a["final"] - b["final"] for a, b in pairs]
    error = statistics.stdev(behind) / math.sqrt(len(behind)) if len(behind) > 1 else math.inf
    return {
        "best_fixed": best,
        "beats_none_on_swing": auto["swing"]["mean"] < none["swing"]["mean"],
        "beats_none_on_final": auto["final"]["mean"] < none["final"]["mean"],
        "behind_best_fixed": statistics.fmean(behind),
        "standard_error": error,
        "spread_of_best_fixed": fixed[best]["final"]["sd"],
        "within_spread_of_seeds": statistics.fmean(behind) <= fixed[best]["final"]["sd"],
        "within_two_standard_errors": statistics.fmean(behind) <= 2 * error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "steady.json")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())["tasks"]))
        return
    tasks: dict[str, dict] = {}
    with Pool(2) as pool:
        for task in options.tasks:
            # Where nothing swings, only what a person would compare is of interest.
            names = [n for n in POLICIES if task != "calm" or n in ("none", AUTO, "by_norm(0.1)", "by_norm(1.0)")]
            jobs = [(task, name, seed) for name in names for seed in range(options.seeds)]
            runs = pool.map(run, jobs, chunksize=1)
            results = {name: summary([r for j, r in zip(jobs, runs, strict=True) if j[1] == name]) for name in names}
            tasks[task] = {"about": TASKS[task].__doc__, "results": results, "auto": verdict(results)}
            show(task, tasks[task])
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bridle": bridle.__version__,
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "seeds": options.seeds,
    }
    options.out.write_text(json.dumps({"environment": environment, "tasks": tasks}, indent=1) + "\n")


def table(tasks: dict[str, dict]) -> str:
    """The means as a table in Markdown: swing and final test loss, with the share of seeds that diverged if any."""
    lines = ["| policy | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for name in POLICIES:
        cells = []
        for found in tasks.values():
            r = found["results"].get(name)
            lost = f" ({r['diverged']:.0%} diverged)" if r and r["diverged"] else ""
            cells.append(f"{r['swing']['mean']:.3f}, {r['final']['mean']:.3f}{lost}" if r else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show(task: str, found: dict) -> None:
    """A table for people."""
    print(f"\n{task}: {found['about']}\n{'':22}{'swing':>16}{'final test loss':>20}{'diverged':>10}")
    for name, r in found["results"].items():
        swing, final = (f"{r[key]['mean']:.3f} ± {r[key]['sd']:.3f}" for key in ("swing", "final"))
        print(f"{name:22}{swing:>16}{final:>20}{r['diverged']:>10.0%}")
    print(json.dumps(found["auto"]), flush=True)


if __name__ == "__main__":
    main()
