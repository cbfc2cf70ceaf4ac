"""Laws of clipping, each a named function, over shapes, dtypes, layouts, orders and thresholds."""

import math

import helpers
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradrein

EXACTNESS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}
ORDERS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, math.inf])
THRESHOLDS = st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.just(math.inf))
FOREACH = st.sampled_from([None, True, False])


@st.composite
def gradient(draw, dtypes=tuple(EXACTNESS)):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    seed = draw(st.integers(0, 2**16))
    spread = draw(st.sampled_from([0.0, 1e-3, 1.0, 50.0]))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    layout = draw(st.sampled_from(["plain", "transposed", "strided"]))
    if layout == "transposed" and len(shape) > 1:
        values = values.transpose(0, -1)
    if layout == "strided" and shape:
        values = values.repeat_interleave(2, dim=-1)
    values = values.to(dtype)
    if layout == "strided" and shape:
        return values[..., ::2]
    return values


def several(**kwargs):
    return st.lists(gradient(**kwargs), min_size=1, max_size=5)


def tolerance(grads):
    return max(EXACTNESS[g.dtype] for g in grads)


def run(grads, max_norm, p, foreach=None):
    ps = helpers.parameters(grads)
    for q, g in zip(ps, grads, strict=True):
        q.grad = copy_with_layout(g)
    return gradrein.clip_grad_norm_(ps, max_norm, p, foreach=foreach), [q.grad for q in ps]


def copy_with_layout(g):
    fresh = torch.empty(0, dtype=g.dtype)
    fresh.set_(g.untyped_storage().clone(), g.storage_offset(), g.size(), g.stride())
    return fresh


def assert_agrees_with_the_oracle(grads, max_norm, p, foreach):
    norm, after = run(grads, max_norm, p, foreach)
    assert norm.item() == pytest.approx(helpers.norm(grads, p), rel=1e-5, abs=1e-30)
    expected = helpers.clipped(grads, max_norm, p) if max_norm < math.inf else helpers.vector(grads)
    allowed = tolerance(grads)
    torch.testing.assert_close(helpers.vector(after), expected, rtol=allowed, atol=allowed * 1e-3)
    if norm.item() <= max_norm * (1 - 1e-4) - 1e-5:  # under the threshold to the bit
        assert all(torch.equal(a, g) for a, g in zip(after, grads, strict=True))


@settings(max_examples=300, deadline=None)
@given(several(), THRESHOLDS, ORDERS, FOREACH)
def test_oracle(grads, max_norm, p, foreach):
    assert_agrees_with_the_oracle(grads, max_norm, p, foreach)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several(), st.floats(0, 100), FOREACH)
def test_value_clipping_is_a_clamp_of_every_element(grads, limit, foreach):
    ps = helpers.parameters(grads)
    for q, g in zip(ps, grads, strict=True):
        q.grad = copy_with_layout(g)
    gradrein.clip_grad_value_(ps, limit, foreach)
    for q, g in zip(ps, grads, strict=True):
        assert torch.equal(q.grad, g.clamp(-limit, limit))


POLICIES = st.one_of(
    st.builds(gradrein.by_norm, st.floats(1e-3, 100), ORDERS),
    st.builds(gradrein.by_norm, st.floats(1e-3, 100), ORDERS, per_parameter=st.just(True)),
    st.builds(gradrein.by_value, st.floats(1e-3, 100)),
    st.builds(gradrein.by_rms, st.floats(1e-3, 100)),
)


@settings(max_examples=150, deadline=None)
@given(several(), POLICIES)
def test_laws_of_policies(grads, policy):
    ps = helpers.parameters(grads)
    for q, g in zip(ps, grads, strict=True):
        q.grad = copy_with_layout(g)
    report = gradrein.clip_(ps, policy)
    assert report.norm == pytest.approx(helpers.norm(grads, policy.p), rel=1e-5, abs=1e-30)
    allowed = tolerance(grads)
    after = helpers.norm([q.grad for q in ps], policy.p)
    # A norm of order 1/2 limits values of float16 to less than it holds.
    if policy.p >= 1 or torch.float16 not in {g.dtype for g in grads}:
        assert report.norm_after == pytest.approx(after, rel=allowed, abs=allowed)
    assert report.norm_after <= report.norm * (1 + 1e-9)
    assert report.clipped == (report.norm_after < report.norm) or report.norm_after == pytest.approx(report.norm)
    if not report.clipped:
        assert all(torch.equal(q.grad, g) for q, g in zip(ps, grads, strict=True))
