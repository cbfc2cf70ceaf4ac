"""What watching costs: a training step of a small GPT with and without `gradrein.Monitor`, side by side.

Two equal models take turns, step by step, so that what else the machine does falls on both alike; the listener is
attached and detached outside of the timed stretch. Reported: the median of the ratios of neighbouring steps, with
quartiles, and that of the processor time they took, which other programs disturb
less. Run on a quiet machine: python benchmarks/watch.py

Of two ranks, as rank 0 sees it: torchrun --nproc-per-node 2 benchmarks/watch.py
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradrein
from gradrein._kernels import BACKENDS
from gradrein.watch.record import hooks

WIDTH, LAYERS, TIME, BATCH, VOCABULARY, HEADS = 256, 4, 128, 16, 1024, 8
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
PAIRS, WARMUP = 24 if RANKS == 1 else 16, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place.weight)))


def step(model, optimizer, tokens):
    optimizer.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def measure(wrap=lambda model: model, **options):
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, TIME))
    plain, watched = wrap(GPT()), wrap(GPT())
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=3e-4)) for m in (plain, watched)]
    times, work = ([], []), ([], [])
    with tempfile.TemporaryDirectory() as folder:
        monitor = gradrein.Monitor(watched, pairs[1][1], record=Path(folder) / "run.jsonl", **options)
        with monitor:
            hooks.unsubscribe(monitor._recorder)
            for i in range(PAIRS + WARMUP):
                for which in (0, 1) if i % 2 else (1, 0):
                    if which:
                        hooks.subscribe(monitor._recorder)
                    begin, worked = time.perf_counter(), time.process_time()
                    step(*pairs[which], tokens)
                    spent, worked = time.perf_counter() - begin, time.process_time() - worked
                    hooks.unsubscribe(monitor._recorder)
                    if i >= WARMUP:
                        times[which].append(spent)
                        work[which].append(worked)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    quarter = statistics.quantiles(ratios, n=4)
    return {
        "options": options if RANKS == 1 else {**options, "wrapped by": wrap.__name__},
        "plain_ms": round(1e3 * statistics.median(times[0]), 2),
        "watched_ms": round(1e3 * statistics.median(times[1]), 2),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quarter[0], 4), round(quarter[2], 4)],
        "ratio_of_processor_time": round(statistics.median(b / a for a, b in zip(*work, strict=True)), 4),
        "steps": PAIRS,
    }


def runs():
    if RANKS > 1:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        return [measure(DistributedDataParallel), measure(sharded)]
    return [measure(), measure(every=10)] if "--quick" not in sys.argv else [measure()]


def main():
    result = {
        "what": f"GPT width {WIDTH}, {LAYERS} layers, T={TIME}, batch {BATCH}, AdamW; one step watched over one not",
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load": [round(v, 1) for v in os.getloadavg()],  # a quiet machine is one below its cores
            "kernels": BACKENDS["cpu"] is not None,
        },
        "ranks": RANKS,
        "runs": runs(),
    }
    text = json.dumps(result, indent=1)
    if RANKS > 1:
        dist.destroy_process_group()
        if os.environ["RANK"] != "0":
            return
    print(text)
    if "--quick" not in sys.argv:
        name = "watch.json" if RANKS == 1 else "watch-ranks.json"
        Path(__file__).with_name("results").joinpath(name).write_text(text + "\n")


if __name__ == "__main__":
    main()
