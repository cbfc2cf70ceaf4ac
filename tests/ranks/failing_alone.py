"""What the ranks run: one of them alone has an error of its own. All raise at once, and no gradient is changed."""

import torch
import torch.distributed as dist
from persample_cases import lengths, refused
from rank_processes import fully_shard
from tensor_parallel_cases import grid, tensor_mesh
from tensor_parallel_faults import Mlp, alone, cut, inputs
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import gradrein


def all_raise(call, who, kind, reason, parameters=()):
    """`call` is given whether this rank is the odd one, which raises `kind`; the others name it and its reason."""
    odd = dist.get_rank() == who
    before = [None if p.grad is None else _local(p.grad).clone() for p in parameters]
    found, text = error(lambda: call(odd))
    assert found == (kind if odd else "RankError"), text
    assert reason in text
    assert "could not exchange" not in text  # in time
    assert odd or f"rank {who}" in text
    for p, grad in zip(parameters, before, strict=True):
        assert (p.grad is None) is (grad is None)
        if grad is not None:
            torch.testing.assert_close(_local(p.grad), grad, rtol=0, atol=0)


def error(call):
    try:
        call()
    except Exception as found:
        return type(found).__name__, str(found)
    return "nothing", ""


def _local(t):
    return t.to_local() if isinstance(t, DTensor) else t


QUESTIONS = {
    "a negative limit": (lambda ps, odd: ps.clip_(-1.0 if odd else 1.0), "ArgumentError", "max_norm must be positive"),
    "a limit of another type": (lambda ps, odd: ps.clip_("a" if odd else 1.0), "ArgumentTypeError", "max_norm is one"),
    "an unknown mode": (lambda ps, odd: ps.clip_(1.0, nonfinite="x" if odd else "drop"), "ArgumentError", "'raise' or"),
    "a generator": (
        lambda ps, odd: ps.clip_(1.0, generator=3 if odd else None),
        "ArgumentTypeError",
        "torch.Generator",
    ),
    "too many weights": (lambda ps, odd: ps.weighted_(torch.ones(5 if odd else 4)), "ArgumentError", "shape (4,)"),
    "no weights": (lambda ps, odd: ps.weighted_(None if odd else torch.ones(4)), "ArgumentTypeError", "one weight per"),
    "a direction": (lambda ps, odd: ps.dot({"x": 1} if odd else None), "ArgumentError", "no parameter called 'x'"),
    "a cosine": (lambda ps, odd: ps.cosine([] if odd else None), "ArgumentTypeError", "expected a dict"),
    "a tolerance": (lambda ps, odd: ps.audit(tolerance=-1 if odd else 0.1), "ArgumentError", "tolerance is a number"),
}
OF_FUNCTIONS = {
    "a function of another shape": (
        lambda ps, odd: ps.weighted_(lambda n: n[:2] if odd else n),
        "ArgumentError",
        "shape (4,)",
    ),
    "a function that raises": (
        lambda ps, odd: ps.weighted_(lambda n: 1 / 0 if odd else n),
        "ZeroDivisionError",
        "zero",
    ),
}


def questions(asked):
    """Arguments of a later question, before norms are known and after."""
    for name, (ask, kind, reason) in asked.items():
        for known in (False, True):
            model = cut()
            ps = gradrein.per_sample(model(inputs(4, 6)).square().sum(1), model)
            if known:
                ps.norms()
            for who in (0, 1):
                all_raise(lambda odd, ps=ps, ask=ask: ask(ps, odd), who, kind, reason, list(model.parameters()))
            torch.testing.assert_close(
                ps.norms(), lengths(alone(m := Mlp(), m(inputs(4, 6)).square().sum(1))), msg=name
            )


def later_questions():
    questions({**QUESTIONS, **OF_FUNCTIONS})


def changed_later():
    """An input that one rank changes between two questions, whatever the next one is."""
    for ask in (
        lambda ps: ps.norms(),
        lambda ps: ps.norms(per_parameter=True),
        lambda ps: ps.clip_(1.0),
        lambda ps: ps.gram(),
        lambda ps: ps.dot(),
        lambda ps: ps.stats(),
        lambda ps: ps.weighted_(torch.ones(4)),
        lambda ps: ps.audit(),
    ):
        x, model = inputs(4, 6), cut(plain=False)
        ps = gradrein.per_sample(model(x).square().sum(1), model)
        if dist.get_rank() == 1:
            x += 1
        all_raise(
            lambda _, ps=ps, ask=ask: ask(ps), 1, "InplaceModifiedError", "changed in place", list(model.parameters())
        )


def arguments():
    """Arguments of `per_sample` itself, and what it reads of the graph."""
    model = cut()
    losses = model(inputs(4, 6)).square().sum(1)
    cases = [
        (lambda odd: gradrein.per_sample(None if odd else losses, model), "ArgumentTypeError", "must be a tensor"),
        (lambda odd: gradrein.per_sample(losses.sum() if odd else losses, model), "ArgumentError", "a single number"),
        (
            lambda odd: gradrein.per_sample(losses.detach() if odd else losses, model),
            "NoGraphError",
            "no recorded graph",
        ),
        (lambda odd: gradrein.per_sample(losses, 3 if odd else model), "GradientTypeError", "`parameters` must be"),
        (
            lambda odd: gradrein.per_sample(losses, [3] if odd else model),
            "GradientTypeError",
            "is not a tensor but int",
        ),
        (lambda odd: gradrein.per_sample(losses, model, scaler=3 if odd else None), "ArgumentTypeError", "`scaler` is"),
        (
            lambda odd: gradrein.per_sample(losses, model, sample_groups=torch.arange(3 if odd else 4)),
            "ArgumentError",
            "`sample_groups` must have",
        ),
        (
            lambda odd: gradrein.per_sample(losses, model, memory_budget=-1 if odd else 0),
            "ArgumentError",
            "`memory_budget`",
        ),
    ]
    for who in (0, 1):
        for call, kind, reason in cases:
            all_raise(call, who, kind, reason, list(model.parameters()))
    for setting in ("allow_coupling", "allow_opaque", "retain_graph"):
        all_raise_disagreement(lambda odd, s=setting: gradrein.per_sample(losses, model, **{s: odd}), f"`{setting}`")
    all_raise_disagreement(
        lambda odd: gradrein.per_sample(losses, dict(model.named_parameters()) if odd else model), "is a module"
    )
    x = inputs(4, 6)
    made = [checkpoint(model, x, use_reentrant=False), model(x)]
    all_raise_disagreement(lambda odd: gradrein.per_sample(made[odd].square().sum(1), model), "packed")
    cutting(model)
    ps = gradrein.per_sample(losses, model)
    torch.testing.assert_close(ps.norms(), lengths(alone(m := Mlp(), m(x).square().sum(1))))


def cutting(model):
    """One rank uses shards as if they were whole."""
    mesh, x = tensor_mesh(), inputs(4, 6)
    wide = nn.Parameter(distribute_tensor(torch.ones(8, 6, dtype=torch.float64), mesh, [Shard(0)]))
    part = x @ wide.to_local().T
    made = [DTensor.from_local(part, mesh, [Partial()]).full_tensor(), part]
    all_raise(
        lambda odd: gradrein.per_sample(made[odd].square().sum(1), {"w": wide}),
        1,
        "UnsupportedOperationError",
        "the losses, without a reduction over ranks",
        list(model.parameters()),
    )


def all_raise_disagreement(call, what):
    text = refused(lambda: call(int(dist.get_rank() == 1)), "RankError")
    assert "do not agree on" in text
    assert what in text


def spread(mesh, way):
    """A model over both dimensions of a mesh, and the process group of its samples."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Mlp(), mesh["tp"], plan)
    if way == "fsdp":
        return fully_shard(model, mesh=mesh["dp"]), None
    return model, mesh["dp"].get_group()


def two_dimensions(way):
    """An error of one rank, or of one row, stops all rows; and then the next step is right."""
    mesh = grid()
    row, rank = mesh.get_local_rank("dp"), dist.get_rank()
    model, group = spread(mesh, way)
    parts = [inputs(4, 6, seed=i) for i in range(2)]
    each = lengths(alone(m := Mlp(), m(torch.cat(parts)).square().sum(1)))

    def ask(x=parts[row]):
        return gradrein.per_sample(model(x).square().sum(1), model, process_group=group)

    torch.testing.assert_close(ask().norms(gathered=True), each)
    text = refused(lambda: ask(parts[row] + (rank == 3)), "RankError")  # other samples on a rank of the second row
    assert "is not the same on all ranks" in text
    assert "could not exchange" not in text
    parameters = list(model.parameters())
    losses = model(parts[row]).square().sum(1)
    for bad, kind in ((losses.sum(), "ArgumentError"), (None, "ArgumentTypeError")):
        all_of_them(lambda bad=bad: gradrein.per_sample(bad if rank == 3 else losses, model, process_group=group), kind)
    for name in ("a negative limit", "too many weights"):
        call, kind, reason = QUESTIONS[name]
        for known in (False, True):
            ps = ask()
            if known:
                ps.norms()
            all_of_them(lambda ps=ps, call=call: call(ps, rank == 2), kind, reason, 2)
    torch.testing.assert_close(ask().norms(gathered=True), each)
    assert all(p.grad is None for p in parameters)


def all_of_them(call, kind, reason="", who=3):
    text = refused(call, kind if dist.get_rank() == who else "RankError")
    assert reason in text
    assert "could not exchange" not in text


def data_parallel():
    """Samples on each rank, and no tensor parallelism."""
    model = Mlp()
    for name in ("a negative limit", "a limit of another type", "an unknown mode", "too many weights", "no weights"):
        ask, kind, reason = QUESTIONS[name]
        ps = gradrein.per_sample(model(inputs(4, 6)).square().sum(1), model, process_group=dist.group.WORLD)
        all_raise(lambda odd, ps=ps, ask=ask: ask(ps, odd), 1, kind, reason, list(model.parameters()))
    all_raise(lambda odd: ps.clip_(1.0, gamma=-1 if odd else 0), 1, "ArgumentError", "gamma is a number")


def clipping():
    """Arguments of the clipping functions, on shards of one mesh and on shards beside copies."""
    mesh = tensor_mesh()
    for dtype in (torch.float32, torch.float64):
        for places in ([Shard(0)], [Shard(0), Replicate()], [Shard(0), Partial()]):
            weights = {f"w{i}": _spread(mesh, place, dtype) for i, place in enumerate(places)}
            _refused_clipping(weights)


def _spread(mesh, place, dtype):
    grad = DTensor.from_local(torch.ones(2, 2, dtype=dtype), mesh, [place])
    weight = nn.Parameter(
        torch.zeros_like(grad.redistribute(placements=[place if place != Partial() else Replicate()]))
    )
    weight.grad = grad
    return weight


def _refused_clipping(weights):
    cases = [
        (lambda odd: gradrein.clip_grad_norm_(weights.values(), -1.0 if odd else 1.0), "ArgumentError", "zero or more"),
        (lambda odd: gradrein.clip_grad_norm_(weights, "a" if odd else 1.0), "ArgumentError", "`max_norm` is a number"),
        (lambda odd: gradrein.clip_grad_norm_(weights, 1.0, 0 if odd else 2), "ArgumentError", "greater than zero"),
        (
            lambda odd: gradrein.get_total_norm([w.grad for w in weights.values()], None if odd else 2.0),
            "ArgumentTypeError",
            "the order of a norm",
        ),
        (
            lambda odd: gradrein.clip_(weights, gradrein.by_norm(1.0), nonfinite="x" if odd else "raise"),
            "ArgumentError",
            "`nonfinite` is one of",
        ),
        (lambda odd: gradrein.clip_(weights, "x" if odd else gradrein.by_norm(1.0)), "ArgumentError", "x"),
        (lambda odd: gradrein.clip_(weights, 3 if odd else gradrein.by_norm(1.0)), "ArgumentTypeError", "policy"),
        (
            lambda odd: gradrein.clip_(iter(weights.items()), {"v" if odd else "*": gradrein.by_norm(1.0)}),
            "ArgumentError",
            "pattern",
        ),
    ]
    is_partial = any(w.grad.placements == (Partial(),) for w in weights.values())  # the calls are compared earlier
    for call, kind, reason in cases[: -2 if is_partial else None]:
        for who in (0, 1):
            all_raise(call, who, kind, reason, list(weights.values()))
    gradrein.clip_(weights, gradrein.by_norm(1e6))
