"""Norms, factors and weights of every size, whichever way they are computed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradrein
from gradrein.persample.layout.samples import SampleLayout
from gradrein.persample.queries import sums
from gradrein.persample.queries.sums import Joint
from gradrein.persample.representations import numerics
from gradrein.persample.representations.base import Dense
from gradrein.persample.representations.outer import Outer
from gradrein.persample.representations.rows import first_places

SIZES = st.sampled_from([0.0, 1e-45, 1e-30, 1e-12, 1.0, 1e12, 1e30, math.inf, math.nan])


def same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    samples=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.complex64]),
    shape=st.sampled_from([(), (1,), (5,), (1, 7), (0,), (2, 3, 2)]),
    host=st.booleans(),
)
def test_norms_of_rows_of_every_size(sizes, samples, dtype, shape, host):
    """Also as a device computes them, where no value is looked at."""
    scale = torch.tensor([sizes[i % len(sizes)] for i in range(samples)], dtype=torch.float64)
    block = (torch.randn(samples, *shape) * scale.view(-1, *(1,) * len(shape))).to(dtype)
    rows = numerics.double(block).reshape(samples, math.prod(shape))
    unit = scale.where((scale > 0) & scale.isfinite(), 1)
    expected = torch.linalg.vector_norm(rows / unit[:, None], dim=1) * unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "on_host", lambda _: host)
        same(numerics.row_norms(block), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 300, 1 << 20])
def test_norms_and_sums_of_what_is_written_down_side_by_side(size, dtype, budget):
    left, right = torch.randn(4, 1, 3) * size, torch.randn(4, 1, 5)
    left[1] = 0
    forms = {"weight": Outer(left.to(dtype), right.to(dtype)), "bias": Dense(left[:, 0].to(dtype))}
    joint = Joint(forms, budget)
    assert len(joint.forms) == {0: 0, 300: 2}.get(budget, 2)
    weights = torch.rand(4)
    norms = {name: {**forms, **joint.forms}[name].norms() for name in forms}
    for name, form in forms.items():
        written = form.dense().double()
        same(norms[name], written.flatten(1).norm(dim=1), rtol=1e-6, atol=0)
        found = joint.weighted(weights)[name] if name in joint.forms else form.weighted(weights)
        same(found.double(), torch.tensordot(weights.double(), written, 1), rtol=1e-5, atol=1e-6 * size)
    total = torch.stack([*norms.values()]).norm(dim=0)
    same(numerics.total_norms([*norms.values()], 4, extreme=dtype == torch.float64), total, rtol=1e-6, atol=0)
    if len(joint.forms) == 2:
        same(joint.norms(), total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-320, 1e-40, 1e-20, 1.0, 1e20, 1e40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_of_every_size(size, dtype):
    """A weight that float32 cannot hold is multiplied in float64."""
    weights = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64) * size
    block = torch.randn(3, 4).to(dtype)
    narrow = numerics.narrowed(weights)
    expected = block.double() * weights[:, None]
    same(numerics.scale_rows(block, narrow).double(), expected, rtol=1e-6, atol=0)
    same(numerics.weighted_sum(block, narrow).double(), expected.sum(0), rtol=1e-5, atol=1e-6 * size)
    assert narrow.dtype == (torch.float32 if 1e-20 <= size <= 1e20 else torch.float64)


@given(norms=st.lists(st.floats(0, allow_infinity=False), max_size=9), limit=st.floats(1e-300, allow_infinity=True))
def test_factors(norms, limit):
    """A gradient is never made longer, and a zero gradient stays."""
    found = sums.factors(torch.tensor(norms, dtype=torch.float64), limit, None)
    expected = [1.0 if n <= limit else limit / n for n in norms]
    same(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert not (found > 1).any()


@pytest.mark.parametrize("width", [4096, 4097, 3 * 4096, 2**20 + 5, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_long_rows_are_as_right_as_short_ones(width, dtype):
    """torch adds up squares in float32: of four million numbers the norm would be too small by 1e-4."""
    block = torch.randn(2, width, dtype=dtype)
    for rows in (block, block[:, ::2], block.T.contiguous().T):
        expected = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(dtype, torch.float64))
        torch.testing.assert_close(numerics.row_norms(rows), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("samples", [256, 257, 1000, 100_000])
def test_sums_over_many_samples_are_as_right_as_those_of_torch(samples):
    """A product of matrices adds up in float32: of a hundred thousand equal numbers it loses four digits."""
    model = nn.Linear(2, 3)
    x = torch.rand(samples, 2) + 0.5
    gradrein.per_sample(model(x).sum(1), model).weighted_(torch.full((samples,), 0.1))
    torch.testing.assert_close(model.bias.grad, torch.full((3,), 0.1 * samples), rtol=4e-6, atol=0)


@pytest.mark.parametrize("count", [255, 256, 257, 3000, 1_000_000])
def test_inner_products_of_long_rows(count):
    """Of a vector of equal numbers, all cosines are one."""
    weight = nn.Parameter(torch.zeros(count))
    scale = torch.tensor([0.7, 0.2, 0.1])
    ps = gradrein.per_sample((scale[:, None] * weight).sum(1), {"weight": weight})
    torch.testing.assert_close(ps.cosine(), torch.ones(3), rtol=4e-6, atol=0)
    expected = (scale[:, None] * scale).double() * count
    torch.testing.assert_close(ps.gram().double(), expected, rtol=4e-6, atol=0)
    torch.testing.assert_close(
        ps.dot({"weight": torch.full((count,), 0.3)}).double(), 0.3 * scale.double() * count, rtol=4e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_of_a_bias_are_added_up_in_float32(dtype):
    """Also where their sum is beyond float16."""
    model, size = nn.Linear(1, 1).to(dtype), 1000.0
    weights = (torch.rand(2, 300, 1) * size).to(dtype)
    losses = (model(torch.zeros(2, 300, 1, dtype=dtype)).float() * weights.float()).flatten(1).sum(1)
    found = gradrein.per_sample(losses, model).norms(per_parameter=True)["bias"]
    torch.testing.assert_close(found.double(), weights.double().sum((1, 2)), rtol=1e-6, atol=0)


def test_a_sample_of_many_parameters_is_clipped_to_the_limit():
    """Gradients that are written down: four million numbers for each sample."""
    model = torch.nn.Linear(2048, 2048, bias=False)
    ps = gradrein.per_sample(model(torch.randn(2, 4096, 2048)).square().mean((1, 2)), model)
    ps.clip_(1e-4)
    written = [g.double().norm() for g in ps.grads()["weight"]]
    torch.testing.assert_close(ps.norms().double(), torch.stack(written), rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(SIZES | SIZES.map(float.__neg__), min_size=6, max_size=6),
    shape=st.sampled_from([(6, 1), (3, 2), (2, 3), (1, 2, 3), (2, 3, 1), (6, 0), (0, 6)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
)
def test_largest_number_of_each_sample_is_the_infinity_norm(values, shape, dtype):
    block = torch.tensor(values if math.prod(shape) else [], dtype=torch.float64).to(dtype).view(shape)
    dims = tuple(range(1, len(shape)))
    expected = torch.linalg.vector_norm(block, torch.inf, dim=dims).double() if block.numel() else torch.zeros(shape[0])
    same(numerics.row_max(block), expected.double())


def test_losses_may_be_changed_in_place_afterwards():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    losses = model(x).square().sum(1)
    ps = gradrein.per_sample(losses, model)
    losses.mul_(5)
    ps.audit()
    same(ps.norms(), gradrein.per_sample(model(x).square().sum(1), model).norms())


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    samples=st.integers(1, 4),
    kept=st.integers(0, 4),
    data=st.data(),
)
def test_sums_of_blocks_are_those_of_single_elements(shape, samples, kept, data):
    x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    fitting = [block for block in range(1, x.numel() + 1) if x.numel() % (block * samples) == 0]
    if not fitting:
        return
    block = data.draw(st.sampled_from(fitting))
    under = [data.draw(st.sampled_from([1, size])) for size in shape[len(shape) - min(kept, len(shape)) :]]
    owners = torch.arange(x.numel()) // block % samples
    expected = SampleLayout(samples, None, owners).sums(x, under)
    same(SampleLayout(samples, block, None).sums(x, under), expected)
    same(SampleLayout(samples, block, None).sums(x.mT.contiguous().mT if x.dim() > 1 else x, under), expected)


@given(samples=st.integers(0, 3), count=st.integers(0, 6), high=st.integers(1, 7))
def test_equal_ids_of_a_sample_share_a_place_and_no_others_do(samples, count, high):
    ids = torch.randint(high, (samples, count))
    sample_of = torch.arange(samples)[:, None].expand(samples, count)
    known = torch.stack([sample_of, ids, first_places(ids)], -1).flatten(0, 1).tolist()
    known = [tuple(one) for one in known]
    assert len({(sample, one) for sample, one, _ in known}) == len({place for *_, place in known}) == len(set(known))
    assert all(0 <= place < ids.numel() for *_, place in known)
