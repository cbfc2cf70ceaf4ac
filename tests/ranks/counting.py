"""Count collectives and bytes with torch's fake process group: one process that believes to be a rank of thousands.

What the fake group leaves undone is done here as if every rank had sent the same.
"""

import torch
import torch.distributed as dist
from rank_processes import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import gradrein


class Counted(TorchDispatchMode):
    """Note each collective with how many bytes a rank is left with (of a reduce-scatter, how many go in)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __enter__(self):
        self._all_reduce, dist.all_reduce = dist.all_reduce, self._sum_of_equals
        return super().__enter__()

    def __exit__(self, *error):
        dist.all_reduce = self._all_reduce
        return super().__exit__(*error)

    def _sum_of_equals(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        work = self._all_reduce(tensor, op, group, async_op)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name == "c10d.allreduce_.default":
            self.found.append(("all_reduce", args[0][0].nbytes))
        elif name == "c10d._allgather_base_.default":
            self.found.append(("all_gather", args[0].nbytes))
            args[0].view(-1, args[1].numel()).copy_(args[1].clone().reshape(1, -1))
        elif name == "c10d._reduce_scatter_base_.default":
            self.found.append(("reduce_scatter", args[1].nbytes))
            args[0].copy_(args[1].view(-1)[: args[0].numel()].view(args[0].shape))
        elif name.startswith("_c10d_functional.all_reduce"):
            self.found.append(("all_reduce", args[0].nbytes))
            return result * dist.get_world_size() if "sum" in args[1] else result
        elif name.startswith(("_c10d_functional.", "c10d.")) and "wait" not in name and "_wrap" not in name:
            self.found.append((name, sum(a.nbytes for a in args if isinstance(a, torch.Tensor))))
        return result


LAYOUTS = {
    "FSDP2": (lambda n: (n,), ("dp",), [[Shard(0)]]),
    "FSDP2 x TP": (lambda n: (n // 8, 8), ("dp", "tp"), [[Shard(0), Shard(1)], [Shard(0), Replicate()]]),
    "HSDP x TP": (
        lambda n: (2, n // 16, 8),
        ("copies", "dp", "tp"),
        [[Replicate(), Shard(0), Shard(1)], [Replicate(), Shard(0), Replicate()]],
    ),
}


def mesh_of(layout, world):
    shape, names, _ = LAYOUTS[layout]
    return init_device_mesh("cpu", shape(world), mesh_dim_names=names)


def spread(mesh, placements, count):
    """Parameters with gradients, of which this rank holds two by two elements each."""
    found = {}
    for k in range(count):
        kinds = placements[k % len(placements)]
        weight, grad = (
            DTensor.from_local(t, mesh, kinds, run_check=False) for t in (torch.zeros(2, 2), torch.ones(2, 2))
        )
        found[f"p{k}"] = torch.nn.Parameter(weight)
        found[f"p{k}"].grad = grad
    return found


def torchtitan_style(parameters, max_norm):
    """Measure, gather what is spread, and scale: as training loops for DTensors do it."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


POLICIES = {
    "by_norm": lambda: gradrein.by_norm(1.0),
    "by_norm, each": lambda: gradrein.by_norm(1.0, per_parameter=True),
    "by_rms": lambda: gradrein.by_rms(0.1),
    "by_value": lambda: gradrein.by_value(0.1),
    "by_norm, inf": lambda: gradrein.by_norm(1.0, float("inf")),
    **{
        name: (lambda name=name: getattr(gradrein.policies, name)())
        for name in ("ByMedian", "ByQuantile", "ByRunningNorm", "ByZScore")
    },
    "SkipSpikes": lambda: gradrein.policies.SkipSpikes(gradrein.by_norm(1.0)),
}
CALLS = {
    "torch.nn.utils.clip_grad_norm_": lambda ps: torch.nn.utils.clip_grad_norm_(ps.values(), 1.0),
    "torchtitan style": lambda ps: torchtitan_style([*ps.values()], 1.0),
    "clip_grad_norm_": lambda ps: gradrein.clip_grad_norm_(ps.values(), 1.0),
    "get_total_norm": lambda ps: gradrein.get_total_norm([p.grad for p in ps.values()]),
    **{f"clip_, {name}": lambda ps, make=make: gradrein.clip_(ps, make()) for name, make in POLICIES.items()},
}


def in_fake_world(world, function, *args):
    """Run a function in a process that is rank 0 of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return function(world, *args)
    finally:
        dist.destroy_process_group()


def count_calls(world, layout, count, calls=None):
    """By call: the names of its collectives, and all bytes of them."""
    found, mesh, placements = {}, mesh_of(layout, world), LAYOUTS[layout][2]
    for name, call in ((name, CALLS[name]) for name in calls or CALLS):
        parameters = spread(mesh, placements, count)
        with Counted() as counted:
            call(parameters)
        found[name] = [kind for kind, _ in counted.found], sum(size for _, size in counted.found)
    return found


def count_per_sample(world, width):
    """The same for per-sample gradients under `fully_shard`, after what gathering the model takes."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with Counted() as counted:
        ps = gradrein.per_sample(model(torch.ones(2, width)).square().sum(1), model)
        counted.found.clear()
        ps.clip_(1.0)
    return counted.found
