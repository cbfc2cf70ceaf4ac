"""Cost of norms by layer in a tracker: `Monitor(norms="*")` and `wandb.watch`, both logging to wandb offline.

A transformer with 300 parameters, of 5 million elements, and batches of 256 and of 1,024 tokens: measuring takes the
same time for both. Each turn is ten steps of training, of which every contender logs all or every tenth.
CPU time on one thread, contenders in turns. `wandb.watch` logs a histogram of each gradient, `Monitor` three norms of
each parameter and the record of the run.

    python benchmarks/norms_by_layer.py      needs wandb; writes results/norms_by_layer.json
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ["WANDB_MODE"] = "offline"

import torch
import wandb
from torch import nn

import gradrein
import side_by_side
from gradrein.integrations.wandb import scalars

STEPS = 10
BATCHES = {256: (4, 64), 1024: (8, 128)}
METHOD = "ten steps of a transformer with 300 parameters, logged to wandb offline; CPU time on one thread, interleaved"


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 25, enable_nested_tensor=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def contender(
    watching: Callable[[nn.Module, torch.optim.Optimizer, Any], Any], run: Any, batch: tuple[int, int]
) -> Callable[[], None]:
    model, optimizer = network()
    around = watching(model, optimizer, run)
    x = torch.randn(*batch, 128)

    def steps() -> None:
        with around:
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                run.log({"loss": loss.item()})

    return steps


def by_monitor(**options: Any) -> Callable[..., Any]:
    return lambda model, optimizer, run: gradrein.Monitor(
        model, optimizer, on_step=scalars(run, commit=False), **options
    )


def by_wandb(every: int) -> Callable[..., Any]:
    def watch(model: nn.Module, _: torch.optim.Optimizer, run: Any) -> Any:
        run.watch(model, log="gradients", log_freq=every)
        return nullcontext()

    return watch


CONTENDERS = {
    "plain": lambda *_: nullcontext(),
    "Monitor": by_monitor(),
    "Monitor, norms by layer": by_monitor(norms="*"),
    "Monitor, norms by layer, every 10": by_monitor(norms="*", every=10),
    "wandb.watch": by_wandb(1),
    "wandb.watch, every 10": by_wandb(10),
}


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for tokens, batch in BATCHES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = wandb.init(project="norms", dir=folder)
            made = {name: contender(watching, run, batch) for name, watching in CONTENDERS.items()}
            times = side_by_side.interleave(made, rounds=8, warmup=1, inner=1, clock=time.process_time)
            run.finish()
        for name in CONTENDERS:
            ratio = side_by_side.ratio(times[name], times["plain"])
            print(f"{tokens:>5} tokens  {name:<36}{side_by_side.show(ratio)} of a plain step")
            rows.append({"contender": name, "tokens": tokens, "of a plain step": ratio})
    side_by_side.save("norms_by_layer", METHOD, rows)


if __name__ == "__main__":
    main()
