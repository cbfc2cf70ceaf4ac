"""What the ranks run where gradients share memory: the same as one process in which parameters share a gradient."""

import layouts
import placements
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gradrein


def another(grad):
    """Another DTensor over the memory of one."""
    kinds, mesh = grad.placements, grad.device_mesh
    return DTensor.from_local(grad.to_local(), mesh, kinds, run_check=False, shape=grad.shape, stride=grad.stride())


def build(case, shared, as_plain=False, only_on=None):
    """Parameters as a case says, of which the last has the gradient memory of `shared`; and one process with it."""
    parameters, wholes = layouts.build(case)
    alone = {key: torch.nn.Parameter(torch.zeros_like(full)) for key, full in zip(parameters, wholes, strict=True)}
    for p, full in zip(alone.values(), wholes, strict=True):
        p.grad = full.clone()
    grad, *_, last = parameters[shared].grad, *parameters
    alone[last].grad = alone[shared].grad
    if only_on in (None, dist.get_rank()):
        parameters[last].grad = grad.to_local() if as_plain else another(grad)
    else:
        parameters[last].grad = grad.clone()
    return parameters, alone


CALLS = {
    "clip_grad_norm_": lambda ps: gradrein.clip_grad_norm_(ps, 0.3).item(),
    "infinity": lambda ps: gradrein.clip_grad_norm_(ps, 0.3, float("inf")).item(),
    "get_total_norm": lambda ps: gradrein.get_total_norm([p.grad for p in ps.values()]).item(),
    "clip_grads_with_norm_": lambda ps: gradrein.clip_grads_with_norm_(ps, 0.3, 2.0) or 0.0,
    "clip_grad_value_": lambda ps: gradrein.clip_grad_value_(ps, 0.4) or 0.0,
    "by_norm": lambda ps: gradrein.clip_(ps, gradrein.by_norm(0.3)).norm,
    "per_parameter": lambda ps: gradrein.clip_(ps, gradrein.by_norm(0.3, per_parameter=True)).norm_after,
    "by_rms": lambda ps: gradrein.clip_(ps, gradrein.by_rms(0.1)).norm_after,
    "by_value": lambda ps: gradrein.clip_(ps, gradrein.by_value(0.4)).norm_after,
    "by_unit": lambda ps: gradrein.clip_(ps, gradrein.by_unit(0.4)).norm_after,
    "ByElementSpike": lambda ps: gradrein.clip_(ps, gradrein.policies.ByElementSpike(ceiling=0.4)).norm_after,
}


def counts_once(case, shared, as_plain=False):
    for name, call in CALLS.items():
        parameters, alone = build(case, shared, as_plain)
        found, expected = call(parameters), call(alone)
        layouts.close(found, expected, 5)
        layouts.assert_same_everywhere(found)
        for key, p in parameters.items():
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(whole, alone[key].grad, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def copies_shared_on_one_rank(case, shared):
    """Where one rank has two copies and another one in two places, there are two; each memory is scaled once."""
    parameters, _ = build(case, shared, only_on=0)
    before = [p.grad.full_tensor().clone() for p in parameters.values()]
    expected = layouts.norm_of(before, 2.0)
    norm = gradrein.clip_grad_norm_(parameters, 0.3).item()
    layouts.close(norm, expected, 5)
    layouts.assert_same_everywhere(norm)
    for p, b in zip(parameters.values(), before, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), b * (0.3 / (norm + 1e-6)))


def refused(rows):
    """Shards and copies in one memory: nobody knows what it comes to. A rank whose shard is empty hears of it."""
    mesh = layouts.mesh("line")
    local = torch.ones(1 if dist.get_rank() < rows else 0, 3)
    kept = local.clone()
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(rows, 3), stride=(3, 1))
    # On a rank with an empty shard the copy has memory of its own.
    copy = DTensor.from_local(local if len(local) else torch.ones(1, 3), mesh, [Replicate()], run_check=False)
    parameters = {}
    for name, grad in {"shard": shard, "copy": copy}.items():
        parameters[name] = torch.nn.Parameter(torch.zeros_like(grad))
        parameters[name].grad = grad
    for call in (
        lambda: gradrein.clip_grad_norm_(parameters, 0.1),
        lambda: gradrein.clip_(parameters, gradrein.by_norm(0.1)),
    ):
        kind, text = placements.error(call)
        assert kind == ("UnsupportedGradientError" if dist.get_rank() < rows else "RankError"), text
        assert "two gradients are in the same memory" in text
        assert torch.equal(local, kept)


def partial_refused(kind, only_on=None):
    """A partial gradient in the memory of another: to limit the sum would write over the other."""
    mesh, local = layouts.mesh("line"), torch.arange(1.0, 5.0)
    here = only_on in (None, dist.get_rank())
    memory = local if here else local.clone()
    other = memory if kind is None else DTensor.from_local(memory, mesh, [kind], run_check=False)
    partial, whole = (DTensor.from_local(local, mesh, [k], run_check=False) for k in (Partial(), Replicate()))
    parameters = {}
    for name, grad, like in (("partial", partial, whole), ("other", other, other)):
        parameters[name] = torch.nn.Parameter(torch.zeros_like(like))
        parameters[name].grad = grad
    for call in (
        lambda: gradrein.clip_grad_value_(parameters.values(), 0.5),
        lambda: gradrein.clip_(parameters, gradrein.by_value(0.5)),
        lambda: gradrein.clip_grad_norm_(parameters.values(), 0.5),
    ):
        found, text = placements.error(call)
        assert found == ("UnsupportedGradientError" if here else "RankError"), text
        assert "two gradients are in the same memory" in text
        assert local.tolist() == memory.tolist() == [1.0, 2.0, 3.0, 4.0]
