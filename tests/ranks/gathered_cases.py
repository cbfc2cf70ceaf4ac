"""What the ranks run: answers about the samples of all ranks, against one process; and a pipeline schedule."""

import dataclasses

import torch
import torch.distributed as dist
from persample_cases import WRAPPED, batch, lengths, losses_of, one_by_one, refused, twin
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import gradrein


def one_answer(wrapped, sizes):
    """Products with a direction and with each other, and the audit: of all samples, on every rank."""
    parts, rank = batch(sizes, 4), dist.get_rank()
    model, alone = WRAPPED[wrapped](), twin(wrapped)
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    want = gradrein.per_sample(losses_of(alone, x, y), alone)
    ps = gradrein.per_sample(losses_of(model, *parts[rank]), model)
    draw = torch.Generator().manual_seed(5)
    direction = {name: torch.randn(p.shape, generator=draw, dtype=p.dtype) for name, p in alone.named_parameters()}
    here = dict(zip((n for n, _ in model.named_parameters()), direction.values(), strict=True))
    for ask in ("dot", "cosine"):
        torch.testing.assert_close(getattr(ps, ask)(gathered=True), getattr(want, ask)())
        torch.testing.assert_close(getattr(ps, ask)(here, gathered=True), getattr(want, ask)(direction))
    torch.testing.assert_close(ps.gram(gathered=True), want.gram())
    torch.testing.assert_close(ps.gram(gathered=True).diagonal().sqrt(), lengths(one_by_one(alone, parts)))
    found = ps.audit(gathered=True)
    assert {n.removeprefix("module.") for n in found.parameters} == set(want.audit().parameters)
    assert {n.removeprefix("module.") for n in found.unused} == {"unused.weight", "unused.bias"}
    assert max(found.parameters.values()) < 1e-10
    same_on_all(dataclasses.astuple(found))
    before = sum(len(x) for x, _ in parts[:rank])
    mine = slice(before, before + len(ps))
    torch.testing.assert_close(ps.gram(), want.gram()[mine, mine])  # of this rank, as ever
    assert ps.dot(here).shape == (len(ps),)


def same_on_all(answer):
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    assert all(one == answers[0] for one in answers)


def disagreements():
    """Ranks with different directions, questions or faults find out, all of them."""
    parts, rank = batch("uneven"), dist.get_rank()
    model = DistributedDataParallel(nn.Linear(6, 3).double())
    x, y = parts[rank]
    ps = gradrein.per_sample(losses_of(model, x, y), model)
    direction = {"module.bias": torch.full((3,), 1.0 + rank)}
    for ask in (ps.dot, ps.cosine):
        text = refused(lambda ask=ask: ask(direction, gathered=True), "RankError")
        assert "do not agree on the length of `direction`" in text
    text = refused(lambda: ps.gram(gathered=True) if rank else ps.dot(gathered=True), "RankError")
    assert "do not agree on the call" in text
    text = refused(lambda: ps.audit(gathered=True, tolerance=1e-3 + rank), "RankError")
    assert "do not agree on tolerance" in text
    ps = gradrein.per_sample(losses_of(model, x * (float("nan") if rank == 1 else 1.0), y), model)
    text = refused(lambda: ps.audit(gathered=True), "NonFiniteGradientError" if rank == 1 else "RankError")
    assert rank == 1 or "ranks [1] of the group found an error" in text


def used_somewhere():
    """A parameter that this rank's losses do not depend on counts as zeros in products."""
    rank, parts = dist.get_rank(), batch("uneven")
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 3) for _ in range(dist.get_world_size())).double()
    ps = gradrein.per_sample(losses_of(model[rank], *parts[rank]), model, process_group=dist.group.WORLD)
    blocks = []
    for branch, part in zip(model, parts, strict=True):
        each = one_by_one(branch, [part])
        rows = torch.cat([g.flatten(1) for g in each.values()], 1)
        blocks.append(rows @ rows.T)
    torch.testing.assert_close(ps.gram(gathered=True), torch.block_diag(*blocks))


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
    assert all("Distribute the model with fully_shard or parallelize_module instead" in text for text in texts)


def pipeline_of_one():
    """A schedule with one stage has all of the model there: micro-batches are right."""
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    module = Stage(True)
    found = []

    def loss(output, target):
        losses = (output - target).square().sum(1)
        found.append(gradrein.per_sample(losses, module).norms())
        return losses.sum()

    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, torch.device("cpu"), group=group), 2, loss_fn=loss)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.ones(4, 3, dtype=torch.float64)
    schedule.step(x, target=y)
    want = gradrein.per_sample((module(x) - y).square().sum(1), module).norms()
    torch.testing.assert_close(torch.cat(found[-2:]), want)
