"""What the ranks run: per-sample gradients of a batch cut over ranks, against one process that has all of it.

The twin is slow and plain: one backward pass for each sample of the whole batch, and the formula written out.
"""

import contextlib
import dataclasses
import os
import signal
import time

import placements
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein.persample.gate import ranks as _sums

BATCHES = {
    "uneven": [3, 5, 1, 2],
    "empty": [4, 0, 3, 0],
    "none but one": [0, 2, 0, 0],
    "several digits": [1, 40, 2, 3],
    "two at least": [3, 5, 2, 4],
}


class Odd(nn.Module):
    """A block with an op that has no rule: it is run once per sample, when asked, outside of the engine."""

    def __init__(self):
        super().__init__()
        self.first, self.places = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.cdist(torch.tanh(self.first(x)), self.places)


class Net(nn.Module):
    """Blocks that FSDP takes one by one, a norm layer, a parameter nobody uses."""

    def __init__(self, checkpointed=False, odd=False, early_stop=True):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            Odd() if odd else nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 6))
            for _ in range(2)
        )
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.checkpointed, self.early_stop = checkpointed, early_stop
        self.double()

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed:
                x = x + checkpoint(block, x, use_reentrant=False, early_stop=self.early_stop)
            else:
                x = x + block(x)
        return self.head(x)


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def last_dimension(p):
    """FSDP cuts other dimensions than the first only into equal parts."""
    return Shard(p.dim() - 1) if p.shape[-1] % dist.get_world_size() == 0 else Shard(0)


WRAPPED = {
    "ddp": lambda: DistributedDataParallel(Net()),
    "ddp, finds unused": lambda: DistributedDataParallel(Net(), find_unused_parameters=True),
    "ddp, bucket views": lambda: DistributedDataParallel(Net(), gradient_as_bucket_view=True),
    "fsdp": lambda: sharded(Net(), line()),
    "fsdp, kept after forward": lambda: sharded(Net(), line(), reshard_after_forward=False),
    "fsdp, one for all": lambda: fully_shard(Net(), mesh=line()),
    "fsdp, other dimension": lambda: sharded(Net(), line(), shard_placement_fn=last_dimension),
    "fsdp, checkpoint": lambda: sharded(Net(checkpointed=True), line()),
    "fsdp, odd": lambda: sharded(Net(odd=True), line()),
    "fsdp, odd, checkpoint": lambda: sharded(Net(True, odd=True), line()),
    "fsdp, odd, checkpoint to the end": lambda: sharded(Net(True, odd=True, early_stop=False), line()),
    "fsdp, odd, checkpoint, kept": lambda: sharded(Net(True, odd=True), line(), reshard_after_forward=False),
    "fsdp, odd, checkpoint, in two steps": lambda: sharded(Net(True, odd=True), line(), reshard_after_forward=2),
    "hsdp": lambda: sharded(Net(), grid()),
    "hsdp, checkpoint": lambda: sharded(Net(checkpointed=True), grid()),
    "fsdp, in two steps": lambda: sharded(Net(), line(), reshard_after_forward=2),
}


def twin(wrapped):
    """The same model in one process."""
    return Net(odd="odd" in wrapped)


QUESTIONS = {
    "flat": lambda ps: ps.clip_(0.7),
    "per parameter": lambda ps: ps.clip_(0.2, per_parameter=True),
    "automatic": lambda ps: ps.clip_(0.7, gamma=0.1),
    "expected number": lambda ps: ps.clip_(0.7, divide_by=64),
    "quantile": lambda ps: ps.clip_(ps.norms(gathered=True).quantile(0.4)),
    "weights": lambda ps: ps.weighted_(torch.arange(1.0, len(ps) + 1)),
    "function": lambda ps: ps.weighted_(lambda norms: norms.softmax(0)),
}


def batch(name, step=0):
    """The samples of each rank."""
    generator = torch.Generator().manual_seed(step)
    sizes = BATCHES[name][: dist.get_world_size()]
    return [
        (torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def losses_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def one_by_one(model, parts):
    """Every sample's gradient, by a backward pass of its own: name -> (samples, *shape)."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows = []
    for loss in losses_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])):
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def lengths(each):
    return torch.cat([g.flatten(1) for g in each.values()], 1).norm(dim=1)


def expected(question, each, parts):
    """What one process writes: the formulas, plainly."""
    norms = lengths(each)
    count = len(norms)
    weights = {
        "flat": (0.7 / norms).clamp(max=1) / count,
        "automatic": 0.7 / (norms + 0.1) / count,
        "expected number": (0.7 / norms).clamp(max=1) / 64,
        "quantile": (norms.quantile(0.4) / norms).clamp(max=1) / count,
        "weights": torch.cat([torch.arange(1.0, len(x) + 1) for x, _ in parts]).double(),
        "function": norms.softmax(0),
    }
    if question == "per parameter":
        own = {name: (0.2 / g.flatten(1).norm(dim=1)).clamp(max=1) / count for name, g in each.items()}
        return {name: torch.tensordot(own[name], g, 1) for name, g in each.items()}
    return {name: torch.tensordot(weights[question], g, 1) for name, g in each.items()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def named(model):
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def assert_written(model, wanted):
    """`.grad` is as one process writes it, of the parameter's own kind, and the same bits on all ranks."""
    for name, p in named(model).items():
        if name.startswith("unused"):
            assert p.grad is None
            continue
        assert type(p.grad) is type(p.data)
        found = whole(p.grad)
        torch.testing.assert_close(found, wanted[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: name + text)
        assert_same_bits(found)


def assert_same_bits(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    assert all(torch.equal(row, rows[0]) for row in rows)


def same_as_one_process(wrapped, sizes):
    """Every question, twice over, so that the second adds to what the first wrote; steps and backward in between."""
    model, alone = WRAPPED[wrapped](), twin(wrapped)
    optimizers = [torch.optim.SGD([*m.parameters()], lr=0.1) for m in (model, alone)]
    rank = dist.get_rank()
    for step, (question, ask) in enumerate(QUESTIONS.items()):
        parts = batch(sizes, step)
        each = one_by_one(alone, parts)
        ps = gradrein.per_sample(losses_of(model, *parts[rank]), model)
        before = sum(len(x) for x, _ in parts[:rank])
        torch.testing.assert_close(ps.norms(), lengths(each)[before : before + len(ps)])
        torch.testing.assert_close(ps.norms(gathered=True), lengths(each))
        norms = ps.norms(per_parameter=True)
        for name, g in ps.grads().items():
            torch.testing.assert_close(g, each[name.removeprefix("module.")][before : before + len(ps)])
            torch.testing.assert_close(norms[name], g.flatten(1).norm(dim=1))
        ps.audit()
        wanted = expected(question, each, parts)
        ask(ps)
        assert_written(model, wanted)
        ask(ps)
        assert_written(model, {name: 2 * g for name, g in wanted.items()})
        for name, p in alone.named_parameters():
            p.grad = None if name.startswith("unused") else 2 * wanted[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q)
    if wrapped not in ("ddp", "ddp, bucket views"):  # those do not allow an unused parameter
        backward_still_works(model, alone)


def backward_still_works(model, alone):
    """An ordinary step after per-sample ones, and one after a look at the norms."""
    parts = batch("uneven", 77)
    rank, size = dist.get_rank(), dist.get_world_size()
    for look in (False, True):
        model.zero_grad()
        losses = losses_of(model, *parts[rank])
        if look:
            gradrein.per_sample(losses, model).norms()
        losses.sum().backward()
        each = one_by_one(alone, parts)
        assert_written(model, {name: g.sum(0) / size for name, g in each.items()})


class Branches(nn.Module):
    """Which branch is used depends on the rank; one is used by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(5)).double()

    def forward(self, x):
        return self.branches[dist.get_rank()](x)


def used_on_one_rank():
    """A parameter counts as zeros where it is not used, and has no gradient if no rank uses it."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    parts, size = batch("uneven"), dist.get_world_size()
    ps = gradrein.per_sample(losses_of(model, *parts[dist.get_rank()]), model)
    assert len(ps.norms(per_parameter=True)) == 2
    ps.clip_(0.7)
    total = sum(len(x) for x, _ in parts)
    for rank, branch in enumerate(model.module.branches):
        if rank >= size:
            assert branch.weight.grad is None
            continue
        x, y = parts[rank]
        found = one_by_one(branch, [(x, y)])
        each = found["weight"]
        factor = (0.7 / lengths(found)).clamp(max=1) / total
        torch.testing.assert_close(branch.weight.grad, torch.tensordot(factor, each, 1))
        assert_same_bits(branch.weight.grad)


def scaled(wrapped):
    """The scaler's step unscales what was written."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, parts = WRAPPED[wrapped](), batch("uneven")
    each = one_by_one(twin(wrapped), parts)
    ps = gradrein.per_sample(scaler.scale(losses_of(model, *parts[dist.get_rank()])), model, scaler=scaler)
    ps.clip_(0.7)
    assert_written(model, {name: 1024 * g for name, g in expected("flat", each, parts).items()})
    torch.testing.assert_close(ps.norms(gathered=True), lengths(each))


def several_messages():
    """Sums that do not fit into one message, of parameters of two dtypes."""
    rank, parts, room = dist.get_rank(), batch("uneven"), _sums._BUCKET
    model, alone = Net(), Net()
    for net in (model, alone):
        net.head.weight.data = net.head.weight.data.float()
        net.head.forward = lambda x, head=net.head: F.linear(x, head.weight.double(), head.bias)
    _sums._BUCKET = 50
    try:
        with counted() as calls:
            ps = gradrein.per_sample(losses_of(model, *parts[rank]), model, process_group=dist.group.WORLD)
            ps.clip_(0.7)
    finally:
        _sums._BUCKET = room
    assert calls.count("all_reduce") > 3
    wanted = expected("flat", {name: g.double() for name, g in one_by_one(alone, parts).items()}, parts)
    for name, p in model.named_parameters():
        if not name.startswith("unused"):
            torch.testing.assert_close(p.grad, wanted[name].to(p.dtype))


def half():
    """Mixed precision: whole copies in bfloat16, gradients added up in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, alone = sharded(Net().float(), line(), mp_policy=policy), Net().bfloat16()
    parts = [(x.bfloat16(), y) for x, y in batch("uneven")]
    ps = gradrein.per_sample(losses_of(model, *parts[dist.get_rank()]), model)
    ps.audit()
    each = {name: g.float() for name, g in one_by_one(alone, parts).items()}
    torch.testing.assert_close(ps.norms(gathered=True), lengths(each), rtol=3e-2, atol=1e-3)
    ps.weighted_(torch.ones(len(ps)))
    for name, p in model.named_parameters():
        if not name.startswith("unused"):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.full_tensor(), each[name].sum(0), rtol=5e-2, atol=5e-2)


def other_ways_to_say_it():
    """Parameters in a list, a part of the model, a group of one's own, a rank that ran nothing."""
    rank, parts = dist.get_rank(), batch("uneven")
    each = one_by_one(Net(), parts)
    for kept in (True, False):
        model = sharded(Net(), line(), reshard_after_forward=kept)
        losses = losses_of(model, *parts[rank])
        gradrein.per_sample(losses, [*model.parameters()]).clip_(0.7)
        assert_written(model, expected("flat", each, parts))
        model.zero_grad()
        gradrein.per_sample(losses_of(model, *parts[rank]), model, retain_graph=False).clip_(0.7)
        assert_written(model, expected("flat", each, parts))
        head = gradrein.per_sample(losses, model.head).norms(gathered=True)
        torch.testing.assert_close(head, lengths({k: g for k, g in each.items() if k.startswith("head")}))
    plain = Net()
    gradrein.per_sample(losses_of(plain, *parts[rank]), plain, process_group=dist.group.WORLD).clip_(0.7)
    assert_written(plain, expected("flat", each, parts))
    plain.zero_grad()
    gradrein.per_sample(losses_of(plain, *parts[rank]), plain, process_group=line()).clip_(0.7)
    assert_written(plain, expected("flat", each, parts))
    plain.zero_grad()
    ps = gradrein.per_sample(losses_of(plain, *parts[rank]), plain)  # no group: this process alone
    assert len(ps.norms(gathered=True)) == len(ps)
    wrapper = nn.ModuleDict({"net": DistributedDataParallel(Net())})
    losses = losses_of(wrapper["net"], *parts[rank]) if rank else torch.zeros(0)
    ps = gradrein.per_sample(losses, wrapper)
    ps.audit()
    ps.clip_(0.7)
    rest = [(x[:0], y[:0]) if r == 0 else (x, y) for r, (x, y) in enumerate(parts)]
    assert_written(wrapper["net"], expected("flat", one_by_one(Net(), rest), rest))


def frozen():
    """Only parameters that FSDP ignores are trained, as adapters are: the samples still lie on all ranks."""
    rank, parts = dist.get_rank(), batch("several digits")
    model = Net()
    for p in [*model.blocks.parameters(), *model.unused.parameters()]:
        p.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=line())
    fully_shard(model, mesh=line(), ignored_params=set(model.head.parameters()))
    each = one_by_one(Net(), parts)
    own = {name: g for name, g in each.items() if name.startswith("head")}
    for asked in (model, [*model.head.parameters()]):
        model.zero_grad()
        ps = gradrein.per_sample(losses_of(model, *parts[rank]), asked)
        torch.testing.assert_close(ps.norms(gathered=True), lengths(own))
        ps.clip_(0.7)
        wanted = expected("flat", own, parts)
        for name, p in model.head.named_parameters(prefix="head"):
            torch.testing.assert_close(p.grad, wanted[name])


def two_meshes():
    """A block on a mesh of its own: together they are refused, each by itself is right."""
    rank, parts = dist.get_rank(), batch("uneven")
    model = Net()
    fully_shard(model.blocks[0], mesh=grid()["shard"])
    fully_shard(model, mesh=line())
    losses = losses_of(model, *parts[rank])
    assert "the parameters are on different meshes" in refused(lambda: gradrein.per_sample(losses, model))
    ps = gradrein.per_sample(losses, model.head)
    each = {name: g for name, g in one_by_one(Net(), parts).items() if name.startswith("head")}
    torch.testing.assert_close(ps.norms(gathered=True), lengths(each))


def pending(wrapped):
    """Micro-batches that FSDP has not reduced yet are left to it."""
    model, parts = WRAPPED[wrapped](), batch("uneven")
    rank, size = dist.get_rank(), dist.get_world_size()
    model.set_requires_gradient_sync(False)
    losses_of(model, *parts[rank]).sum().backward()
    model.set_requires_gradient_sync(True)
    losses = losses_of(model, *parts[rank])
    gradrein.per_sample(losses, model).norms()
    assert all(p.grad is None for p in model.parameters() if hasattr(p, "full_tensor"))
    losses.sum().backward()
    assert_written(model, {name: 2 * g.sum(0) / size for name, g in one_by_one(Net(), parts).items()})


def static_graph():
    """Once DDP has seen its first backward pass, its graph may be split."""
    model, parts = DistributedDataParallel(Net(), static_graph=True), batch("uneven")
    rank, size = dist.get_rank(), dist.get_world_size()
    each = one_by_one(Net(), parts)
    text = refused(lambda: gradrein.per_sample(losses_of(model, *parts[rank]), model))
    assert "static_graph=True" in text
    assert "`model.module`" in text
    gradrein.per_sample(losses_of(model.module, *parts[rank]), model).clip_(0.7)
    assert_written(model, expected("flat", each, parts))
    model = DistributedDataParallel(Net(), static_graph=True)
    for split in (False, True, False):
        model.zero_grad()
        losses = losses_of(model, *parts[rank])
        if split:
            gradrein.per_sample(losses, model).clip_(0.7)
            assert_written(model, expected("flat", each, parts))
        else:
            losses.sum().backward()
            assert_written(model, {name: g.sum(0) / size for name, g in each.items()})


def without_sync():
    """Inside `no_sync` too the sum is over all ranks: it is not DDP that adds up. Later backward passes are as ever."""
    model, parts = DistributedDataParallel(Net(), find_unused_parameters=True), batch("uneven")
    rank = dist.get_rank()
    with model.no_sync():
        gradrein.per_sample(losses_of(model, *parts[rank]), model).clip_(0.7)
    assert_written(model, expected("flat", one_by_one(Net(), parts), parts))
    backward_still_works(model, Net())


def refused(ask, kind="UnsupportedOperationError"):
    found, text = placements.error(ask)
    assert found == kind, text
    return text


def refusals():
    """Everything here is the same on all ranks, and nothing was written."""
    rank, parts = dist.get_rank(), batch("uneven")
    x, y = parts[rank]
    weight = nn.Parameter(distribute_tensor(torch.ones(3, 6, dtype=torch.float64), line(), [Replicate()]))
    data = distribute_tensor(torch.ones(4, 6, dtype=torch.float64), line(), [Shard(0)])
    text = refused(lambda: gradrein.per_sample((data @ weight.T).sum(1), {}))
    assert "`losses` is a DTensor" in text
    flat = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    for asked in (flat, flat.blocks[0]):
        text = refused(lambda asked=asked: gradrein.per_sample(losses_of(flat, x, y), asked))
        assert "Use torch.distributed.fsdp.fully_shard instead" in text
    model = sharded(Net(), line())
    text = refused(
        lambda: gradrein.per_sample(losses_of(model, x, y), model, process_group=dist.group.WORLD), "ArgumentError"
    )
    assert "Leave `process_group` out" in text
    others = dist.new_group([1])
    if rank == 0:
        plain = Net()
        text = refused(
            lambda: gradrein.per_sample(losses_of(plain, x, y), plain, process_group=others), "ArgumentError"
        )
        assert "that this rank is part of" in text
    text = refused(lambda: gradrein.call_for_per_sample_grads(model))
    assert "Use gradrein.per_sample" in text


def disagreements():
    """Ranks that say different things find out, all of them, before anything is written."""
    rank, parts = dist.get_rank(), batch("uneven")
    model = DistributedDataParallel(Net())
    losses = losses_of(model, *parts[rank])
    ps = gradrein.per_sample(losses, model)
    text = refused(lambda: ps.clip_(ps.norms().quantile(0.5)), "RankError")
    assert "do not agree on max_norm: " in text
    assert "take it of `norms(gathered=True)`" in text
    text = refused(lambda: ps.clip_(1.0) if rank else ps.weighted_(torch.ones(len(ps))), "RankError")
    assert "do not agree on the call: " in text
    fewer = gradrein.per_sample(losses, [*model.parameters()][rank > 0 :], process_group=dist.group.WORLD)
    assert "do not agree on the parameters" in refused(lambda: fewer.clip_(1.0), "RankError")
    groups = torch.arange(len(ps)) + (100 * rank if rank != 1 else 1)
    torn = gradrein.per_sample(losses, model, sample_groups=groups)
    for ask in (lambda: torn.clip_(1.0), lambda: torn.norms(gathered=True)):
        assert "group 1 of `sample_groups` has samples on several ranks" in refused(ask, "ArgumentError")
    x, y = parts[rank]
    spoiled = x * float("nan") if rank == 1 else x
    ps = gradrein.per_sample(losses_of(model, spoiled, y), model)
    text = refused(lambda: ps.clip_(1.0), "NonFiniteGradientError")
    assert f"the gradients of 5 of {sum(len(x) for x, _ in parts)} samples are NaN or infinite" in text
    assert all(p.grad is None for p in model.parameters())
    ps.clip_(0.7, nonfinite="drop")
    rest = [(x[:0], y[:0]) if r == 1 else (x, y) for r, (x, y) in enumerate(parts)]
    each = one_by_one(model.module, rest)
    share = sum(len(x) for x, _ in rest) / sum(len(x) for x, _ in parts)
    assert_written(model, {name: share * g for name, g in expected("flat", each, rest).items()})


def statistics(wrapped):
    """Of the samples here: no other rank is asked, but to gather parameters."""
    x, y = batch("two at least")[dist.get_rank()]
    model, alone = WRAPPED[wrapped](), twin(wrapped)
    ps, same = (gradrein.per_sample(losses_of(net, x, y), net) for net in (model, alone))
    assert dataclasses.asdict(ps.stats()) == pytest.approx(dataclasses.asdict(same.stats()), rel=1e-9)
    torch.testing.assert_close(ps.gram(), same.gram())
    torch.testing.assert_close(ps.cosine(), same.cosine())


def asked_too_late():
    """What fully_shard gathers after a step is not what the graph was recorded with."""
    model, parts = sharded(Net(), line()), batch("uneven")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ps = gradrein.per_sample(losses_of(model, *parts[dist.get_rank()]), model)
    ps.clip_(1.0)
    optimizer.step()
    ps.norms()  # known
    assert "Query before optimizer.step()" in refused(ps.grads, "InplaceModifiedError")


def whole_groups():
    """Groups of samples that do not cross ranks: one norm and one share in the mean for each."""
    rank, parts = dist.get_rank(), batch("uneven")
    model, each = DistributedDataParallel(Net()), one_by_one(Net(), parts)
    numbers = [10 * r + torch.arange(len(x)) // 2 for r, (x, _) in enumerate(parts)]
    ps = gradrein.per_sample(losses_of(model, *parts[rank]), model, sample_groups=numbers[rank])
    together = torch.cat(numbers)
    each = {name: torch.stack([g[together == n].sum(0) for n in together.unique()]) for name, g in each.items()}
    torch.testing.assert_close(ps.norms(gathered=True), lengths(each))
    ps.clip_(0.7)
    assert_written(model, expected("flat", each, parts))


# By the name that is counted; two have others on older torch.
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    **{name: name for name in ("all_gather_single", "all_reduce", "all_gather", "broadcast", "reduce_scatter_single")},
    "all_to_all_single": "all_reduce",  # a short one among few ranks of gloo
}


@contextlib.contextmanager
def counted():
    """Count the collectives that are called, by name."""
    kept, calls = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}, []

    def counting(name):
        return lambda *args, **kwargs: (calls.append(COLLECTIVES[name]), kept[name](*args, **kwargs))[1]

    for name in kept:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, run in kept.items():
            setattr(dist, name, run)


def owners_are_known(wrapped):
    """What FSDP and DDP put between modules does not make a second step ask again."""
    model, parts = WRAPPED[wrapped](), batch("uneven")
    plans = [gradrein.per_sample(losses_of(model, *parts[dist.get_rank()]), model).plan() for _ in range(2)]
    if len(parts[dist.get_rank()][0]) > 1:
        assert "told apart: proved from the structure of the graph" in plans[1]


def hooks():
    """A hook of the user's is found beside and behind those of fully_shard; if allowed, it runs for each sample."""
    model, alone = WRAPPED["fsdp"](), Net()
    x, y = batch("uneven")[0]

    def acts_once():
        left = [1]
        return lambda g: g * g.norm() if left and left.pop() else None

    def losses(net, behind, beside):
        handle = net.blocks[0][1].register_forward_hook(lambda _, __, out: (out.register_hook(beside), None)[1])
        out = net(x)
        handle.remove()
        out.register_hook(behind)
        return F.cross_entropy(out, y, reduction="none")

    for behind, beside in [(acts_once, lambda: lambda _: None), (lambda: lambda _: None, acts_once)]:
        each = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, used(alone), retain_graph=True)])
                for loss in losses(alone, behind(), beside())
            ]
        )
        hooked = losses(model, behind(), beside())
        assert "a hook is registered" in refused(lambda hooked=hooked: gradrein.per_sample(hooked, model))
        found = gradrein.per_sample(hooked, model, allow_opaque=True).grads()
        torch.testing.assert_close(torch.cat([g.flatten(1) for g in found.values()], 1), each)


def used(net):
    return [p for name, p in net.named_parameters() if "unused" not in name]


def collectives():
    """One short message and one sum; the norms of all ranks are one more."""
    model, parts = DistributedDataParallel(Net()), batch("uneven")
    ps = gradrein.per_sample(losses_of(model, *parts[dist.get_rank()]), model)
    with counted() as calls:
        ps.norms()
        ps.grads()
        ps.audit()
    assert calls == []
    with counted() as calls:
        ps.clip_(1.0)
    assert calls == ["all_reduce", "all_reduce"]
    with counted() as calls:
        ps.weighted_(lambda norms: norms)
    assert calls == ["all_reduce"] * 4


def clip_or_error(wrapped, fault):
    """Clip where one rank does not come; what was raised, how long it took, whether gradients are as they were."""
    model, parts = WRAPPED[wrapped](), batch("uneven")
    losses = losses_of(model, *parts[dist.get_rank()])
    start = time.monotonic()
    if dist.get_rank() == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        losses = losses.detach()

    def ask():
        gradrein.per_sample(losses, model).clip_(1.0)

    kind, text = placements.error(ask)
    return kind, text, time.monotonic() - start, all(p.grad is None for p in model.parameters())


def tensor_parallel():
    """Refused on all ranks, whichever of its parameters are asked about, also beside data parallelism."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    x = torch.ones(3, 6, dtype=torch.float64)
    for wrap in (lambda model: model, lambda model: fully_shard(model, mesh=mesh["dp"])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 2)).double()
        model = wrap(parallelize_module(model, mesh["tp"], plan))
        losses = model(x).square().sum(1)
        for asked in (model, model[3]):
            for options in ({}, {"allow_opaque": True, "allow_coupling": True}):
                text = refused(lambda a=asked, o=options, one=losses: gradrein.per_sample(one, a, **o))
                assert "is a DTensor, as in tensor parallelism" in text
                assert "fully_shard or DistributedDataParallel instead" in text
        losses.sum().backward()
    local = nn.Parameter(distribute_tensor(torch.ones(6, 6, dtype=torch.float64), line(), [Shard(0)]))
    part = x @ local.to_local().T
    assert "parameter `w` is a DTensor" in refused(lambda: gradrein.per_sample(part.sum(1), {"w": local}))
    assert "parameter `w` is a DTensor" in refused(lambda: gradrein.per_sample(torch.zeros(0), {"w": local}))
    made = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    whole = DTensor.from_local(x @ made, line(), [Partial()]).full_tensor()
    assert "a value that the losses" in refused(lambda: gradrein.per_sample(whole.sum(1), {"w": made}))


class Stage(nn.Module):
    def __init__(self, last):
        super().__init__()
        torch.manual_seed(1 + last)
        self.layer = nn.Linear(6, 3 if last else 6).double()

    def forward(self, x):
        return torch.tanh(self.layer(x))


def pipeline():
    """On the last stage the loss function of a schedule is given a graph that begins with what another stage sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, texts = Stage(rank == size - 1), []

    def loss(output, target):
        losses = (output - target).square().sum(1)
        texts.append(refused(lambda: gradrein.per_sample(losses, module)))
        return losses.sum()

    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=size, loss_fn=loss)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # an older torch sends an int64 first, and receives the default
    try:
        if rank == 0:
            schedule.step(torch.ones(2 * size, 6))
        else:
            schedule.step(target=torch.ones(2 * size, 3)) if rank == size - 1 else schedule.step()
    finally:
        torch.set_default_dtype(default)
    assert (len(texts) >= 2) == (rank == size - 1)  # torch runs it once more, to see what comes out
    assert all("Distribute the model with fully_shard instead" in text for text in texts)


def projected(wrapped, path):
    """Each rank projects its own samples, as one process does, and adds them to one store."""
    model, parts = WRAPPED[wrapped](), batch("uneven")
    mine, x = dist.get_rank(), torch.cat([x for x, _ in parts])
    alone = twin(wrapped)
    one = gradrein.per_sample(losses_of(alone, x, torch.cat([y for _, y in parts])), alone)
    start = sum(len(x) for x, _ in parts[:mine])
    own = slice(start, start + len(parts[mine][0]))
    for kind, size in (("sparse", 40), ("factored", 3)):
        ps = gradrein.per_sample(losses_of(model, *parts[mine]), model)
        wanted = one.project(size, kind=kind, seed=4)
        found = ps.project(size, kind=kind, seed=4)
        torch.testing.assert_close(found, wanted[own])
        assert {**found.projection, "weights": 0} == {**wanted.projection, "weights": 0}
        assert found.projection["weights"] == wanted.projection["weights"]
        store = gradrein.attribution.GradientStore(f"{path}/{kind}")
        store.add(range(own.start, own.stop), found)
        dist.barrier()
        scores, ids = store.search(wanted, k=1)
        assert ids.view(-1).tolist() == list(range(len(x)))
        torch.testing.assert_close(ps.cross(ps), one.gram()[own, own])
