"""Launches and host reads of each call, on the simulated CUDA device of the tests: no GPU is needed, a compiler is.

    python benchmarks/launches.py

Clipping takes the gradients of a small MLP (6 tensors) or 300 of 32 x 32, in float32 and bfloat16, torch's own function
beside the drop-ins; a policy with a memory is counted in its third step, a per-sample clipped step in its second, with
a plain step beside it. What a simulation cannot show: asynchrony, bandwidth, the kernels' own rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["GRADREIN_DEVICE"] = "cuda"
TESTS = Path(__file__).parents[1] / "tests" / "devices"
sys.path.insert(0, str(TESTS))

from simulated import counted  # noqa: I001, E402  # before torch is imported

import torch  # noqa: E402
from calls import CLIPPING, DROP_INS, LEARNING, MODELS, clipped_step, made, plain_step, with_gradients  # noqa: E402

import gradrein  # noqa: E402
from side_by_side import save  # noqa: E402

KINDS = [(count, dtype) for count in (6, 300) for dtype in (torch.float32, torch.bfloat16)]


def count(call: Callable[..., object], *args: object, steps: int = 1) -> list[int]:
    """Return [launches, host reads] of the last of some steps."""
    for _ in range(steps):
        with counted() as counts:
            call(*args)
    return [counts.launches.total(), counts.reads.total()]


def clipping() -> dict[str, dict[str, list[int]]]:
    """Return a row for each call, with a column for each number of tensors and type."""
    rows: dict[str, dict[str, list[int]]] = {}
    for n, dtype in KINDS:
        column = f"{n} {str(dtype).removeprefix('torch.')}"
        for name, call in DROP_INS.items():
            for module, whose in ((torch.nn.utils, "torch"), (gradrein, "gradrein")):
                rows.setdefault(f"{name} ({whose})", {})[column] = count(call, module, with_gradients(n, dtype))
        for name, (call, *_) in CLIPPING.items():
            rows.setdefault(name, {})[column] = count(call, with_gradients(n, dtype))
        for make in LEARNING:
            step = partial(gradrein.clip_, with_gradients(n, dtype), make(), nonfinite="propagate")
            rows.setdefault(make.__name__, {})[column] = count(step, steps=3)
    return rows


def per_sample() -> dict[str, dict[str, list[int]]]:
    """Return for each model a plain step and a clipped one."""
    rows = {}
    for name in MODELS:
        step = made(name)
        plain = count(plain_step, *step)
        step[0].zero_grad()
        clipped_step(*step)
        step[0].zero_grad()
        rows[name] = {"plain": plain, "clipped": count(clipped_step, *step)}
    return rows


def monitored() -> dict[str, dict[str, list[int]]]:
    """Return one step of SGD on the MLP: plain, and recorded, where nothing is read but at the flush."""
    (model, x, y), rows = made("MLP"), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        plain_step(model, x, y)
        optimizer.step()

    plain = count(step, steps=2)
    for name, options in {"Monitor": {}, "Monitor, norms by layer": {"norms": "*"}}.items():
        with gradrein.Monitor(model, optimizer, **options):
            rows[name] = {"plain": plain, "clipped": count(step, steps=3)}
    return rows


def show(title: str, rows: dict[str, dict[str, list[int]]]) -> None:
    """Print launches / host reads."""
    columns = list(next(iter(rows.values())))
    width = max(map(len, rows)) + 2
    print(f"\n{title:<{width}}" + "".join(f"{column:>14}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<{width}}" + "".join(f"{row[c][0]:>10} / {row[c][1]}" for c in columns))


if __name__ == "__main__":
    tables = {"clipping": clipping(), "per sample": {**per_sample(), **monitored()}}
    for title, rows in tables.items():
        show(title, rows)
    flat = [{"table": title, "call": call, **row} for title, rows in tables.items() for call, row in rows.items()]
    save("launches", __doc__ or "", flat)
