"""What the ranks run where some of them lack a gradient, or hold one in a way that others cannot know of."""

import math

import layouts
import placements
import torch
import torch.distributed as dist
from placements import grid
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gradrein
from gradrein import policies
from gradrein.distributed import Disjoint


def spread(mesh, kinds, rows=4):
    """A parameter of ones with a gradient of ones, of which this rank holds its part."""
    held = rows
    for size, kind in zip(mesh.shape, kinds, strict=True):
        held = held // size if kind.is_shard() else held
    kept = [Replicate() if kind.is_partial() else kind for kind in kinds]
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(held, 3), mesh, kept, run_check=False))
    parameter.grad = DTensor.from_local(torch.ones(held, 3), mesh, kinds, run_check=False)
    return parameter


def plain():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def refused_by_all(run, parameters, words, kind="RankError"):
    """All ranks raise at once, with these words on each of them, and no gradient has changed."""
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    before = [placements.local(g).clone() for g in grads]
    found, text = placements.error(run)
    assert found == kind, (found, text)
    assert words in text, text
    assert "could not exchange" not in text
    after = [placements.local(g) for g in grads]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(after, before, strict=True)), text


CALLS = {
    "clip_grad_norm_": lambda ps: gradrein.clip_grad_norm_(ps, 1.0),
    "by_norm": lambda ps: gradrein.clip_(ps, gradrein.by_norm(1.0)),
    "infinity": lambda ps: gradrein.clip_grad_norm_(ps, 1.0, math.inf),
    "clip_grad_value_": lambda ps: gradrein.clip_grad_value_(ps, 0.1),
    "clip_grads_with_norm_": lambda ps: gradrein.clip_grads_with_norm_(ps, 1.0, 10.0),
    "ByMedian": lambda ps: gradrein.clip_(ps, policies.ByMedian()),
}
LIES = {
    "sharded": lambda: spread(grid(), [Shard(0), Shard(0)]),
    "replicated": lambda: spread(grid(), [Replicate(), Replicate()]),
    "hybrid": lambda: spread(grid(), [Replicate(), Shard(0)]),
    "shards, then copies": lambda: spread(grid(), [Shard(0), Replicate()]),
    "partial": lambda: spread(grid(), [Shard(0), Partial()]),
    "a slice": lambda: spread(grid()["tp"], [Shard(0)]),
    "another slice": lambda: spread(grid()["stage"], [Replicate()]),
    "plain": plain,
}


def on_some_ranks(name, call, missing, beside=True):
    """A gradient that some ranks lack, beside one that lies on the whole mesh or as the only one."""
    parameters = {"p": LIES[name]()}
    if beside:
        parameters["q"] = spread(grid(), [Shard(0), Shard(0)])
    if dist.get_rank() in missing:
        parameters["p"].grad = None
    words = "do not agree on which gradients are missing (give these zeros): "
    refused_by_all(lambda: CALLS[call](parameters), parameters, words)


def on_no_rank(name):
    """A parameter that no rank has a gradient for is left out, as in one process."""
    parameters = {"p": LIES[name](), "q": spread(grid(), [Shard(0), Shard(0)])}
    parameters["p"].grad = None
    layouts.close(gradrein.clip_grad_norm_(parameters, 100.0).item(), math.sqrt(12), 6)
    assert gradrein.clip_(parameters, policies.ByMedian()).norms.keys() == {"q"}


def a_copy_beside_stages(missing):
    """Copies in plain tensors of which one has no gradient."""
    placement = {"embed": None, "*": Disjoint(dist.group.WORLD)}
    parameters = {"embed": plain(), f"layer{dist.get_rank()}": plain()}
    if dist.get_rank() in missing:
        parameters["embed"].grad = None
    run = lambda: gradrein.clip_(parameters, gradrein.by_norm(100.0), placement=placement)  # noqa: E731
    if 0 < len(missing) < dist.get_world_size():
        refused_by_all(run, parameters, "do not agree on the parameters")
    else:
        layouts.close(run().norm, math.sqrt(2 * dist.get_world_size() + (0 if missing else 2)), 6)


def crossing():
    """Meshes of which neither has all ranks of the other."""
    parameters = {"p": spread(grid()["stage"], [Replicate()]), "q": spread(grid()["tp"], [Shard(0)])}
    run = lambda: gradrein.clip_grad_norm_(parameters, 1.0)  # noqa: E731
    refused_by_all(run, parameters, "neither has all ranks of the other", "UnsupportedGradientError")


def experts_on_some_ranks():
    """DTensors on a mesh of some ranks only, beside others on all of them, in two stages of experts."""
    parameters = {"dense": spread(layouts.mesh("line"), [Shard(0)])}
    if dist.get_rank() < 2:
        parameters["experts"] = spread(grid()["tp"], [Shard(0)])
    placement = {"dense": None, "*": Disjoint(grid()["stage"])}
    norm = gradrein.clip_grad_norm_(parameters, 100.0, placement=placement)
    layouts.close(norm.item(), math.sqrt(24), 6)


def a_group_without_gradients(name):
    """A policy whose gradients are all missing, beside one for DTensors."""
    policy = {
        "by_unit": gradrein.by_unit,
        "ByMedian": policies.ByMedian,
        "by_rms": lambda: gradrein.by_rms(1),
    }
    parameters = {"a": spread(grid(), [Shard(0), Shard(0)]), "b": torch.nn.Parameter(torch.ones(2, 3))}
    report = gradrein.clip_(parameters, {"a": gradrein.by_norm(1.0), "b": policy[name]()})
    layouts.close(report.norm, math.sqrt(12), 6)
    assert not gradrein.clip_(parameters, {"a": None, "b": policy[name]()}).norms


def overlapping():
    """Placements that are about the same ranks cannot both be true."""
    world, tp = dist.group.WORLD, grid()["tp"]
    for placement in ((Disjoint(tp), Disjoint(world)), (Disjoint(world), Disjoint(world))):
        p = plain()
        kind, text = placements.error(lambda p=p, at=placement: gradrein.clip_grad_norm_({"p": p}, 1.0, placement=at))
        assert kind == "ArgumentError", (placement, text)
        assert "more than one rank in common" in text
        assert torch.equal(p.grad, torch.ones(2))
    for placement, expected in (((Disjoint(tp), Disjoint(grid()["stage"])), 8), (Disjoint(grid()), 8)):
        right = gradrein.clip_grad_norm_({"p": plain()}, 1.0, placement=placement)
        layouts.close(right.item(), math.sqrt(expected), 6)


BY_ELEMENT = {
    "clip_grad_value_": lambda ps: gradrein.clip_grad_value_(ps, 0.5),
    "by_value": lambda ps: gradrein.clip_(ps, gradrein.by_value(0.5)),
    "by_unit": lambda ps: gradrein.clip_(ps, gradrein.by_unit(0.1)),
    "zero": lambda ps: gradrein.clip_(ps, gradrein.by_norm(0.5), nonfinite="zero"),
}


def _partial(local):
    mesh = layouts.mesh("line")
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False))
    parameter.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    return parameter


def a_summand_is_not_changed_by_element(call):
    parameters = {"w": _partial(torch.ones(2, 2)), "v": plain()}
    refused_by_all(lambda: BY_ELEMENT[call](parameters), parameters, "w is partial: ", "UnsupportedGradientError")


def shared_memory(first, second, call):
    """Two gradients in one memory, of which one is a DTensor, would be counted and scaled twice."""
    mesh, local = layouts.mesh("line"), torch.ones(4, 3)
    parameters = {}
    for name, kind in (("a", first), ("b", second)):
        grad = local if kind is None else DTensor.from_local(local, mesh, [kind], run_check=False)
        parameters[name] = torch.nn.Parameter(torch.zeros_like(grad))
        parameters[name].grad = grad
    run = lambda: {**CALLS, **BY_ELEMENT}[call](parameters)  # noqa: E731
    refused_by_all(run, parameters, "are in the same memory", "UnsupportedGradientError")


def one_gradient_of_two_parameters():
    """The same tensor object counts and is scaled once, as in one process."""
    parameters = {"a": spread(grid(), [Shard(0), Shard(0)]), "b": spread(grid(), [Shard(0), Shard(0)])}
    parameters["b"].grad = parameters["a"].grad
    layouts.close(gradrein.clip_grad_norm_(parameters, 1.0).item(), math.sqrt(12), 6)
    layouts.close(gradrein.get_total_norm([parameters["a"].grad]).item(), 1.0, 5)
