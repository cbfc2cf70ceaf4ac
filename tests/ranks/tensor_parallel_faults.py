"""What the ranks run: tensor-parallel models that are no one model, or not on the same samples. Each is refused by all."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from persample_cases import lengths, refused, whole
from tensor_parallel_cases import grid, tensor_mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradrein

NOT_SAME = "is not the same on all ranks of the tensor-parallel mesh"


def inputs(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Mlp(nn.Module):
    """A plain layer, dropout, then a layer that is cut by columns and one by rows."""

    def __init__(self, dropout=0.0, inside=0.0, plain=True, checkpointed=False):
        super().__init__()
        torch.manual_seed(1)
        self.plain = nn.Linear(6, 6) if plain else nn.Identity()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.dropout, self.inside, self.checkpointed = dropout, inside, checkpointed
        self.double()

    def region(self, x):
        h = F.dropout(self.plain(x), self.dropout)
        return self.down(F.dropout(F.gelu(self.up(h)), self.inside))

    def forward(self, x):
        return checkpoint(self.region, x, use_reentrant=False) if self.checkpointed else self.region(x)


def cut(mesh=None, **options):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Mlp(**options), mesh or tensor_mesh(), plan)


def ask(model, x):
    return gradrein.per_sample(model(x).square().flatten(1).sum(1), model)


def alone(model, losses):
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def assert_same(ps, each):
    torch.testing.assert_close(ps.norms(), lengths(each))
    for name, g in ps.grads().items():
        torch.testing.assert_close(whole(g), each[name])


def different_copies():
    """Other samples, dropout masks of each rank, other plain parameters: before the cut layers, and the losses agree."""
    rank = dist.get_rank()
    for shape in [(4, 6), (4, 3, 6)]:
        for plain in (True, False):
            model = cut(plain=plain)
            text = refused(lambda s=shape, m=model: ask(m, inputs(*s, seed=rank)), "RankError")
            assert NOT_SAME in text
            assert "the same samples" in text
            ask(model, inputs(*shape)).audit()
    for seed, same in [(0, True), (rank, False)]:
        torch.manual_seed(1)
        model = cut(dropout=0.5)
        torch.manual_seed(seed)
        with contextlib.nullcontext() if same else pytest.raises(gradrein.errors.RankError, match=NOT_SAME):
            ask(model, inputs(4, 6)).audit()
    model = cut(inside=0.5)
    torch.manual_seed(rank)  # masks of shards: each rank its own
    ask(model, inputs(4, 6)).audit()
    model = cut()
    with torch.no_grad():
        model.plain.weight.add_(rank)
    assert NOT_SAME in refused(lambda: ask(model, inputs(4, 6)), "RankError")
    table = parallelize_module(
        nn.Embedding(8, 4), tensor_mesh(), RowwiseParallel(input_layouts=Replicate())
    )  # a word that no rank finds counts as zeros
    ids = torch.tensor([[0, 1], [2, 7], [5, 5]])
    ask(table, ids).audit()
    text = refused(lambda: ask(table, (ids + rank) % 8), "RankError")
    assert "which `EmbeddingBackward0` saved as `indices`" in text


def different_inside_a_checkpoint():
    rank = dist.get_rank()
    for seed, same in [(0, True), (rank, False)]:
        model = cut(dropout=0.5, checkpointed=True)
        torch.manual_seed(seed)
        with contextlib.nullcontext() if same else pytest.raises(gradrein.errors.RankError, match=NOT_SAME):
            ask(model, inputs(4, 6)).audit()


def losses_apart():
    """One loss differs, beside others of any size and dtype."""
    rank, model = dist.get_rank(), cut()
    for dtype, by in [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]:
        model = cut().to(dtype)
        losses = model(inputs(4, 6).to(dtype)).square().sum(1)
        losses = losses / losses.detach() * torch.tensor([1e6, 1, 1, 1e-6], dtype=dtype)
        gradrein.per_sample(losses, model)
        for sample in range(4):
            odd = losses + losses.detach() * by * rank * (torch.arange(4) == sample)
            text = refused(lambda odd=odd, m=model: gradrein.per_sample(odd, m), "RankError")
            assert "the tensor of losses " + NOT_SAME in text
        nan = losses.where((torch.arange(4) != 1) | (rank == 0), torch.nan)
        assert NOT_SAME in refused(lambda m=model, nan=nan: gradrein.per_sample(nan, m), "RankError")


def differ_by_rounding():
    """Ranks that have added up in another order are not refused."""
    rank = dist.get_rank()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = cut().to(dtype)
        x = inputs(4, 6).to(dtype)
        x[0, 0], x[1] = 100, 0
        each = ask(model, x.clone()).norms()
        ulp = torch.finfo(dtype).eps
        found = ask(model, x * (1 + 2 * ulp * rank)).norms()
        torch.testing.assert_close(found, each, rtol=20 * ulp, atol=20 * ulp)
        one = F.one_hot(torch.tensor(20), 24).view(4, 6)  # an element of a sample
        odd = x + rank * 0.2 * x[3].abs().max() * one
        assert NOT_SAME in refused(lambda m=model, odd=odd: ask(m, odd), "RankError")


def memory_nobody_wrote():
    """A recurrent layer keeps memory of which its library has written only parts."""
    torch.manual_seed(1)
    plain, model = nn.LSTM(6, 6, batch_first=True), cut(plain=False).float()
    both = nn.ModuleList([plain, model])
    for step in range(2):
        garbage = [torch.full((size,), float(dist.get_rank() + step)) for size in (1 << 12, 28672, 1 << 15) * 9]
        del garbage
        out = model(plain(inputs(4, 3, 6, dtype=torch.float32))[0])
        gradrein.per_sample(out.square().flatten(1).sum(1), both).audit()


def changed_in_place():
    """Inputs and activations that DTensors share memory with, changed after they were used."""
    for shape in [(4, 6), (4, 3, 6)]:
        for when in ("before", "after", "never"):
            x, model = inputs(*shape), cut(plain=False)
            losses = model(x).square().flatten(1).sum(1)
            if when == "before":
                x += 1
            with contextlib.ExitStack() as stack:
                if when != "never":
                    stack.enter_context(pytest.raises(gradrein.errors.InplaceModifiedError, match="changed in place"))
                ps = gradrein.per_sample(losses, model)
                if when == "after":
                    x += 1
                ps.norms()
    x = inputs(4, 6)
    x += 1  # before the forward pass
    assert_same(ask(cut(plain=False), x), alone(m := Mlp(plain=False), m(x).square().sum(1)))
    assert not x.requires_grad
    table = parallelize_module(nn.Embedding(8, 4), tensor_mesh(), RowwiseParallel(input_layouts=Replicate()))
    ids = torch.tensor([[0, 1], [2, 7], [5, 5]])
    ids += 0  # before the forward pass, which torch does not tell from after
    assert "ids.clone()" in refused(lambda: ask(table, ids), "InplaceModifiedError")
    ask(table, ids.clone()).audit()
    model = cut()
    h = model.plain(x)
    h += 1  # recorded, and before it is used
    ps = gradrein.per_sample(model.down(F.gelu(model.up(h))).square().sum(1), model)
    m = Mlp()
    assert_same(ps, alone(m, m.down(F.gelu(m.up(m.plain(x) + 1))).square().sum(1)))
    h = model.plain(inputs(4, 3, 6))
    up = model.up(h)
    h += 1
    losses = (model.down(F.gelu(up)).sum(-1) + h.sum(-1)).sum(1)
    assert "x = x + y" in refused(lambda: gradrein.per_sample(losses, model), "InplaceModifiedError")


def crossings():
    """What is whole is not used in parts, and parts are not used as if they were whole."""
    mesh, rank, x = tensor_mesh(), dist.get_rank(), inputs(4, 6)
    torch.manual_seed(1)
    weight, second = torch.randn(8, 6, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    wide = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    hidden = DTensor.from_local(x, mesh, [Replicate()]) @ wide.T
    everything = hidden.redistribute(placements=[Replicate()])
    for taken, place, said in [
        (
            everything.to_local() * (rank == 0),
            Partial(),
            "plain tensor, and used for one with placements [Partial(sum)]",
        ),
        (everything.to_local().chunk(2, 1)[rank], Shard(1), f"used for one with placements [{Shard(1)!r}]"),
        (everything.to_local() * hidden.to_local().sum(), Partial(), "`MulBackward0` uses it with parts"),
        (hidden.to_local(grad_placements=[Replicate()]), Shard(1), "to_local(grad_placements=[Replicate()])"),
        (hidden.to_local(), Partial("max"), "Replicate(), Shard() or Partial() with a sum"),
        (hidden.to_local(), Replicate(), "by DTensor.from_local with Replicate()"),
    ]:
        made = DTensor.from_local(taken, mesh, [place]).full_tensor().square().sum(1)
        text = refused(lambda made=made: gradrein.per_sample(made, {"w": wide}))
        assert said in text, text
    partial = DTensor.from_local(x @ wide.to_local().T @ torch.ones(4, 2).double(), mesh, [Partial()])
    text = refused(lambda: gradrein.per_sample(partial.to_local().square().sum(1), {"w": wide}))
    assert "partial sums" in text
    taken = everything.to_local(grad_placements=[Partial()])  # its gradient would count twice
    text = refused(lambda: gradrein.per_sample(taken.square().sum(1), {"w": wide}))
    assert "taken out by to_local(grad_placements=[Partial(sum)]) is made into the losses" in text
    # By hand and right: a layer by rows, and a parameter that each rank uses on its part.
    narrow = nn.Parameter(distribute_tensor(second, mesh, [Shard(1)]))
    scale = nn.Parameter(distribute_tensor(torch.rand(4, dtype=torch.float64), mesh, [Replicate()]))
    part = (x @ wide.to_local().T).tanh() * scale.to_local(grad_placements=[Partial()])
    made = DTensor.from_local(part @ narrow.to_local().T, mesh, [Partial()]).full_tensor()
    ps = gradrein.per_sample(made.square().sum(1), {"w": wide, "n": narrow, "s": scale})
    whole_ones = [t.clone().requires_grad_() for t in (weight, second, whole(scale.detach()))]
    losses = (((x @ whole_ones[0].T).tanh() * whole_ones[2].repeat(2)) @ whole_ones[1].T).square().sum(1)
    rows = [torch.autograd.grad(loss, whole_ones, retain_graph=True) for loss in losses]
    assert_same(ps, {name: torch.stack([row[i] for row in rows]) for i, name in enumerate("wns")})


def not_differentiable():
    """What torch cannot do with DTensors is said in our words."""
    mesh, x = tensor_mesh(), inputs(4, 6)
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(nn.Linear(6, 8).double(), mesh, plan)
    with loss_parallel():
        losses = F.cross_entropy(model(x), torch.tensor([0, 3, 7, 5]), reduction="none").full_tensor()
        ps = gradrein.per_sample(losses, model)
        ps.audit()
    for question in (lambda: gradrein.per_sample(losses, model), ps.audit):
        assert "inside `with loss_parallel():`" in refused(question)
    for op in (lambda h: h.cumprod(1), lambda h: h.split(4, 1)[0], lambda h: h.prod(1, keepdim=True)):
        try:
            losses = op(model(x)).full_tensor().sum(1)
        except NotImplementedError:
            continue  # by a torch that refuses it in the forward pass
        parameters = dict(model.named_parameters())
        try:
            rows = [torch.autograd.grad(loss, parameters.values(), retain_graph=True) for loss in losses]
        except Exception:
            text = refused(lambda losses=losses: gradrein.per_sample(losses, model))
            assert "an op on DTensors that torch cannot differentiate here" in text
        else:  # by a newer torch
            each = {name: torch.stack([whole(row[i]) for row in rows]) for i, name in enumerate(parameters)}
            assert_same(gradrein.per_sample(losses, model), each)


def two_dimensional_mesh():
    """A model cut over both dimensions; what differs along one of them is found by all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(1)
    weight = torch.randn(8, 6, dtype=torch.float64)
    wide = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Replicate()]))
    for seeds, same in [((0, 0, 0, 0), True), ((0, 0, 1, 1), False), ((0, 1, 0, 1), False), ((0, 0, 0, 1), False)]:
        x = inputs(4, 6, seed=seeds[dist.get_rank()])
        hidden = DTensor.from_local(x, mesh, [Replicate(), Replicate()]) @ wide.T
        losses = hidden.full_tensor().square().sum(1)
        if same:
            ps = gradrein.per_sample(losses, {"w": wide})
            w = weight.clone().requires_grad_()
            rows = [torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in (x @ w.T).square().sum(1)]
            assert_same(ps, {"w": torch.stack(rows)})
        else:
            refused(lambda losses=losses: gradrein.per_sample(losses, {"w": wide}), "RankError")


def data_parallel_wrapper():
    """DistributedDataParallel around a tensor-parallel model takes its parameters apart."""
    mesh = grid()
    model = cut(mesh["tp"])
    held = dict(model.named_parameters())
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    local = dict(wrapped.named_parameters())
    for parameters in (wrapped, local, held):
        text = refused(lambda p=parameters: gradrein.per_sample(wrapped(inputs(4, 6)).square().sum(1), p))
        assert "has replaced the DTensors of a tensor-parallel model" in text
        assert "fully_shard" in text


def summed_over_ranks():
    """A whole activation that each rank uses with its shard of the next layer; not, that each cuts by itself."""
    mesh, rank, x = tensor_mesh(), dist.get_rank(), inputs(4, 6)
    torch.manual_seed(1)
    weights = [torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)]
    first, second = (nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in weights)
    columns = torch.arange(8)

    def asked(use, place):
        hidden = (DTensor.from_local(x, mesh, [Replicate()]) @ first.T).redistribute(placements=[Replicate()])
        made = use(hidden.to_local(grad_placements=[Partial()]), second.to_local())
        losses = DTensor.from_local(made, mesh, [place]).full_tensor().square().sum(1)
        return gradrein.per_sample(losses, {"first": first, "second": second})

    for use, place, same in [
        (lambda h, w: h.tanh() @ w.T, Shard(1), lambda h, w: h.tanh() @ w.T),
        (lambda h, w: h[:, 2:5] @ w[:, :3].T, Shard(1), lambda h, w: h[:, 2:5] @ w[:, :3].T),
        (lambda h, w: (h * (columns // 4 == rank)) @ w[:3].T, Partial(), lambda h, w: _by_halves(h, w, columns)),
    ]:
        pair = [w.clone().requires_grad_() for w in weights]
        rows = [
            torch.autograd.grad(loss, pair, retain_graph=True) for loss in same(x @ pair[0].T, pair[1]).square().sum(1)
        ]
        ps = asked(use, place)
        assert_same(ps, {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(("first", "second"))})
        ps.audit()
    for use in [
        lambda h, w: h[:, 4 * rank : 4 * rank + 4] @ w[:, :4].T,
        lambda h, w: h.chunk(2, 1)[rank] @ w[:, :4].T,
        lambda h, w: h.split([2 + rank, 6 - rank], 1)[0] @ w[:, : 2 + rank].T,
        lambda h, w: h.split([4 - rank, 4, rank], 1)[1] @ w[:, :4].T,
        lambda h, w: h.narrow(1, rank, 4) @ w[:, :4].T,
        lambda h, w: h[:, (columns + rank)[:4]] @ w[:, :4].T,
        lambda h, w: h.gather(1, (columns + rank)[:4].expand(4, 4)) @ w[:, :4].T,
        lambda h, w: h.flip(0 if rank else 1) @ w.T,
    ]:
        refused(lambda use=use: asked(use, Shard(1)), "RankError")


def _by_halves(h, w, columns):
    return sum((h * (columns // 4 == rank)) @ w[3 * rank : 3 * rank + 3].T for rank in range(2))


class Reduced(torch.autograd.Function):
    """Adds up over ranks in the forward pass."""

    @staticmethod
    def forward(_, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_, g):
        return g


class Copied(torch.autograd.Function):
    """Adds up over ranks in the backward pass."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, g):
        return Reduced.forward(None, g)


def plain_collectives():
    """Layers cut by hand, in plain parameters."""
    torch.manual_seed(1)
    x, plain, up, down = inputs(4, 6), nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 3, bias=False)
    model = nn.ModuleList([plain, up, down]).double()
    for reduce in (all_reduce, lambda h: sum(all_gather(h)), functional_all_reduce):
        if not is_differentiable(reduce):
            continue
        losses = reduce(down(up(x).tanh())).square().sum(1)
        text = refused(lambda losses=losses: gradrein.per_sample(losses, model))
        assert "is a collective, on plain tensors" in text
    losses = Reduced.apply(down(up(Copied.apply(plain(x))).tanh())).square().sum(1)
    text = refused(lambda: gradrein.per_sample(losses, model))
    assert "has run a collective in its backward" in text
    assert all(p.grad is None for p in model.parameters())


def is_differentiable(reduce):
    """Return whether a torch records the op; its functional collectives were not recorded at first."""
    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autograd.grad(reduce(x).sum(), x, allow_unused=True)[0] is not None


def functional_all_reduce(h):
    return functional_collectives.all_reduce(h, "sum", dist.group.WORLD)


def one_rank_alone():
    """What only one rank has found stops the others as well, with its reason."""
    rank, x, model = dist.get_rank(), inputs(4, 6), cut(plain=False)
    losses = model(x).square().sum(1)
    if rank == 0:
        x += 1
    text = refused(lambda: gradrein.per_sample(losses, model), "RankError" if rank else "InplaceModifiedError")
    assert "was changed in place since the DTensor was made" in text
    out = model(inputs(4, 6))
    if rank == 0:
        out.register_hook(lambda g: 2 * g)
    text = refused(lambda: gradrein.per_sample(out.square().sum(1), model), "RankError")
    assert "do not agree on the recorded graph" in text


def other_samples_beside_huge_ones():
    """One sample, or one column, that is huge does not hide that the others are not the same."""
    rank = dist.get_rank()
    for dtype, huge in [(torch.float32, 1e6), (torch.bfloat16, 100.0)]:
        for x in (torch.tensor([[huge], [1.0], [2.0]]), torch.tensor([[huge, 1.0], [huge, 2.0], [huge, 3.0]])):
            torch.manual_seed(1)
            layers = nn.Sequential(nn.Linear(x.shape[1], 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
            model = parallelize_module(layers, tensor_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
            ask(model, x.to(dtype))
            odd = torch.where(x == huge, x, -0.3 * x if rank else x).to(dtype)
            assert NOT_SAME in refused(lambda m=model, odd=odd: ask(m, odd), "RankError")


def other_parameters():
    """Copies of a parameter that no op saves, and other parameters on each rank."""
    rank, x, model = dist.get_rank(), inputs(4, 6), cut()
    with torch.no_grad():
        stored = model.down.bias.to_local()
        stored += rank
    text = refused(lambda: ask(model, x), "RankError")
    assert "`down.bias`, of which every rank has all, " + NOT_SAME in text
    model = cut()
    losses = model(x).square().sum(1)
    everything = list(model.parameters())
    for passed in [(model.up, model.down), (everything, everything[::-1]), (model.down, model)]:
        text = refused(lambda passed=passed: gradrein.per_sample(losses, passed[rank]), "RankError")
        assert "do not agree on the parameters that were passed" in text
    ps = gradrein.per_sample(losses, model)
    text = refused(lambda: ps.weighted_(lambda norms: torch.ones_like(norms) * (1 + rank)), "RankError")
    assert "weighted_ with what its function returned" in text
    assert all(p.grad is None for p in model.parameters())
    losses.sum().backward()
    refused(lambda: gradrein.per_sample(losses, model), "GraphFreedError")
