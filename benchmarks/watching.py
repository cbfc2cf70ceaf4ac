"""What watching a backward pass costs, against torch's plain pass and against torch's own anomaly mode.

Each number is a ratio within one round: forward and backward together for `detect_anomaly`, whose modes may
tax the forward; backward alone for `trace` and `replay`, which do not touch it. What `detect_anomaly` keeps
alive until the loss is dropped is counted in bytes saved by the graph, not timed.

    python benchmarks/watching.py            writes results/watching.json
"""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bridle
import side_by_side
from bridle import graph

Case = tuple[nn.Module, Callable[[], Tensor]]


def transformer(width: int, batch: int, length: int) -> Case:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(batch, length, width)
    return model, lambda: model(x).square().mean()


def cnn() -> Case:
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 64, 10)),
    )
    x = torch.randn(16, 3, 32, 32)
    return model, lambda: model(x).square().mean()


def lstm_cells() -> Case:
    cell = nn.LSTMCell(32, 32)
    x = torch.randn(50, 8, 32)

    def loss() -> Tensor:
        state = (torch.zeros(8, 32), torch.zeros(8, 32))
        for step in x:
            state = cell(step, state)
        return state[0].square().mean()

    return cell, loss


CASES: dict[str, Callable[[], Case]] = {
    "transformer, width 256": lambda: transformer(256, 8, 128),
    "transformer, width 64": lambda: transformer(64, 8, 32),
    "CNN": cnn,
    "LSTMCell, 50 steps": lstm_cells,
}


def backward_ratios(model: nn.Module, loss: Callable[[], Tensor], rounds: int) -> dict[str, object]:
    """Time the backward alone; the forward before it is not part of it."""
    parameters = list(model.parameters())
    passes: dict[str, Callable[[Tensor], object]] = {
        "plain": Tensor.backward,
        "trace": functools.partial(bridle.trace, model=model),
        "trace, norms=False": functools.partial(bridle.trace, model=model, norms=False),
        "replay": lambda value: bridle.autograd.replay(value, parameters),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(rounds + 3):
        names = list(passes)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            model.zero_grad()
            value = loss()
            started = time.perf_counter()
            passes[name](value)
            taken = time.perf_counter() - started
            if turn >= 3:
                seconds[name].append(taken)
    ratios = {name: side_by_side.ratio(times, seconds["plain"]) for name, times in seconds.items()}
    milliseconds = sorted(seconds["plain"])[rounds // 2] * 1e3
    return {"plain backward, ms": round(milliseconds, 2), **{n: r for n, r in ratios.items() if n != "plain"}}


def step_ratios(model: nn.Module, loss: Callable[[], Tensor], rounds: int) -> dict[str, object]:
    """Time forward and backward together."""

    def plain() -> None:
        loss().backward()

    def ours() -> None:
        with bridle.detect_anomaly(model):
            loss().backward()

    def theirs() -> None:
        with torch.autograd.detect_anomaly():
            loss().backward()

    contenders = {"plain": plain, "bridle.detect_anomaly": ours, "torch.detect_anomaly": theirs}
    times = side_by_side.interleave(contenders, rounds=rounds, before=model.zero_grad, inner=1)
    return {name: side_by_side.ratio(times[name], times["plain"]) for name in contenders if name != "plain"}


def kept_bytes(loss: Callable[[], Tensor]) -> int:
    """Return how much saved memory a kept graph holds on to, parameters and inputs not counted."""
    value = loss()
    leaves = {leaf.untyped_storage().data_ptr() for leaf in graph.read(value).leaves}
    storages = {}
    for node in graph.read(value).nodes:
        for entry in graph.saved(node):
            if isinstance(entry.value, Tensor) and entry.value.untyped_storage().data_ptr() not in leaves:
                storages[entry.value.untyped_storage().data_ptr()] = entry.value.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    for name, build in CASES.items():
        model, loss = build()
        row: dict[str, object] = {"case": name, "nodes": len(graph.read(loss()).nodes)}
        row |= backward_ratios(model, loss, rounds=15)
        row |= step_ratios(model, loss, rounds=15)
        row["kept by detect_anomaly, MB"] = round(kept_bytes(loss) / 1e6, 2)
        rows.append(row)
        print(name, f"({row['nodes']} nodes, plain backward {row['plain backward, ms']} ms)")
        for key, value in row.items():
            if isinstance(value, dict):
                print(f"  {key:24} {side_by_side.show(value)}")
    side_by_side.save("watching", (__doc__ or "").split("\n\n")[1], rows)


if __name__ == "__main__":
    main()
