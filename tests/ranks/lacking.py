"""What the ranks run where some of them lack a gradient, or hold one that the others cannot know of."""

import math
import time

import layouts
import placements
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gradrein
from gradrein import policies
from gradrein.distributed import Disjoint, Replicated, Sharded


def grid():
    return placements.grid()  # its dimensions are "stage" and "tp"


def spread(mesh, kinds, rows=4):
    """A parameter of ones with a gradient of ones, of which this rank holds its part."""
    held = rows
    for size, kind in zip(mesh.shape, kinds, strict=True):
        held = held // size if kind.is_shard() else held
    local = [DTensor.from_local(torch.ones(held, 3), mesh, kinds, run_check=False) for _ in range(2)]
    parameter = torch.nn.Parameter(local[0])
    parameter.grad = local[1]
    return parameter


def plain():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def refused_by_all(run, parameters, words):
    """All ranks raise at once, with these words on some of them, and no gradient has changed."""
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    before = [layouts.piece(g).clone() for g in grads]
    start = time.monotonic()
    kind, text = placements.error(run)
    took = time.monotonic() - start
    after = [layouts.piece(g) for g in grads]
    same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(after, before, strict=True))
    assert same, (kind, text)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (kind, text, took))
    assert {kind for kind, *_ in found} == {"RankError"}, found
    assert any(words in text for _, text, _ in found), found
    assert max(took for *_, took in found) < 5.0, found  # nobody has waited for the timeout of the group


def on_a_slice(kind, sliced, lacking):
    """A gradient that is missing on the ranks of one slice of a mesh, beside one that lies on the whole mesh."""
    mesh = grid()
    parameters = {"p": spread(mesh[sliced], [kind]), "q": spread(mesh, [Shard(0), Replicate()])}
    if dist.get_rank() in lacking:
        parameters["p"].grad = None
    words = "lie on a part of the ranks only"
    refused_by_all(lambda: gradrein.clip_grad_norm_(parameters, 1.0), parameters, words)
    refused_by_all(lambda: gradrein.clip_(parameters, gradrein.by_norm(1.0)), parameters, words)


def on_a_slice_of_a_stage(what):
    """The same with `placement`, which may leave some of the parameters to other ranks."""
    parameters = {"p": spread(grid()["tp"], [Shard(0)]), "q": spread(grid(), [Shard(0), Shard(0)]), "e": plain()}
    placement = {"e": Replicated(dist.group.WORLD), "*": None}
    mode = "raise"
    if what == "missing" and dist.get_rank() in (0, 1):
        parameters["p"].grad = None
    if what == "nan":
        mode = "zero"
        if dist.get_rank() == 0:
            layouts.piece(parameters["p"].grad)[0, 0] = math.nan
    run = lambda: gradrein.clip_(parameters, gradrein.by_norm(1.0), nonfinite=mode, placement=placement)  # noqa: E731
    refused_by_all(run, parameters, "lie on a part" if what == "missing" else "not finite")


def on_two_slices(what):
    """Parameters on slices that cross, and none on the whole mesh: all ranks hear of a fault of any."""
    parameters = {"p": spread(grid()["stage"], [Replicate()]), "q": spread(grid()["tp"], [Shard(0)])}
    at = dist.get_rank() == 3
    limit, mode, words = 1.0, "raise", "do not agree"
    if what == "limit":
        limit = 2.0 if at else 1.0
    elif what == "nan":
        mode, words = "zero", "not finite"
        layouts.piece(parameters["p"].grad)[0, 0] = math.nan if at else 1.0
    elif at:
        parameters["p"].grad = None
    run = lambda: gradrein.clip_(parameters, gradrein.by_norm(limit), nonfinite=mode)  # noqa: E731
    refused_by_all(run, parameters, words)


def experts_on_some_ranks():
    """DTensors on a mesh of some ranks only, beside others on all of them, in two stages of experts."""
    line, pair = layouts.mesh("line"), grid()["tp"]
    parameters = {"dense": spread(line, [Shard(0)])}
    if dist.get_rank() < 2:
        parameters["experts"] = spread(pair, [Shard(0)])
    placement = {"dense": None, "*": Disjoint(grid()["stage"])}
    norm = gradrein.clip_grad_norm_(parameters, 100.0, placement=placement)
    layouts.close(norm.item(), math.sqrt(24), 6)


def a_frozen_parameter_of_one_stage():
    """A parameter that never has a gradient, and that other stages do not hold."""
    parameters = {"shared.embed": plain()}
    if dist.get_rank() == 0:
        parameters["shared.pos"] = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    placement = {"shared.*": Replicated(dist.group.WORLD), "*": Disjoint(dist.group.WORLD)}
    for policy in (policies.ByRunningNorm(), {"shared.embed": gradrein.by_norm(1.0), "*": policies.ByRunningNorm()}):
        layouts.close(gradrein.clip_(parameters, policy, placement=placement).norm, math.sqrt(2), 6)
        parameters["shared.embed"].grad = torch.ones(2)


def a_copy_that_one_stage_lacks(order):
    """Copies inside stages, of which one has no gradient: the other stage hears of it."""
    kinds = {"copies": Replicated(grid()["tp"]), "stages": Disjoint(grid()["stage"])}
    parameters = {f"a{stage()}": plain(), f"b{stage()}": plain()}
    if dist.get_rank() == 1:
        parameters[f"a{stage()}"].grad = None
    placement = tuple(kinds[name] for name in order)
    for policy in (policies.ByRunningNorm(), gradrein.by_norm(1.0)):
        run = lambda policy=policy: gradrein.clip_(parameters, policy, placement=placement)  # noqa: E731
        refused_by_all(run, parameters, "hold different parameters")


def a_state_after_a_step_without_a_gradient():
    """What a rank saves does not depend on which gradients it has lacked."""
    parts = {name: spread(layouts.mesh("line"), [Shard(0)]) for name in ("a", "b")}
    policy = policies.ByOvershoot()
    grad = parts["a"].grad
    for step in range(3):
        parts["a"].grad = None if step == 0 and dist.get_rank() == 0 else grad
        gradrein.clip_(parts, policy)
    again = policies.ByOvershoot()
    again.load_state_dict(policy.state_dict())
    gradrein.clip_(parts, again)


def a_summand_that_is_only_scaled():
    """What is only measured and scaled may share memory."""
    for run in (
        lambda ps: gradrein.clip_grad_norm_(ps, 1.0),
        lambda ps: gradrein.clip_(ps, gradrein.by_norm(1.0)),
        lambda ps: gradrein.clip_(ps, policies.ByMedian(ceiling=1.0)),
    ):
        p = _partial(torch.ones(2, 1).expand(2, 2) / dist.get_world_size())
        run({"w": p})
        layouts.close(p.grad.full_tensor().norm().item(), 1.0, 6)


def on_no_rank_of_any_slice(kind, sliced):
    """The same where all ranks lack it: there is nothing to disagree on."""
    parameters = {"p": spread(grid()[sliced], [kind]), "q": spread(grid(), [Shard(0), Shard(0)])}
    parameters["p"].grad = None
    layouts.close(gradrein.clip_grad_norm_(parameters, 100.0).item(), math.sqrt(12), 6)


COPIES = {
    "shards, then copies": lambda: ({"p": spread(grid(), [Shard(0), Replicate()])}, None),
    "copies, then shards": lambda: ({"p": spread(grid(), [Replicate(), Shard(0)])}, None),
    "a slice": lambda: ({"p": spread(grid()["tp"], [Replicate()]), "q": spread(grid(), [Shard(0), Shard(0)])}, None),
    "another slice": lambda: (
        {"p": spread(grid()["stage"], [Replicate()]), "q": spread(grid(), [Shard(0), Shard(0)])},
        None,
    ),
    "sharded slices": lambda: (
        {"p": spread(grid()["tp"], [Shard(0)]), "q": spread(grid(), [Shard(0), Shard(0)])},
        None,
    ),
    "copies in stages": lambda: ({stage(): plain()}, (Replicated(grid()["tp"]), Disjoint(grid()["stage"]))),
    "stages of copies": lambda: ({stage(): plain()}, (Disjoint(grid()["stage"]), Replicated(grid()["tp"]))),
    "DTensors in stages": lambda: ({stage(): spread(grid()["tp"], [Replicate()])}, Disjoint(grid()["stage"])),
    "by patterns": lambda: (
        {f"embed{stage()}": plain(), f"layer{dist.get_rank()}": plain()},
        {"embed*": (Replicated(grid()["tp"]), Disjoint(grid()["stage"])), "*": Disjoint(dist.group.WORLD)},
    ),
}


def stage():
    return f"s{grid().get_local_rank('stage')}"


def a_nan_in_one_copy(name, at):
    """To zero it would leave copies that differ: those that hold no copy of it hear of that too, at once."""
    parameters, placement = COPIES[name]()
    first = next(iter(parameters.values()))
    if dist.get_rank() == at:
        layouts.piece(first.grad).view(-1)[0] = math.nan
    run = lambda: gradrein.clip_(parameters, gradrein.by_norm(1.0), nonfinite="zero", placement=placement)  # noqa: E731
    refused_by_all(run, parameters, "not finite")


def a_nan_in_all_copies():
    """The same value in all copies is zeroed."""
    parameters = {"p": spread(grid()["tp"], [Replicate()]), "q": spread(grid(), [Shard(0), Shard(0)])}
    layouts.piece(parameters["p"].grad)[0, 0] = math.nan
    report = gradrein.clip_(parameters, gradrein.by_norm(100.0), nonfinite="zero")
    layouts.close(report.norm, math.sqrt(11 + 12), 12)


LEARN = {
    "ByElementSpike": lambda: policies.ByElementSpike(theta=2.0, warmup=2, decay=0.5),
    "ByRunningNorm": lambda: policies.ByRunningNorm(warmup=2),
    "ByMedian": lambda: policies.ByMedian(warmup=2, per_parameter=True),
}


def a_placed_copy(name, lacking):
    """A policy that learns from each copy in a plain tensor, one of which has no gradient."""
    placement = {"embed": Replicated(dist.group.WORLD), "*": Disjoint(dist.group.WORLD)}
    parameters = {"embed": plain(), f"layer{dist.get_rank()}": plain()}
    if dist.get_rank() in lacking:
        parameters["embed"].grad = None
    run = lambda policy: gradrein.clip_(parameters, policy, placement=placement)  # noqa: E731
    if len(lacking) < dist.get_world_size():
        refused_by_all(lambda: run(LEARN[name]()), parameters, "some have no gradient")
        refused_by_all(lambda: run({"embed": LEARN[name](), "*": None}), parameters, "some have no gradient")
    else:
        run(LEARN[name]())
    run({"embed": gradrein.by_norm(1.0), "*": LEARN[name]()})
    run(gradrein.by_norm(1.0))


def one_that_nobody_has(make):
    """A parameter without a gradient on any rank is left out, as in one process."""
    mesh, rank = layouts.mesh("line"), dist.get_rank()
    ours, theirs, generator = make(), make(), torch.Generator().manual_seed(0)
    shapes = {"a": (4, 2), "b": (4, 2), "c": (1,)}  # of the last some ranks hold nothing
    whole = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    parts = {}
    for name, p in whole.items():
        parts[name] = torch.nn.Parameter(layouts.spread(p.detach(), "line", "0"))
    for step in range(6):
        for name, p in whole.items():
            grad = torch.randn(p.shape, generator=generator)
            missing = name != "a" and step in (0, 2, 3)
            p.grad = None if missing else grad
            parts[name].grad = None if missing else layouts.spread(grad, "line", "0")
        expected, found = gradrein.clip_(whole, theirs), gradrein.clip_(parts, ours)
        layouts.close(found.norm_after, expected.norm_after, 6)
        with torch.no_grad():
            for name, p in whole.items():
                if p.grad is not None:
                    move = 0.1 * torch.randn(p.shape, generator=generator)
                    p.add_(move)
                    layouts.piece(parts[name].detach()).add_(layouts.piece(layouts.spread(move, "line", "0")))
    assert mesh.get_local_rank() == rank


EMPTY = {
    "by_unit": gradrein.by_unit,
    "ByElementSpike": policies.ByElementSpike,
    "ByOvershoot": policies.ByOvershoot,
    "SkipSpikes": lambda: policies.SkipSpikes(policies.ByElementSpike()),
    "by_norm": lambda: gradrein.by_norm(1.0),
    "by_value": lambda: gradrein.by_value(0.1),
    "by_rms": lambda: gradrein.by_rms(0.1),
}


def a_group_without_gradients(name, tied):
    """A policy whose gradients are all missing, or counted in another group, beside one for DTensors."""
    parameters = {"a": spread(layouts.mesh("line"), [Shard(0)]), "b": torch.nn.Parameter(torch.ones(2, 3))}
    if tied:
        parameters["b"] = spread(layouts.mesh("line"), [Shard(0)])
        parameters["b"].grad = parameters["a"].grad
    for _ in range(2):
        layouts.piece(parameters["a"].grad).fill_(1.0)
        report = gradrein.clip_(parameters, {"a": gradrein.by_norm(1.0), "b": EMPTY[name]()})
        layouts.close(report.norms["a"], math.sqrt(12), 6)
        layouts.close(report.norm, math.sqrt(12), 6)
    only = gradrein.clip_(parameters, {"a": None, "b": EMPTY[name]()})
    assert "a" not in only.norms


def overlapping():
    """Placements that are about the same ranks cannot both be true."""
    world, tp = dist.group.WORLD, grid()["tp"]
    for placement in (
        (Sharded(world), Disjoint(world)),
        (Sharded(grid()), Sharded(world)),
        (Sharded(tp), Disjoint(world)),
        (Sharded(tp), Disjoint(grid())),
        (Replicated(world), Sharded(world)),
        (Replicated(world), Disjoint(tp)),
        (Replicated(world), Disjoint(world)),
    ):
        p = plain()
        kind, text = placements.error(lambda p=p, at=placement: gradrein.clip_grad_norm_({"p": p}, 1.0, placement=at))
        assert kind == "ArgumentError", (placement, text)
        assert "more than one rank in common" in text
        assert torch.equal(p.grad, torch.ones(2))
    for placement, expected in (
        ((Sharded(tp), Disjoint(grid()["stage"])), 8),
        ((Sharded(tp), Replicated(world)), 4),
        ((Replicated(tp), Replicated(world)), 2),
    ):
        right = gradrein.clip_grad_norm_({"p": plain()}, 1.0, placement=placement)
        layouts.close(right.item(), math.sqrt(expected), 6)


SUMMANDS = {
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 2),
    "overlapping": lambda: torch.tensor([1.0, 2.0, 3.0]).unfold(0, 2, 1),
}
CALLS = {
    "clip_grad_value_": lambda ps: gradrein.clip_grad_value_(ps, 0.5),
    "by_value": lambda ps: gradrein.clip_(ps, gradrein.by_value(0.5)),
    "by_unit": lambda ps: gradrein.clip_(ps, gradrein.by_unit(0.1)),
    "ByElementSpike": lambda ps: gradrein.clip_(ps, policies.ByElementSpike(warmup=0, ceiling=0.5)),
}


def _partial(local):
    mesh = layouts.mesh("line")
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False))
    parameter.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    return parameter


def a_summand_that_cannot_be_written(kind, call, odd):
    """Elements of one rank's summand share memory: what it is reduced to does not fit there."""
    local = SUMMANDS[kind]() if odd is None or dist.get_rank() == odd else torch.ones(2, 2)
    parameters = {"w": _partial(local), "v": plain()}
    before = [p.grad.to_local().clone() if name == "w" else p.grad.clone() for name, p in parameters.items()]
    kind, text = placements.error(lambda: CALLS[call](parameters))
    assert kind in ("UnsupportedGradientError", "RankError"), (kind, text)
    assert "in the same memory" in text
    after = [parameters["w"].grad.to_local(), parameters["v"].grad]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def a_summand_from_inference_mode(call):
    with torch.inference_mode():
        local = torch.full((2, 2), 3.0 / dist.get_world_size())
    parameters = {"w": _partial(local), "v": plain()}
    CALLS[call](parameters)
    found = parameters["w"].grad.to_local().clone()
    dist.all_reduce(found)
    one = torch.nn.Parameter(torch.ones(2, 2))
    one.grad = torch.full((2, 2), 3.0)
    CALLS[call]({"w": one, "v": plain()})
    torch.testing.assert_close(found, one.grad)


def elements_as_units(dims, letter):
    """With all dimensions among `unit_dims` each element is a unit, on one rank or several."""
    shape = (4, 2) if len(dims) == 2 else (4, 2, 2)
    grad = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    whole, part = (
        torch.nn.Parameter(torch.ones(shape)),
        torch.nn.Parameter(layouts.spread(torch.ones(shape), "line", letter)),
    )
    whole.grad, part.grad = grad.clone(), layouts.spread(grad, "line", letter)
    for p in (whole, part):
        gradrein.clip_([p], gradrein.by_unit(0.05, unit_dims=dims))
    torch.testing.assert_close(whole.grad, torch.full(shape, 0.05))
    torch.testing.assert_close(part.grad.full_tensor(), whole.grad)


def another_limit(call):
    """Copies that are limited to different values would differ."""
    p = spread(layouts.mesh("line"), [Replicate()])
    limit = 0.5 + 0.1 * (dist.get_rank() == 0)
    run = {
        "clip_grad_value_": lambda: gradrein.clip_grad_value_([p], limit),
        "clip_grads_with_norm_": lambda: gradrein.clip_grads_with_norm_([p], limit, torch.tensor(5.0)),
    }[call]
    refused_by_all(run, {"p": p}, "the call")
