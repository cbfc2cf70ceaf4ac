"""Values that a captured step is not right for, errors that only values tell, and reads on the host."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradrein
from gradrein import errors

from .helpers import B, C, D, Twins, batch, losses_of

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


class Forbidden(TorchDispatchMode):
    """Counts reads on the host, and shapes made of values."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS or torch.Tag.dynamic_output_shape in func.tags:
            bool_index = func is not torch.ops.aten.index.Tensor or any(
                i is not None and i.dtype == torch.bool for i in args[1]
            )
            Forbidden.reads += bool_index
        return func(*args, **(kwargs or {}))


class Everything(nn.Module):
    """The gradient goes through the recurrent layer, whose op keeps a workspace for that."""

    def __init__(self):
        super().__init__()
        self.words, self.cell = nn.Embedding(9, 8), nn.LSTM(8, 6, batch_first=True)
        self.conv, self.norm, self.head = nn.Conv1d(6, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, C)

    def forward(self, ids):
        h = self.cell(self.words(ids))[0].transpose(1, 2)
        return self.head(self.norm(self.conv(h)).mean(2))


def test_no_host_read_in_the_graph_and_one_after_it():
    model = Everything()

    def step(x, y):
        ps = gradrein.per_sample(losses_of(model, x, y), model)
        return ps.clip_(0.5), ps.norms(), ps.dot()

    step = gradrein.compile(step, model, backend="captured")
    data = torch.randint(9, (B, 7)), torch.randint(C, (B,))
    step(*data)
    step(*data)
    Forbidden.reads = 0
    entry = step._entries[0]
    inputs = _inputs(step, data)
    with Forbidden():
        entry(*inputs)
    assert entry.ran == "captured"
    assert Forbidden.reads == 1  # of the flag: whether the results may be used


def _inputs(step, data):
    """Return what Dynamo calls the graph with."""
    seen = []
    entry = step._entries[0]
    call = type(entry).__call__
    try:
        type(entry).__call__ = lambda self, *inputs: seen.append(inputs) or call(self, *inputs)
        step(*data)
    finally:
        type(entry).__call__ = call
    return seen[0]


def test_a_norm_that_is_not_finite_raises_and_writes_nothing():
    model = nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.5), nn.Linear(6, C))

    def step(x, y):
        return gradrein.per_sample(losses_of(model, x, y), model).clip_(0.5)

    plain, step = step, gradrein.compile(step, model, backend="captured")
    x, y = batch()
    step(x, y)
    step(x, y)
    assert step._entries[0].ran == "captured"
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    bad = x.clone()
    bad[2] = torch.nan
    torch.manual_seed(1)
    with pytest.raises(errors.NonFiniteGradientError) as expected:
        plain(bad, y)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with pytest.raises(errors.NonFiniteGradientError) as found:
        step(bad, y)
    assert str(found.value) == str(expected.value)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    step(x, y)
    assert step._entries[0].ran == "captured"


def test_unusual_values_are_left_to_the_eager_step():
    twins = Twins(nn.Sequential(nn.Flatten(), nn.Linear(D, C)))
    x, y = batch()
    twins.run(x, y)
    twins.captured(x, y)
    twins.eager(x * 1e25, y)
    twins.captured(x, y)


def test_random_graphs_of_values():
    """Many draws with masks, zeros and sizes, each against the eager step."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.ReLU(), nn.Linear(24, C))

    def make(model):
        def step(ids, y, mask, scale):
            ps = gradrein.per_sample(losses_of(model, ids, y) * mask * scale, model)
            return ps.clip_(0.1), ps.norms(per_parameter=True)

        return step

    twins = Twins(model, make)
    generator = torch.Generator().manual_seed(3)
    for _ in range(25):
        ids = torch.randint(5, (B, 6), generator=generator)
        mask = torch.rand(B, generator=generator) < 0.7
        scale = 10.0 ** torch.randint(-25, 12, (B,), generator=generator)
        twins.run(ids, torch.randint(C, (B,), generator=generator), mask, scale)
    assert twins.step._entries[0].took, twins.step.explain()
