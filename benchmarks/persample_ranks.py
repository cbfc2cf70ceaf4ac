"""A step of DDP and of FSDP2 whose gradient is clipped per sample, against the same step with backward.

    python benchmarks/persample_ranks.py [--rounds N]

Two gloo processes on one machine, one thread and a batch each. A step is forward, gradient and the sum over ranks;
alone it is the same without the sum. In each round every contender runs once on both ranks, in an order that rotates,
after a barrier; ratios are taken within a round, on rank 0.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrein
import persample_models
import side_by_side

RANKS = 2
METHOD = __doc__ or ""


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if isinstance(module, persample_models.Attention):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def contenders(problem: persample_models.Problem) -> dict[str, Callable[[], object]]:
    def backward(model: nn.Module) -> None:
        model.zero_grad()
        problem.losses(model(problem.x), problem.y).mean().backward()

    def clipped(model: nn.Module) -> None:
        model.zero_grad()
        losses = problem.losses(model(problem.x), problem.y)
        gradrein.per_sample(losses, model, retain_graph=False).clip_(1.0)

    plain, ddp, fsdp = (copy.deepcopy(problem.model) for _ in range(3))
    models: dict[str, Any] = {"alone": plain, "ddp": DistributedDataParallel(ddp), "fsdp": sharded(fsdp)}
    found: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        found[name] = lambda model=model: backward(model)
        found[f"{name}, clipped"] = lambda model=model: clipped(model)
    return found


def measure(rank: int, store: str, rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    rows: list[dict[str, object]] = []
    for name, make, batch in (("MLP", persample_models.mlp, 128), ("GPT", persample_models.gpt, 4)):
        torch.manual_seed(0)
        times = side_by_side.interleave(contenders(make(batch)), rounds=rounds, before=dist.barrier, inner=1)
        row: dict[str, object] = {"case": name, "batch of each rank": batch}
        for how in ("alone", "ddp", "fsdp"):
            row[f"{how}: clipped takes longer by"] = side_by_side.ratio(times[f"{how}, clipped"], times[how])
        row["milliseconds"] = {who: round(1e3 * sorted(t)[len(t) // 2], 1) for who, t in times.items()}
        rows.append(row)
        if rank == 0:
            print(row, flush=True)
    if rank == 0:
        side_by_side.save("persample-ranks", METHOD, rows)
    dist.barrier()  # or one leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (os.path.join(folder, "store"), parser.parse_args().rounds), nprocs=RANKS)
