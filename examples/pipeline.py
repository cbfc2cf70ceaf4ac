"""Two pipeline stages that share an embedding, clipped by one norm over both.

    torchrun --nproc-per-node 2 examples/pipeline.py

Without torchrun it starts two processes itself. The schedule is the plainest there is: one batch forward, then
backward. The first stage embeds, the last uses the same matrix as its head, and both add up its gradient.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import gradrein

WORDS, WIDTH, ROWS = 31, 16, 8


class Stage(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)  # the same on both
        torch.manual_seed(1 + rank)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def one_process(ids: torch.Tensor) -> torch.Tensor:
    """The norm that a single process finds, with both stages in it."""
    first, last = Stage(0), Stage(1)
    logits = last.layers(first.layers(first.embed(ids))) @ first.embed.weight.T
    F.cross_entropy(logits, ids).backward()
    return gradrein.get_total_norm([p.grad for p in [*first.parameters(), *last.layers.parameters()]])


def train(rank: int) -> None:
    torch.set_num_threads(1)
    stage, ids = Stage(rank), torch.arange(ROWS)
    if rank == 0:
        sent = stage.layers(stage.embed(ids))
        dist.send(sent.detach(), 1)
        back = torch.empty(ROWS, WIDTH)
        dist.recv(back, 1)
        sent.backward(back)
    else:
        got = torch.empty(ROWS, WIDTH, requires_grad=True)
        dist.recv(got.data, 0)
        F.cross_entropy(stage.layers(got) @ stage.embed.weight.T, ids).backward()
        dist.send(got.grad, 0)
    dist.all_reduce(stage.embed.weight.grad)  # both ends of the shared matrix

    stages = dist.group.WORLD
    placement = {"embed.*": None, "*": gradrein.distributed.Disjoint(stages)}  # None: the same on every rank
    report = gradrein.clip_(stage, gradrein.by_norm(0.1), placement=placement)

    expected = one_process(ids).item()
    assert abs(report.norm - expected) < 1e-4 * expected, (report.norm, expected)
    print(f"stage {rank}: norm of both {report.norm:.5f} (one process: {expected:.5f}), after {report.norm_after:.5f}")


def start(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank())
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(start, (os.path.join(folder, "store"),), nprocs=2, start_method="fork")
