"""Cost of `gradrein.backward` and `gradrein.grad` against torch's own, when there is no error.

Run: python benchmarks/autograd.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradrein
from side_by_side import interleave, ratio, save, show

METHOD = (
    "CPU seconds, on one thread, of one call on a graph that was just recorded (the forward pass is not timed); "
    "ratio = gradrein / torch within each round, median with quartiles. Wanted: at most 1.03."
)


def mlp(width: int) -> tuple[nn.Module, Tensor]:
    layers = [part for _ in range(20) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, width)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 32, 128)


def calls(model: nn.Module, fresh: Callable[[], Tensor]) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the same call to both, on the output that `fresh` last recorded."""
    parameters = list(model.parameters())

    def batch(out: Tensor) -> Tensor:
        return torch.ones(4, *out.shape)

    return {
        "backward": {
            "torch": lambda: torch.autograd.backward(fresh().sum()),
            "gradrein": lambda: gradrein.backward(fresh().sum()),
        },
        "grad": {
            "torch": lambda: torch.autograd.grad(fresh().sum(), parameters),
            "gradrein": lambda: gradrein.grad(fresh().sum(), parameters),
        },
        "grad, 4 at once": {
            "torch": lambda: torch.autograd.grad(fresh(), parameters, batch(fresh()), is_grads_batched=True),
            "gradrein": lambda: gradrein.grad(fresh(), parameters, batch(fresh()), is_grads_batched=True),
        },
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the front half runs on one: the others would only hide it
    rows: list[dict[str, object]] = []
    cases = {
        "MLP of 20 layers, width 16": (mlp(16), 3000),
        "MLP of 20 layers, width 1024": (mlp(1024), 15),
        "transformer of 4 layers, width 128": (transformer(), 60),
    }
    for name, ((model, x), rounds) in cases.items():
        recorded: list[Tensor] = []

        def forward(model: nn.Module = model, x: Tensor = x, recorded: list[Tensor] = recorded) -> None:
            model.zero_grad()
            recorded[:] = [model(x)]

        for call, contenders in calls(model, lambda recorded=recorded: recorded[0]).items():
            times = interleave(contenders, rounds=rounds, before=forward, inner=1, clock=time.process_time)
            found = ratio(times["gradrein"], times["torch"])
            rows.append({"case": name, "call": call, "gradrein_over_torch": found})
            print(f"{name:36} {call:16} {show(found)}", flush=True)
    save("autograd", METHOD, rows)


if __name__ == "__main__":
    main()
