"""What the ranks run where plain tensors lie on several ranks: `placement=`."""

import layouts
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gradrein
from gradrein._torch.dtensor import distribute_own

_groups = {}


def grads(*values):
    found = {}
    for name, value in values:
        p = torch.nn.Parameter(torch.zeros(len(value)))
        p.grad = torch.tensor(value, dtype=torch.float32)
        found[name] = p
    return found


def line():
    return dist.group.WORLD


def grid():
    """Two stages of two ranks each: the groups over stages and inside one."""
    if "grid" not in _groups:
        _groups["grid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))
    return _groups["grid"]


def stages(p):
    """Each rank holds a parameter of its own; one holds none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = grads() if rank == size - 1 else grads((f"layer{rank}", [3.0 + rank, 4.0]))
    wholes = [torch.tensor([3.0 + r, 4.0]) for r in range(size - 1)]
    expected = layouts.norm_of(wholes, p)
    report = gradrein.clip_(mine, gradrein.by_norm(expected / 2, p), placement=gradrein.distributed.Disjoint(line()))
    layouts.close(report.norm, expected, 12)
    layouts.close(report.norm_after, expected / 2, 12)
    layouts.assert_same_everywhere(report.norm)
    for r, q in enumerate(mine.values(), start=rank):
        torch.testing.assert_close(q.grad, wholes[r] / 2)
    again = grads() if rank == size - 1 else grads((f"layer{rank}", [3.0 + rank, 4.0]))
    norm = gradrein.clip_grad_norm_(again.values(), 1.0, p, placement=gradrein.distributed.Disjoint(line()))
    layouts.close(norm.item(), expected, 6)


def tied(p):
    """All stages share an embedding, which counts once; or only the ends do, and it is measured on one of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, embed = (f"layer{rank}", [1.0 + rank]), ("embed", [2.0, 5.0])
    over = gradrein.distributed.Disjoint(line())
    placement = {"embed": None, "*": over}
    wholes = [torch.tensor([1.0 + r]) for r in range(size)] + [torch.tensor([2.0, 5.0])]
    both = gradrein.clip_(grads(own, embed), gradrein.by_norm(9.0, p), placement=placement)
    layouts.close(both.norm, layouts.norm_of(wholes, p), 12)
    policy = {"embed": gradrein.by_norm(1.0, p), "layer*": gradrein.by_norm(1.0, p)}
    apart = gradrein.clip_(grads(own, embed), policy, placement=placement).by_pattern
    layouts.close(apart["embed"].norm, layouts.norm_of(wholes[-1:], p), 12)
    layouts.close(apart["layer*"].norm, layouts.norm_of(wholes[:-1], p), 12)
    mine = grads(own, embed) if rank in (0, size - 1) else grads(own)
    counted = [mine[name] for name in mine if name != "embed" or rank == 0]
    norm = gradrein.clip_grad_norm_(counted, float("inf"), p, placement=over)
    gradrein.clip_grads_with_norm_(mine, 0.5, norm)
    for q in mine.values():
        torch.testing.assert_close(q.grad, grads(own, embed)[own[0] if len(q) == 1 else "embed"].grad * 0.5 / norm)


def sharded(p):
    """Plain tensors that are columns of one weight, and one that every rank has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    columns, bias = torch.arange(1.0, size + 1), torch.tensor([0.5, 2.0])
    mine = grads(("up", [columns[rank].item()]), ("bias", bias.tolist()))
    placement = {"up": gradrein.distributed.Disjoint(line()), "*": None}
    report = gradrein.clip_(mine, gradrein.by_norm(1.0, p), placement=placement)
    whole = layouts.norm_of([columns, bias], p)
    layouts.close(report.norm, whole, 12)
    torch.testing.assert_close(mine["up"].grad, columns[rank : rank + 1] / whole)


def sharded_and_staged():
    """Megatron's layout: columns over one group, layers over the other, and a gain that both ranks of a stage have."""
    mesh = grid()
    stage, tp = mesh.get_coordinate()
    mine = grads((f"up{stage}", [1.0 + 2 * stage + tp]), (f"gain{stage}", [10.0 + stage]))
    over = gradrein.distributed.Disjoint(mesh["stage"])
    placement = {"up*": (gradrein.distributed.Disjoint(mesh["tp"].get_group()), over), "gain*": over}
    norm = gradrein.clip_grad_norm_(mine, 1.0, placement=placement)
    layouts.close(norm.item(), (1 + 4 + 9 + 16 + 100 + 121) ** 0.5, 6)
    layouts.assert_same_everywhere(norm.item())


def dtensors_in_stages():
    """FSDP inside each stage, which the tensors say; stages, which they do not."""
    mesh = grid()
    stage, _ = mesh.get_coordinate()
    full = torch.arange(6.0) + 10 * stage
    p = torch.nn.Parameter(distribute_own(torch.zeros(6), mesh["tp"], [torch.distributed.tensor.Replicate()]))
    p.grad = distribute_own(full, mesh["tp"], [torch.distributed.tensor.Shard(0)])
    norm = gradrein.clip_grad_norm_([p], 1.0, placement=gradrein.distributed.Disjoint(mesh["stage"]))
    layouts.close(norm.item(), layouts.norm_of([torch.arange(6.0), torch.arange(6.0) + 10], 2.0), 6)


def local(t):
    """What this rank holds of a tensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def error(function, *args):
    try:
        function(*args)
    except gradrein.errors.GradreinError as found:
        return type(found).__name__, str(found)
    return "nothing", ""


def copies_that_differ(which):
    """A plain tensor that is said to be the same on every rank, and is of another number or shape on one."""
    rank = dist.get_rank()
    named = [(f"w{k}", [1.0]) for k in range(rank + 1)] if which == "number" else [("w", [1.0] * (2 + rank))]
    mine = grads(*named, (f"own{rank}", [1.0]))
    placement = {"w*": None, "*": gradrein.distributed.Disjoint(line())}
    found = error(lambda: gradrein.clip_grad_norm_(mine, 0.1, placement=placement))
    assert all(bool((q.grad == 1).all()) for q in mine.values())
    return found


def dtensor_counted_twice(letter):
    """Parameters that lie on the ranks of the group itself, beside one that a rank holds alone."""
    parameters, _ = layouts.build({"seed": 3, "tensors": [((8, 3), "line", letter, ())]})
    before = layouts.piece(parameters["p0"].grad).clone()
    mine = parameters | grads((f"expert{dist.get_rank()}", [3.0, 4.0]))
    over = gradrein.distributed.Disjoint(line())
    found = error(lambda: gradrein.clip_(mine, gradrein.by_norm(0.1), placement=over))
    assert torch.equal(layouts.piece(parameters["p0"].grad), before)
    return found


def dtensor_beside_experts():
    parameters, wholes = layouts.build({"seed": 3, "tensors": [((8, 3), "line", "0", ()), ((5,), "line", "r", ())]})
    mine = parameters | grads((f"expert{dist.get_rank()}", [3.0, 4.0]))
    placement = {"expert*": gradrein.distributed.Disjoint(line()), "*": None}
    norm = gradrein.clip_(mine, gradrein.by_norm(0.1), placement=placement).norm
    every = [*wholes, *[torch.tensor([3.0, 4.0])] * dist.get_world_size()]
    layouts.close(norm, layouts.norm_of(every, 2.0), 6)


def placed_twice(kind):
    """One memory under two placements, as one tensor or as views: which of them counts must not depend on the order."""
    memory = torch.tensor([3.0, 4.0])
    kinds = {"a": gradrein.distributed.Disjoint(line()), "b": None}
    for placement in (kinds, dict(zip(kinds, reversed(kinds.values()), strict=True))):
        mine = grads(("a", [3.0, 4.0]), ("b", [3.0, 4.0]))
        for q in mine.values():
            q.grad = memory[:] if kind == "views" else memory
        found = error(lambda: gradrein.clip_(mine, gradrein.by_norm(0.1), placement=placement))  # noqa: B023
        assert all(q.grad.tolist() == [3.0, 4.0] for q in mine.values())
    return found


def factors_in_stages():
    mine = grads((f"layer{dist.get_rank()}", [3.0, 4.0]))
    policy = gradrein.by_norm(3.0, per_parameter=True)
    report = gradrein.clip_(mine, policy, placement=gradrein.distributed.Disjoint(line()))
    layouts.close(report.norm, 5 * dist.get_world_size() ** 0.5, 12)
    layouts.close(*report.norms_after.values(), 3.0, 6)
    return error(lambda: report.norm_after)


def not_a_placement():
    return error(lambda: gradrein.clip_grad_norm_([torch.nn.Parameter(torch.zeros(1))], 1.0, placement=line()))


def no_names():
    return error(lambda: gradrein.clip_grad_norm_([torch.nn.Parameter(torch.zeros(1))], 1.0, placement={"*": None}))


def no_pattern():
    return error(lambda: gradrein.clip_grad_norm_(grads(("w", [1.0])), 1.0, placement={"v": None}))


def other_placements(kinds):
    """Every rank says something else about where `a` and `b` are."""
    mine = grads(("a", [3.0]), ("b", [4.0]))
    own = kinds[min(dist.get_rank(), 1)]
    placement = {
        name: gradrein.distributed.Disjoint(line()) if is_own else None for name, is_own in zip("ab", own, strict=True)
    }
    found = error(lambda: gradrein.clip_(mine, gradrein.by_norm(1.0), placement=placement))
    assert mine["a"].grad.item() == 3.0
    return found
