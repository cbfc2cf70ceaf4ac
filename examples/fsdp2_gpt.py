"""A small GPT under FSDP2 (`fully_shard`), clipped by one call; the norm is the one that a single process finds.

    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py

Without torchrun it starts two processes itself.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gradrein

WORDS, WIDTH, LENGTH = 61, 24, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.first(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.second(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.last(x) @ self.words.weight.T  # the embedding is also the head


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(rank: int, size: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alone, model = GPT(), GPT()
    model.load_state_dict(alone.state_dict())
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, model)]
    for step in range(5):
        ids = torch.randint(WORDS, (4 * size, LENGTH))  # every process draws the same, and trains on its share
        loss_of(alone, ids).backward()
        loss_of(model, ids.chunk(size)[rank]).backward()
        expected = gradrein.clip_grad_norm_(alone.parameters(), 1.0)
        report = gradrein.clip_(model, gradrein.by_norm(1.0))
        assert abs(report.norm - expected.item()) < 1e-4 * expected.item(), (report.norm, expected)
        if rank == 0:
            worst = ", ".join(f"{name} {norm:.3f}" for name, norm in report.worst(2))
            print(f"step {step}: norm {report.norm:.4f} (one process: {expected:.4f}), largest {worst}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def start(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    train(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(start, (2, os.path.join(folder, "store")), nprocs=2, start_method="fork")
