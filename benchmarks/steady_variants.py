"""Thirty variants of one story: a weighted loss raised to a power, train and test loss printed.

python benchmarks/steady_variants.py

Three data sets of scikit-learn, powers 2 to 4, three optimizers, and three more with small batches. Each is trained as
it is and watched, with eight simple alternatives, and with the change that its report advises first, watched again.
Writes benchmarks/results/steady-variants.json.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

import gradrein
from gradrein.watch import Report, read_report
from gradrein.watch.analysis.advice import TRY
from gradrein.watch.analysis.signs import LR_SCALE
from gradrein.watch.command.try_script import candidates

sys.path.insert(0, str(Path(__file__).parent / "random_runs"))
from judge import EIGHT, best_of_eight, truth_of_seed
from run import WAYS

RESULTS = Path(__file__).parent / "results" / "steady-variants.json"
EPOCHS = 30
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def variants() -> list[dict[str, Any]]:
    """Return what differs between the variants."""
    names = ("digits", "breast_cancer", "diabetes")
    grid = [{"data": d, "power": p, "optimizer": o, "batch": 32} for d in names for p in (2, 3, 4) for o in OPTIMIZERS]
    return [*grid, *({"data": d, "power": 3, "optimizer": "SGD", "batch": 8} for d in names)]


def load(name: str) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor], int]:
    """Return inputs, targets and weights to train on and to test on, and how many outputs a model has."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / (x.std(0) + 1e-3), dtype=torch.float32)
    outputs = 1 if name == "diabetes" else int(y.max()) + 1
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32) if outputs == 1 else torch.tensor(y)
    rare = y > 1 if outputs == 1 else y >= outputs - max(1, outputs // 5)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows, weight = (order[: 3 * len(x) // 4], order[3 * len(x) // 4 :]), 1 + 4.0 * rare
    (train, test) = ((x[at], y[at], weight[at]) for at in rows)
    return train, test, outputs


def train(
    variant: dict[str, Any], clip: float | str | None, scale: float, say: bool
) -> tuple[list[float], list[float]]:
    """Train, and print as a script does. Return the test loss of each epoch and the gradient norms."""
    torch.manual_seed(0)
    (x, y, w), held, outputs = load(variant["data"])
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = OPTIMIZERS[variant["optimizer"]](model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= scale
    if clip is not None and not say:
        gradrein.Clipper(optimizer, clip if clip == "auto" else gradrein.by_norm(clip), nonfinite="skip")
    tests, norms = [], []
    for epoch in range(EPOCHS):
        losses = []
        for rows in torch.randperm(len(x)).split(variant["batch"]):
            loss = loss_of(model(x[rows]), y[rows], w[rows], variant["power"])
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            tests.append(loss_of(model(held[0]), *held[1:], variant["power"]).item())
        if say:
            print(f"epoch {epoch} train {fmean(losses):.5g} test {tests[-1]:.5g}")
    return tests, norms


def loss_of(output: Tensor, y: Tensor, weight: Tensor, power: float) -> Tensor:
    """Return the weighted loss, each term raised to the power."""
    each = (output.squeeze(1) - y).abs() if y.is_floating_point() else F.cross_entropy(output, y, reduction="none")
    return (weight * each**power).mean()


def watched(variant: dict[str, Any], options: str, folder: Path) -> tuple[list[float], list[float], Report]:
    """Train under a monitor, with the options of `gradrein watch` that a report advises."""
    words = options.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    record = folder / f"{len(list(folder.iterdir()))}.jsonl"
    with gradrein.Monitor(record=record, clip=given.get("--clip")) as monitor:
        if "--lr-scale" in given:
            monitor.note(LR_SCALE, factor=given["--lr-scale"])
        tests, norms = train(variant, None, float(given.get("--lr-scale", 1)), say=True)
    return tests, norms, read_report(record)


def measure(variant: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a variant shows."""
    tests, norms, report = watched(variant, "", folder)
    usual = median([n for n in norms if math.isfinite(n)])
    ends = {}
    for name in EIGHT:
        clip, scale = WAYS[name]
        ends[name] = _end(train(variant, clip if clip is None else clip * usual, scale, say=False)[0])
    found = {"variant": variant, "base": _end(tests), "ways": ends, "findings": [f.name for f in report.findings]}
    found |= {"truth": truth_of_seed(found), "read": report.run.test is not None, "curve": [_short(v) for v in tests]}
    if report.advice.actions:
        options = report.advice.actions[0].try_with
        trials = candidates(report) if options == TRY else [options]
        after = [watched(variant, trial, folder) for trial in trials]
        tests, _, then = min(
            after, key=lambda one: math.inf if (end := _end(one[0])) is None else end
        )  # which it keeps
        found |= {"advised": options, "advised end": _end(tests), "findings after": [f.name for f in then.findings]}
        found["curve after"] = [_short(v) for v in tests]
    return found


def _end(tests: list[float]) -> float | None:
    mean = fmean(tests[-EPOCHS // 10 :])
    return _short(mean) if math.isfinite(mean) else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(variant, Path(folder)) for variant in variants()]
    needy = [one for one in found if one["truth"] == "help"]
    after = [one for one in found if "findings after" in one]
    table = {
        "variants": len(found),
        "need help": len(needy),
        "need help and are heard": sum(bool(one["findings"]) for one in needy),
        "fine": sum(one["truth"] == "fine" for one in found),
        "fine and left alone": sum(one["truth"] == "fine" and not one["findings"] for one in found),
        "advised": len(after),
        "advised to measure with --try": sum(one["advised"] == TRY for one in after),
        "no finding after the advised change": sum(not one["findings after"] for one in after),
        "advised end over the best of eight, median": median(_over(one) for one in needy if "advised" in one),
    }
    RESULTS.write_text(json.dumps({"table": table, "variants": found}, separators=(",", ":")) + "\n")
    print(json.dumps(table, indent=1), file=sys.stderr)


def _over(one: dict[str, Any]) -> float:
    end = one["advised end"]
    return math.inf if end is None else _short(end / best_of_eight(one))


if __name__ == "__main__":
    main()
