"""What the ranks run: per-sample gradients of tensor-parallel models, against one process that has all of the model.

The twin is slow and plain: one backward pass for each sample on a model that nobody has cut.
"""

import dataclasses

import persample_cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from persample_cases import assert_same_bits, expected, lengths, refused, whole
from rank_processes import fully_shard, need
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein.errors import ArgumentError, UnsupportedOperationError

WORDS, LONG, WIDTH, HEADS = 12, 4, 8, 4


class Attention(nn.Module):
    """Heads are counted from the width that a rank has, as in models that are made for tensor parallelism."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, True, False))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, rms):
        super().__init__()
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.first, self.second, self.attention = norm(WIDTH), norm(WIDTH), Attention()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gpt(nn.Module):
    """A small transformer; `tied` shares the table of words with the head."""

    def __init__(self, tied=False, rms=False, checkpointed=False, words=WORDS):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(words, WIDTH, padding_idx=1), nn.Embedding(LONG, WIDTH)
        self.block, self.last, self.head = Block(rms), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        self.unused = nn.Linear(2, 2)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, x):
        h = self.words(x)
        h = h + self.places(torch.arange(LONG)) if self.places is not None else h
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h)
        return self.head(self.last(h))


MEGATRON = {
    "block.attention.q": ColwiseParallel,
    "block.attention.k": ColwiseParallel,
    "block.attention.v": ColwiseParallel,
    "block.attention.out": RowwiseParallel,
    "block.up": ColwiseParallel,
    "block.gate": ColwiseParallel,
    "block.down": RowwiseParallel,
}


def megatron(model, mesh, table=None):
    """Attention and MLP cut by columns, then by rows; the head by words."""
    plan = {name: style() for name, style in MEGATRON.items()}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    if table is not None:
        plan["words"] = table
    return parallelize_module(model, mesh, plan)


def by_words(model, mesh):
    return megatron(model, mesh, RowwiseParallel(input_layouts=Replicate()))


def by_columns(model, mesh):
    return megatron(model, mesh, ColwiseParallel(output_layouts=Replicate()))


def sequence(model, mesh):
    """Between layers each rank has some of the tokens of every sample."""
    model.places = None  # a plain table of positions does not fit tokens that are cut
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.first": SequenceParallel(),
        "block.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "block.attention.q": ColwiseParallel(),
        "block.attention.k": ColwiseParallel(),
        "block.attention.v": ColwiseParallel(),
        "block.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "block.second": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.gate": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


PLANS = {"megatron": megatron, "by words": by_words, "by columns": by_columns, "sequence": sequence}
OPTIONS = {"": {}, "rms": {"rms": True}, "tied": {"tied": True}, "checkpoint": {"checkpointed": True}}


def tensor_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def planned(plan, mesh, options=""):
    model = PLANS[plan](twin(plan, options), mesh)
    if options == "tied":
        model.head.weight = model.words.weight  # parallelize_module makes two of one
    return model


def twin(plan, options=""):
    model = Gpt(**OPTIONS[options])
    if plan == "sequence":
        model.places = None
    return model


def tokens(count, step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (count, LONG), generator=generator)


def losses_of(model, x):
    return F.cross_entropy(model(x).transpose(1, 2), x.roll(1, 1), reduction="none").mean(1)


def one_by_one(model, x):
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses_of(model, x)]
    used = [i for i, _ in enumerate(names) if any(row[i] is not None for row in rows)]
    return {names[i]: torch.stack([row[i] for row in rows]) for i in used}


QUESTIONS = {
    "flat": lambda ps: ps.clip_(0.7),
    "per parameter": lambda ps: ps.clip_(0.2, per_parameter=True),
    "automatic": lambda ps: ps.clip_(0.7, gamma=0.1),
    "function": lambda ps: ps.weighted_(lambda norms: norms.softmax(0)),
}


def assert_written(model, wanted, times=1):
    for name, p in model.named_parameters():
        if name not in wanted:
            assert p.grad is None, name
            continue
        assert type(p.grad) is type(p.data)
        if isinstance(p, DTensor):
            assert p.grad.placements == p.placements
            assert p.grad.to_local().shape == p.to_local().shape
        found = whole(p.grad)
        torch.testing.assert_close(found, times * wanted[name], rtol=1e-9, atol=1e-12, msg=lambda t, n=name: n + t)
        assert_same_bits(found)


def same_as_one_process(plan, options=""):
    """Every question, twice over; steps in between."""
    alone = twin(plan, options)
    model = planned(plan, tensor_mesh(), options)
    optimizers = [torch.optim.SGD([*m.parameters()], lr=0.1) for m in (model, alone)]
    for step, (question, ask) in enumerate(QUESTIONS.items()):
        x = tokens([5, 1, 3, 2][step], step)
        each = one_by_one(alone, x)
        ps = gradrein.per_sample(losses_of(model, x), model)
        torch.testing.assert_close(ps.norms(), lengths(each))
        assert_same_bits(ps.norms())
        for name, found in ps.norms(per_parameter=True).items():
            torch.testing.assert_close(found, each[name].flatten(1).norm(dim=1), msg=lambda t, n=name: n + t)
        for name, g in ps.grads().items():
            torch.testing.assert_close(whole(g), each[name], msg=lambda t, n=name: n + t)
        ps.audit()
        wanted = expected(question, each, [(x, x)])
        ask(ps)
        assert_written(model, wanted)
        ask(ps)
        assert_written(model, wanted, 2)
        for name, p in alone.named_parameters():
            p.grad = 2 * wanted[name] if name in wanted else None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    backward_still_works(model, alone)


def backward_still_works(model, alone):
    x = tokens(3, 77)
    losses = losses_of(model, x)
    gradrein.per_sample(losses, model).norms()
    losses.sum().backward()
    each = one_by_one(alone, x)
    for name, p in model.named_parameters():
        if name in each:
            torch.testing.assert_close(whole(p.grad), each[name].sum(0))


DATA = {
    "fsdp": lambda model, mesh: (fully_shard(fully_shard_block(model, mesh["dp"]), mesh=mesh["dp"]), None),
    "group": lambda model, mesh: (model, mesh["dp"].get_group()),
    "mesh": lambda model, mesh: (model, mesh["dp"]),
}


def fully_shard_block(model, mesh):
    fully_shard(model.block, mesh=mesh)
    return model


def two_dimensions(plan, data, sizes=(3, 2)):
    """Samples over one dimension of a mesh, the model over the other."""
    if 0 in sizes:
        need("views of empty DTensors")
    mesh, alone = grid(), twin(plan)
    model, group = DATA[data](planned(plan, mesh["tp"]), mesh)
    row = mesh.get_local_rank("dp")
    for step, (question, ask) in enumerate(QUESTIONS.items()):
        parts = [tokens(size, 10 * step + i) for i, size in enumerate(sizes)]
        x = torch.cat(parts)
        each = one_by_one(alone, x)
        ps = gradrein.per_sample(losses_of(model, parts[row]), model, process_group=group)
        mine = slice(sum(sizes[:row]), sum(sizes[: row + 1]))
        torch.testing.assert_close(ps.norms(), lengths(each)[mine])
        torch.testing.assert_close(ps.norms(gathered=True), lengths(each))
        for name, g in ps.grads().items():
            torch.testing.assert_close(whole(g), each[name][mine])
        ps.audit(gathered=True)
        ask(ps)
        wanted = expected(question, each, [(part, part) for part in parts])
        assert_written(model, wanted)
        ask(ps)
        assert_written(model, wanted, 2)
        model.zero_grad()


def every_answer(plan):
    """What is asked of one process is answered here: products, statistics, parts of a batch, of a model, of a graph."""
    x, alone, model = tokens(4), twin(plan), planned(plan, tensor_mesh())
    each = one_by_one(alone, x)
    want = gradrein.per_sample(losses_of(alone, x), alone)
    ps = gradrein.per_sample(losses_of(model, x), model)
    direction = {
        name: torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(5))
        for name, p in alone.named_parameters()
    }
    for ask in ("dot", "cosine"):
        torch.testing.assert_close(getattr(ps, ask)(), getattr(want, ask)())
        torch.testing.assert_close(getattr(ps, ask)(direction), getattr(want, ask)(direction))
    torch.testing.assert_close(ps.gram(), want.gram())
    assert dataclasses.asdict(ps.stats()) == pytest.approx(dataclasses.asdict(want.stats()), rel=1e-9)
    for name, part, block in ps.stream(samples=3):
        torch.testing.assert_close(whole(block), each[name][part])
    ps.weighted_(torch.tensor([2, 0, -1, 1]))
    assert_written(model, {name: 2 * g[0] - g[2] + g[3] for name, g in each.items()})
    model.zero_grad()
    groups = torch.tensor([7, 7, 1, 1])
    together = {name: torch.stack([g[2:].sum(0), g[:2].sum(0)]) for name, g in each.items()}
    for parameters in (model, dict(model.named_parameters())):
        ps = gradrein.per_sample(
            losses_of(model, x), parameters, sample_groups=groups, retain_graph=False, memory_budget=0
        )
        torch.testing.assert_close(ps.norms(), lengths(together))
        ps.clip_(0.7)
        assert_written(model, expected("flat", together, [(x, x)]))
        model.zero_grad()


def part_of_a_model(plan):
    """Only some parameters are asked about, others are frozen; a model whose cut parameters are all frozen."""
    x, alone, model = tokens(3), twin(plan), planned(plan, tensor_mesh())
    each = one_by_one(alone, x)
    for prefix in ("block.down", "last", "block.attention.q"):
        own = {name: g for name, g in each.items() if name.startswith(prefix)}
        ps = gradrein.per_sample(losses_of(model, x), model.get_submodule(prefix))
        torch.testing.assert_close(ps.norms(), lengths(own))
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("last"))
    ps = gradrein.per_sample(losses_of(model, x), model)
    torch.testing.assert_close(ps.norms(), lengths({name: g for name, g in each.items() if name.startswith("last")}))
    ps.clip_(0.7)
    own = expected("flat", {name: g for name, g in each.items() if name.startswith("last")}, [(x, x)])
    assert_written(model, own)


def noise(plan, data="none"):
    """Drawn once, by the first rank: what one process adds, to every parameter and shard."""
    alone, seed = twin(plan), dist.get_rank()
    if data == "none":
        model, group, parts, row = planned(plan, tensor_mesh()), None, [tokens(3)], 0
    else:
        mesh = grid()
        model, group = DATA[data](planned(plan, mesh["tp"]), mesh)
        parts, row = [tokens(3), tokens(1, 1)], mesh.get_local_rank("dp")
    options = {"noise_multiplier": 1.5, "divide_by": 16}
    losses = losses_of(alone, torch.cat(parts))
    gradrein.per_sample(losses, alone).clip_(0.3, generator=torch.Generator().manual_seed(0), **options)
    ps = gradrein.per_sample(losses_of(model, parts[row]), model, process_group=group)
    ps.clip_(0.3, generator=torch.Generator().manual_seed(seed), **options)
    for name, p in alone.named_parameters():
        found = whole(dict(model.named_parameters())[name].grad)
        torch.testing.assert_close(found, p.grad, rtol=1e-9, atol=1e-12)


def half():
    """Parameters and activations in bfloat16, and a loss scale."""
    need("masks of embeddings in every dtype")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, alone = tokens(5), twin("sequence").bfloat16()
    model = sequence(twin("sequence").bfloat16(), tensor_mesh())
    each = {name: g.float() for name, g in one_by_one(alone, x).items()}
    ps = gradrein.per_sample(scaler.scale(losses_of(model, x)), model, scaler=scaler)
    ps.audit()
    torch.testing.assert_close(ps.norms(), lengths(each), rtol=5e-2, atol=1e-2)
    ps.weighted_(torch.ones(5))
    for name, p in model.named_parameters():
        if name in each:
            assert p.grad.dtype == torch.bfloat16
            torch.testing.assert_close(whole(p.grad).float() / 1024, each[name].sum(0), rtol=1e-1, atol=1e-1)


def not_finite():
    """A sample without a finite norm is found on all ranks, and left out on all."""
    x, alone = tokens(4), twin("megatron")
    x[2] = 11
    x[[0, 1, 3]] = x[[0, 1, 3]].clamp(max=10)
    for net in (alone,):
        net.words.weight.data[11] = torch.inf
    model = megatron(twin("megatron"), tensor_mesh())
    model.words.weight.data[11] = torch.inf
    ps = gradrein.per_sample(losses_of(model, x), model)
    assert "the gradients of 1 of 4 samples are NaN" in refused(lambda: ps.clip_(1.0), "NonFiniteGradientError")
    ps.clip_(0.7, nonfinite="drop")
    each = one_by_one(alone, x[[0, 1, 3]])
    assert_written(model, {name: 0.75 * g for name, g in expected("flat", each, [(x, x)]).items()})


def uneven():
    """Words and widths that no number of ranks divides: shards of different sizes, and empty ones."""
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Replicate()),
        "3": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tensor_mesh(), plan)
    x = torch.tensor([[0, 1], [6, 6], [2, 3]])
    names, parameters = zip(*alone.named_parameters(), strict=True)
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in alone(x).square().sum((1, 2))]
    each = {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}
    ps = gradrein.per_sample(model(x).square().sum((1, 2)), model)
    torch.testing.assert_close(ps.norms(), lengths(each))
    for name, g in ps.grads().items():
        torch.testing.assert_close(whole(g), each[name])
    ps.audit()
    ps.clip_(0.7)
    assert_written(model, expected("flat", each, [(x, x)]))


class Norms(nn.Module):
    """A norm layer on what is cut between two layers, as `q_norm` is in some models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.up, self.scale, self.down = nn.Linear(6, 8), nn.Parameter(torch.ones(4)), nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        h = self.up(x).unflatten(-1, (-1, 4))
        return self.down((h * self.scale).flatten(1))


def refusals():
    """What is not known to be right is refused by name, the same on all ranks, and nothing is written."""
    mesh, rank = tensor_mesh(), dist.get_rank()
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mlp = parallelize_module(Norms(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    text = refused(lambda: gradrein.per_sample(mlp(x).sum(1), mlp))
    assert "`scale` is a plain tensor, and is used on a part of an activation with placements" in text
    assert "SequenceParallel() for a norm layer" in text
    up = parallelize_module(nn.Linear(6, 8).double(), mesh, ColwiseParallel())
    text = refused(lambda: gradrein.per_sample(up(x).sum(1), up))
    assert "is made into the losses, without a reduction over ranks" in text
    text = refused(lambda: gradrein.per_sample((distribute_tensor(x, mesh, [Replicate()]) @ up.weight.T).sum(1), up))
    assert "losses.full_tensor()" in text
    whole_up = parallelize_module(nn.Linear(6, 8).double(), mesh, ColwiseParallel(output_layouts=Replicate()))
    losses = (whole_up(x) - rank).square().sum(1)  # targets of another batch
    assert "is not the same on all ranks" in refused(lambda: gradrein.per_sample(losses, whole_up), "RankError")
    losses = whole_up(x).sum(1)[: 2 + min(rank, 1)]
    assert "do not agree on the number of samples" in refused(
        lambda: gradrein.per_sample(losses, whole_up), "RankError"
    )
    out = whole_up(x)
    out.register_hook(lambda g: g * 2)
    text = refused(lambda: gradrein.per_sample(out.sum(1), whole_up))
    assert "it has a hook" in text
    kept = whole_up.weight.register_hook(lambda g: g)
    assert "a hook" in refused(lambda: gradrein.per_sample(whole_up(x).sum(1), whole_up))
    kept.remove()
    ps = gradrein.per_sample(whole_up(x).sum(1), whole_up)
    assert "do not agree on max_norm" in refused(lambda: ps.clip_(1.0 + rank), "RankError")
    text = refused(lambda: ps.weighted_(torch.arange(4.0) + rank), "RankError")
    assert "do not agree on what is about the samples" in text
    text = refused(lambda: ps.dot({"weight": torch.full((8, 6), 1.0 + rank)}), "RankError")
    assert "do not agree on the length of `direction`" in text
    groups = torch.tensor([0, 0, 1, 1]).roll(rank)
    text = refused(lambda: gradrein.per_sample(whole_up(x).sum(1), whole_up, sample_groups=groups), "RankError")
    assert "do not agree on `sample_groups`" in text
    spread = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
    assert "full_tensor()" in refused(lambda: ps.dot({"weight": spread}), "ArgumentError")
    text = refused(lambda: gradrein.per_sample((whole_up(x) @ whole_up(x).T).sum(1), whole_up))
    assert "losses that depend on other samples" in text
    assert all(p.grad is None for net in (mlp, up, whole_up) for p in net.parameters())


def local_use():
    """DTensors that are used as plain tensors, whole and cut by hand, and a plain parameter that is used as a DTensor."""
    mesh = tensor_mesh()
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(distribute_tensor(torch.ones(3, 6, dtype=torch.float64), mesh, [Replicate()]))
    ps = gradrein.per_sample((x @ weight.to_local().T).sum(1), {"weight": weight})
    torch.testing.assert_close(whole(ps.grads()["weight"]), x[:, None].expand(4, 3, 6))
    rows = slice(3 * mesh.get_local_rank(), 3 * mesh.get_local_rank() + 3)
    hidden = (x @ weight.to_local().T).repeat(1, mesh.size())[:, rows]  # by hand, which to_local() does not know of
    text = refused(
        lambda: gradrein.per_sample(
            DTensor.from_local(hidden, mesh, [Shard(1)]).full_tensor().sum(1), {"weight": weight}
        )
    )
    assert f"is converted to a plain tensor, and used for one with placements [{Shard(1)!r}]" in text
    assert "redistribute(placements=[...])" in text
    plain = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
    there = DTensor.from_local(plain, mesh, [Replicate()])
    text = refused(
        lambda: gradrein.per_sample(
            (distribute_tensor(x, mesh, [Replicate()]) @ there).full_tensor().sum(1), {"w": plain}
        )
    )
    assert "`w` is a plain tensor that `MmBackward0` uses as a DTensor" in text
    assert "distribute_tensor()" in text


def collectives():
    """One message for the norms; nothing in the rules of column- and row-wise layers."""
    model, x = planned("by words", tensor_mesh()), tokens(3)
    gradrein.per_sample(losses_of(model, x), model)
    losses = losses_of(model, x)
    with persample_cases.counted() as calls:
        ps = gradrein.per_sample(losses, model)
    assert calls == ["all_reduce"]
    with persample_cases.counted() as calls:
        ps.norms()
        ps.norms()
    assert calls == ["all_gather_single"]
    with persample_cases.counted() as calls:
        ps.clip_(1.0)
    assert calls == ["all_reduce"]


def hooks_elsewhere():
    """Hooks of modules, optimizers and other graphs between two steps are no hooks of this one; one of its own is."""
    model = planned("megatron", tensor_mesh())
    x = tokens(3)
    for step in range(3):
        other = nn.Linear(2, 2)
        other.register_full_backward_hook(lambda *_: None)
        other(torch.ones(1, 2)).register_hook(lambda g: g * 2)
        torch.optim.SGD(model.parameters(), lr=0.1).register_step_post_hook(lambda *_: None)
        model.register_forward_hook(lambda *_: None)
        assert torch.isfinite(gradrein.per_sample(losses_of(model, x), model).norms()).all(), step
    hooked = losses_of(model, x)
    hooked.grad_fn.next_functions[0][0].register_prehook(lambda grads: tuple(2 * g for g in grads))
    with pytest.raises(UnsupportedOperationError, match="it has a hook"):
        gradrein.per_sample(hooked, model)
    with pytest.raises(ArgumentError, match="have the same samples"):
        gradrein.per_sample(losses_of(model, x), model, process_group=dist.group.WORLD)
