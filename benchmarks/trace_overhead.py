"""Cost of `trace`, `replay` and `detect_nonfinite`, against torch's plain pass and torch's own anomaly mode.

Each number is a ratio within one round of CPU time on one thread, which a busy machine disturbs least: forward
and backward together for `detect_nonfinite`, which may slow the forward pass; backward alone for `trace` and
`replay`, which do not touch it. The order of the contenders rotates. What `detect_nonfinite` keeps alive until the
loss is dropped is counted in bytes saved by the graph.

    python benchmarks/trace_overhead.py      writes results/trace_overhead.json
"""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradrein
import side_by_side
from gradrein import graph

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


def backwards(model: nn.Module) -> dict[str, Callable[[Tensor], object]]:
    """Return the contenders whose backward alone is timed."""
    parameters = list(model.parameters())
    return {
        "plain": Tensor.backward,
        "trace": functools.partial(gradrein.trace, model=model),
        "replay": lambda value: gradrein.autograd.replay(value, parameters),
    }


def steps(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Callable[[], object]]:
    """Return the contenders whose forward and backward are timed together."""

    def ours() -> None:
        with gradrein.detect_nonfinite(model):
            loss().backward()

    def theirs() -> None:
        with torch.autograd.detect_anomaly():
            loss().backward()

    return {"plain": lambda: loss().backward(), "gradrein.detect_nonfinite": ours, "torch.detect_anomaly": theirs}


def seconds(
    contenders: dict[str, Callable[..., object]], before: Callable[[], tuple[Tensor, ...]], rounds: int
) -> dict[str, list[float]]:
    """Return the CPU time of each contender in each round; `before` makes its arguments, untimed."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-3, rounds):  # three rounds to warm up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            arguments = before()
            started = time.process_time()
            contenders[name](*arguments)
            taken = time.process_time() - started
            del arguments
            if turn >= 0:
                times[name].append(taken)
    return times


def compare(model: nn.Module, loss: Callable[[], Tensor], rounds: int) -> dict[str, object]:
    """Return the ratio of each way to the plain one."""

    def clean() -> tuple[Tensor, ...]:
        model.zero_grad()
        return ()

    backward = seconds(backwards(model), lambda: (*clean(), loss()), rounds)
    step = seconds(steps(model, loss), clean, rounds)
    found: dict[str, object] = {"plain backward, ms": round(sorted(backward["plain"])[rounds // 2] * 1e3, 2)}
    for times in (backward, step):
        plain = times.pop("plain")
        found |= {name: side_by_side.ratio(taken, plain) for name, taken in times.items()}
    return found


def kept_bytes(loss: Callable[[], Tensor]) -> int:
    """Return the bytes that a kept graph saves, parameters and inputs not counted."""
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
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name, build in CASES.items():
        model, loss = build()
        row: dict[str, object] = {"case": name, "nodes": len(graph.read(loss()).nodes)}
        row |= compare(model, loss, rounds=15)
        row["kept by detect_nonfinite, MB"] = round(kept_bytes(loss) / 1e6, 2)
        rows.append(row)
        print(name, f"({row['nodes']} nodes, plain backward {row['plain backward, ms']} ms)")
        for key, value in row.items():
            if isinstance(value, dict):
                print(f"  {key:24} {side_by_side.show(value)}")
    side_by_side.save("trace_overhead", (__doc__ or "").split("\n\n")[1], rows)


if __name__ == "__main__":
    main()
