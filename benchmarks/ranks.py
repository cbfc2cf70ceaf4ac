"""Clipping gradients that lie on four ranks: gradrein against torch's DTensor path.

    python benchmarks/ranks.py [--rounds N]

Four gloo processes on one machine, one thread each. In each round every contender runs once on all ranks, in an order
that rotates, from the same gradients and after a barrier; ratios are taken within a round, on rank 0: of the time that
passed, and of the processor time of that rank, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import gradrein
import side_by_side
from gradrein._torch.process_group import messages_sent

RANKS = 4
METHOD = __doc__ or ""


def parameters(mesh: Any, shapes: list[tuple[int, ...]], placements: list[Any]) -> list[torch.nn.Parameter]:
    found = []
    for shape in shapes:
        zeros = torch.zeros(shape)
        p = torch.nn.Parameter(distribute_tensor(zeros, mesh, placements, src_data_rank=None))
        p.grad = distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None)
        found.append(p)
    return found


def gpt2() -> list[tuple[int, ...]]:
    block = [
        (768,),
        (768,),
        (2304, 768),
        (2304,),
        (768, 768),
        (768,),
        (768,),
        (768,),
        (3072, 768),
        (3072,),
        (768, 3072),
    ]
    return block * 2 + [(768,)] * 2


def cases() -> dict[str, tuple[list[torch.nn.Parameter], float]]:
    line = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    small = [(64, 64)] * 800
    return {
        "800 sharded, under the limit": (parameters(line, small, [Shard(0)]), 1e9),
        "800 sharded, clipped": (parameters(line, small, [Shard(0)]), 1.0),
        "3200 sharded, clipped": (parameters(line, small * 4, [Shard(0)]), 1.0),
        "100 sharded, clipped": (parameters(line, small[:100], [Shard(0)]), 1.0),
        "800 on a 2 x 2 mesh, clipped": (parameters(grid, small, [Shard(0), Shard(1)]), 1.0),
        "two blocks of GPT-2, clipped": (parameters(line, gpt2(), [Shard(0)]), 1.0),
    }


def collectives(run: Callable[[], object]) -> int:
    before = messages_sent()
    run()
    return sum(count - before[name] for name, count in messages_sent().items())


def with_cpu_time(call: Callable[[], object], seconds: list[float]) -> Callable[[], None]:
    """Also note the processor time of a call on this rank: on a busy machine, what is left to compare."""

    def run() -> None:
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)

    return run


def measure(rank: int, store: str, rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    rows: list[dict[str, object]] = []
    for name, (listed, limit) in cases().items():
        kept = [p.grad.to_local().clone() for p in listed]

        def before(listed: Any = listed, kept: Any = kept) -> None:
            for p, values in zip(listed, kept, strict=True):
                p.grad.to_local().copy_(values)
            dist.barrier()

        run = {
            "torch": lambda listed=listed, limit=limit: torch.nn.utils.clip_grad_norm_(listed, limit),
            "clip_grad_norm_": lambda listed=listed, limit=limit: gradrein.clip_grad_norm_(listed, limit),
            "clip_": lambda listed=listed, limit=limit: gradrein.clip_(listed, gradrein.by_norm(limit)),
        }
        counts = {who: collectives(call) for who, call in run.items()}
        work: dict[str, list[float]] = {who: [] for who in run}
        counted = {who: with_cpu_time(call, work[who]) for who, call in run.items()}
        times = side_by_side.interleave(counted, rounds=rounds, before=before, inner=1)
        work = {who: seconds[-rounds:] for who, seconds in work.items()}
        row: dict[str, object] = {"case": name, "parameters": len(listed), "collectives": counts}
        for who in ("clip_grad_norm_", "clip_"):
            row[f"{who} is faster by"] = side_by_side.ratio(times["torch"], times[who])
            row[f"{who} needs less processor time by"] = side_by_side.ratio(work["torch"], work[who])
        row["milliseconds"] = {who: round(1e3 * sorted(t)[len(t) // 2], 3) for who, t in times.items()}
        rows.append(row)
        if rank == 0:
            for who in ("clip_grad_norm_", "clip_"):
                wall, cpu = (
                    side_by_side.show(row[f"{who} {what} by"]) for what in ("is faster", "needs less processor time")
                )
                print(f"{name:36} {who:16} {wall:20} processor time {cpu:20} collectives {counts}", flush=True)
    if rank == 0:
        side_by_side.save("ranks", METHOD, rows)
    dist.barrier()  # or one leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (os.path.join(folder, "store"), parser.parse_args().rounds), nprocs=RANKS)
