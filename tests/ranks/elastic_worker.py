"""What `torchrun` starts, and starts again after one rank has ended: steps clipped by a policy that learns.

torchrun ... elastic_worker.py FOLDER STEP: rank 1 ends by itself in STEP, unless it has gone on from what was saved.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import fully_shard
from torch.distributed.device_mesh import init_device_mesh

import gradrein

STEPS = 6


def build():
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(6, 6), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1e-4, momentum=0.9)
    return model, optimizer, gradrein.Clipper(optimizer, gradrein.policies.ByMedian(window=4))


def take_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=generator) * 2**step).square().mean().backward()
    optimizer.step()


def state_of(model, optimizer, clipper, step):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "clipper": clipper.state_dict(),
        "step": torch.tensor(step),
    }


def train(folder, ends=0):
    """Go on from what was saved, if anything was, to the last step. Return after which step, and what came out."""
    model, optimizer, clipper = build()
    saved, done = os.path.join(folder, "saved"), 0
    if os.path.exists(saved):
        take_step(model, optimizer, 0)  # so that there is something to fill
        state = state_of(model, optimizer, clipper, 0)
        dcp.load(state, checkpoint_id=saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        clipper.load_state_dict(state["clipper"])
        done = int(state["step"])
    for step in range(done + 1, STEPS + 1):
        if step == ends and dist.get_rank() == 1 and not done:
            os._exit(3)
        take_step(model, optimizer, step)
        if ends:
            dcp.save(state_of(model, optimizer, clipper, step), checkpoint_id=saved)
    whole = torch.cat([p.full_tensor().flatten() for p in model.parameters()]).tolist()
    return done, [value.hex() for value in [clipper.report.norm, *whole]]


def main():
    folder = sys.argv[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A store for each attempt: in that of the agent gloo finds the addresses of processes that have ended.
    store = dist.FileStore(os.path.join(folder, "store" + os.environ["TORCHELASTIC_RESTART_COUNT"]), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    done, found = train(folder, int(sys.argv[2]))
    if rank == 0:
        print("ended", done, *found, flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads outlive the process group


if __name__ == "__main__":
    main()
