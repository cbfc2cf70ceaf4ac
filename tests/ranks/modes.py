"""What the ranks run: ways of training with `fully_shard`, and what clipping makes of them beside one process."""

import copy

import layouts
import torch
import torch.distributed as dist
from rank_processes import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import gradrein


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.extra = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, extra=True):
        x = self.second(torch.tanh(self.first(x)))
        return self.extra(x) if extra else x


def batches(count):
    """The batches of each rank: [rank][step]."""
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(4, 6, generator=generator) for _ in range(count)] for _ in range(dist.get_world_size())]


def alone(model, steps, extra=lambda rank: True):
    """The mean over ranks of the gradients of one process, added up over steps."""
    every = batches(steps)
    for rank, mine in enumerate(every):
        for x in mine:
            (model(x, extra(rank)).square().mean() / len(every)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(model, grads, digits=5):
    """Clip what is spread; the norm and the gradients must be those of one process."""
    norm = layouts.norm_of([*grads.values()], 2.0)
    found = gradrein.clip_grad_norm_(model, norm / 2)
    layouts.close(found.item(), norm, digits)
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        if name in grads:
            whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            tolerance = 10.0**-digits
            torch.testing.assert_close(whole.to(grads[name]), grads[name] / 2, rtol=10 * tolerance, atol=tolerance)


def sharded(model, **options):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def accumulation():
    """Several backward passes, reduced each time."""
    reference, model = Net(), sharded(Net())
    for x in batches(3)[dist.get_rank()]:
        model(x).square().mean().backward()
    compare(model, alone(reference, 3))


def no_sync():
    """Several backward passes, reduced in the last."""
    reference, model = Net(), sharded(Net())
    mine = batches(3)[dist.get_rank()]
    for step, x in enumerate(mine):
        model.set_requires_gradient_sync(step == len(mine) - 1)
        model(x).square().mean().backward()
    compare(model, alone(reference, 3))


def ddp_no_sync():
    reference, model = Net(), DistributedDataParallel(Net())
    mine = batches(2)[dist.get_rank()]
    with model.no_sync():
        model(mine[0]).square().mean().backward()
    model(mine[1]).square().mean().backward()
    compare(model, alone(reference, 2))


def mixed_precision():
    """Weights in bfloat16 for the passes, gradients reduced and held in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference, model = Net(), sharded(Net(), mp_policy=policy)
    model(batches(1)[dist.get_rank()][0]).float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    compare(model, alone(reference, 1), digits=1)
    whole = [p.grad.full_tensor() for p in model.parameters()]
    layouts.close(gradrein.get_total_norm([p.grad for p in model.parameters()]).item(), layouts.norm_of(whole, 2.0), 5)


def cpu_offload():
    """Shards that stay on the CPU. Here everything does."""
    reference, model = Net(), sharded(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model(batches(1)[dist.get_rank()][0]).square().mean().backward()
    compare(model, alone(reference, 1))


def frozen():
    reference = Net()
    reference.second.requires_grad_(False)
    model = sharded(copy.deepcopy(reference))
    model(batches(1)[dist.get_rank()][0]).square().mean().backward()
    compare(model, alone(reference, 1))


def clipped_alone(model, steps, limit):
    """The mean over all samples of gradients that are clipped for each, added up over steps."""
    every, parameters = batches(steps), [*model.parameters()]
    for step in range(steps):
        losses = torch.cat([model(x[step]).square().mean(1) for x in every])
        rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        for row in rows:
            norm = torch.cat([g.flatten() for g in row]).norm()
            for p, g in zip(parameters, row, strict=True):
                g = g * (limit / norm).clamp(max=1) / len(rows)
                p.grad = g if p.grad is None else p.grad + g
    return [p.grad for p in parameters]


def clip_per_sample(model, steps, limit=0.1):
    for step, x in enumerate(batches(steps)[dist.get_rank()]):
        if steps > 1:
            model.set_requires_gradient_sync(step == steps - 1)
        gradrein.per_sample(model(x).square().mean(1), model).clip_(limit)
    for p, wanted in zip(model.parameters(), clipped_alone(Net(), steps, limit), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), wanted)


def per_sample_no_sync():
    """Every pass adds what all ranks have to `.grad`: it is not FSDP2 that adds up."""
    clip_per_sample(sharded(Net()), 3)


def per_sample_cpu_offload():
    clip_per_sample(sharded(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)), 1)


CASES = [
    accumulation,
    no_sync,
    ddp_no_sync,
    mixed_precision,
    cpu_offload,
    frozen,
    per_sample_no_sync,
    per_sample_cpu_offload,
]
