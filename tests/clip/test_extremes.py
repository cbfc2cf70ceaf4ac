"""Values from the smallest subnormal to the largest finite one, against exact arithmetic."""

import math
from contextlib import contextmanager
from unittest import mock

import helpers
import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradrein
from gradrein import _kernels
from gradrein.errors import NonFiniteGradientError

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
LARGEST = mpmath.mpf(torch.finfo(torch.float64).max)
ORDERS = [0.5, 1.0, 2.0, 3.0, 20.0, math.inf]


@contextmanager
def kernels(on):
    with mock.patch.dict(_kernels.BACKENDS, {} if on else {"cpu": None}):
        yield


@st.composite
def number(draw, dtype):
    """Any finite value of a type, all sizes alike, and zeros."""
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 60, math.log2(info.max)
    size = 2.0 ** draw(st.floats(max(low, -1074), high - 1e-9)) if draw(st.integers(0, 5)) else 0.0
    return draw(st.sampled_from([-1, 1])) * draw(st.sampled_from([size, size, size, info.max, info.tiny]))


@st.composite
def gradient(draw, dtypes=tuple(REAL + COMPLEX)):
    dtype = draw(st.sampled_from(dtypes))
    values = draw(st.lists(number(dtype), min_size=1, max_size=5))
    if dtype.is_complex:
        values = [complex(a, draw(number(dtype))) for a in values]
    g = torch.tensor(values, dtype=dtype)
    kind = draw(st.sampled_from(["plain", "strided", "put off"]))
    if kind == "strided":
        return g.repeat_interleave(2)[::2]
    if kind == "put off":  # a conjugation or negation
        return g.conj() if dtype.is_complex else torch._neg_view(g)
    return g


LIMITS = st.one_of(
    st.sampled_from([0.0, 5e-324, 1e-320, 1e-308, 1.0, 65504.0, 3.4e38, 1.7e308]), st.floats(0, 1e300, width=64)
)


def exact(g):
    """Every value as it is, without rounding."""
    return [mpmath.mpc(x.real, x.imag) for x in (complex(v) for v in g.resolve_conj().resolve_neg().tolist())]


def norm_of(values, p):
    sizes = [abs(v) for v in values]
    if p == math.inf:
        return max(sizes, default=mpmath.mpf(0))
    return mpmath.power(sum((mpmath.power(a, p) for a in sizes), mpmath.mpf(0)), mpmath.mpf(1) / mpmath.mpf(p))


def steps(dtype):
    """The relative and the absolute error of one rounding."""
    info = torch.finfo(dtype)
    return 4 * info.eps, 2 * info.tiny * info.eps


def assert_scaled(g, before, factor, loose=0.0):
    relative, absolute = steps(g.dtype)
    for found, was in zip(exact(g), before, strict=True):
        expected = was * factor
        assert abs(found - expected) <= (relative + loose) * abs(expected) + absolute, (found, expected)


def copy_of(g):
    fresh = torch.empty(0, dtype=g.dtype)
    stored = g.conj() if g.is_conj() else torch._neg_view(g) if g.is_neg() else g
    fresh.set_(stored.untyped_storage().clone(), g.storage_offset(), g.size(), g.stride())
    return fresh.conj() if g.is_conj() else torch._neg_view(fresh) if g.is_neg() else fresh


def unchanged(ps, grads):
    return all(torch.equal(q.grad.resolve_neg(), g.resolve_neg()) for q, g in zip(ps, grads, strict=True))


several = st.lists(gradient(), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(several, LIMITS, st.sampled_from(ORDERS), st.booleans())
@mpmath.workprec(300)
def test_one_norm(grads, limit, p, native):
    ps, before = helpers.parameters([copy_of(g) for g in grads]), [exact(g) for g in grads]
    norm = norm_of([v for values in before for v in values], p)
    with kernels(native):
        if norm > LARGEST * (1 + 1e-9):
            with pytest.raises(NonFiniteGradientError, match="is larger than any float64, though every value"):
                gradrein.clip_(ps, gradrein.by_norm(limit, p))
            assert unchanged(ps, grads)
            return
        if norm > LARGEST * (1 - 1e-9):
            return
        report = gradrein.clip_(ps, gradrein.by_norm(limit, p))
    assert abs(report.norm - norm) <= 1e-6 * norm + 1e-322
    if norm <= limit * (1 - 1e-6):
        assert unchanged(ps, grads)
    elif norm > limit * (1 + 1e-6) and norm > 1e-300 and mpmath.mpf(limit) / norm > 1e-300:
        for q, values in zip(ps, before, strict=True):
            assert_scaled(q.grad, values, mpmath.mpf(limit) / norm, loose=2e-6)
    assert report.coefficient <= 1
    assert all(torch.isfinite(q.grad).all() for q in ps)


@settings(max_examples=200, deadline=None)
@given(several, LIMITS, st.sampled_from(ORDERS), st.booleans(), st.sampled_from([None, True, False]))
@mpmath.workprec(300)
def test_torchs_name(grads, limit, p, native, foreach):
    ps, before = helpers.parameters([copy_of(g) for g in grads]), [exact(g) for g in grads]
    norm = norm_of([v for values in before for v in values], p)
    with kernels(native):
        found = gradrein.clip_grad_norm_(ps, limit, p, foreach=foreach).item()
    if norm > LARGEST * (1 - 1e-12):
        return
    assert abs(found - norm) <= 1e-6 * norm + torch.finfo(torch.float32).tiny * 1e-7
    factor = min(mpmath.mpf(1), mpmath.mpf(limit) / (norm + mpmath.mpf(1e-6)))
    if factor > 1e-300 or factor == 0:
        for q, values in zip(ps, before, strict=True):
            assert_scaled(q.grad, values, factor, loose=2e-6)


@settings(max_examples=200, deadline=None)
@given(several, LIMITS, st.sampled_from([2.0, 1.0, math.inf]), st.booleans())
@mpmath.workprec(300)
def test_the_norm_of_each(grads, limit, p, native):
    ps, before = helpers.parameters([copy_of(g) for g in grads]), [exact(g) for g in grads]
    if norm_of([v for values in before for v in values], p) > LARGEST:
        return
    with kernels(native):
        gradrein.clip_(ps, gradrein.by_norm(limit, p, per_parameter=True))
    for q, values in zip(ps, before, strict=True):
        norm = norm_of(values, p)
        factor = min(mpmath.mpf(1), mpmath.mpf(limit) / norm) if norm else mpmath.mpf(1)
        if norm > 1e-300 and (factor > 1e-300 or factor == 0):
            assert_scaled(q.grad, values, factor, loose=2e-6)
        assert torch.isfinite(q.grad).all()


@settings(max_examples=300, deadline=None)
@given(several, LIMITS, st.booleans(), st.sampled_from([None, False]))
@mpmath.workprec(300)
def test_every_value(grads, limit, native, foreach):
    ps, before = helpers.parameters([copy_of(g) for g in grads]), [exact(g) for g in grads]
    with kernels(native):
        gradrein.clip_grad_value_(ps, limit, foreach)
    for q, values in zip(ps, before, strict=True):
        relative, absolute = steps(q.grad.dtype)
        for found, was in zip(exact(q.grad), values, strict=True):
            size = abs(was)
            expected = was * (limit / size) if size > limit else was
            assert abs(found - expected) <= relative * abs(expected) + absolute


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("limit", [1e4, 1e6, 1e39, math.inf])
def test_a_value_that_is_infinite(dtype, limit, native):
    for layout in (lambda g: g, lambda g: g.repeat_interleave(2)[::2]):
        ps = helpers.parameters([layout(torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=dtype))])
        with kernels(native):
            gradrein.clip_grad_value_(ps, limit)
        held = min(limit, torch.finfo(dtype).max) if limit < math.inf else limit
        top = torch.tensor(held, dtype=dtype).item()
        assert ps[0].grad.nan_to_num(7.0, math.inf, -math.inf).tolist() == [top, -top, 7.0, 1.0]


ADAPTIVE = {
    "ByZScore": lambda each: gradrein.policies.ByZScore(warmup=1, per_parameter=each),
    "ByQuantile": lambda each: gradrein.policies.ByQuantile(0.3, per_parameter=each),
    "ByMedian": lambda each: gradrein.policies.ByMedian(0.5, warmup=1, per_parameter=each),
    "ByRunningNorm": lambda each: gradrein.policies.ByRunningNorm(warmup=1, per_parameter=each),
    "ByOvershoot": lambda _: gradrein.policies.ByOvershoot(),
    "SkipSpikes": lambda each: gradrein.policies.SkipSpikes(
        gradrein.policies.ByMedian(warmup=1, per_parameter=each), warmup=1
    ),
    "by_rms": lambda _: gradrein.by_rms(1e-3),
    "by_unit": lambda _: gradrein.by_unit(),
    "by_value": lambda _: gradrein.by_value(1.0),
}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_finite_gradient_stays_finite(name, native, data):
    """Whatever came before. Nothing grows, and nothing turns round."""
    policy = ADAPTIVE[name](data.draw(st.booleans()))
    dtypes = data.draw(st.lists(st.sampled_from(REAL + COMPLEX), min_size=2, max_size=2))
    ps = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in dtypes]
    for _ in range(4):
        grads = []
        for q in ps:
            g = data.draw(gradient(dtypes=(q.dtype,)))
            grads.append(g.repeat(3)[:3].clone())
            q.grad = grads[-1].clone()
        with kernels(native):
            try:
                gradrein.clip_(dict(zip("ab", ps, strict=True)), policy)
            except NonFiniteGradientError:  # a norm beyond float64
                assert unchanged(ps, grads)
                assert torch.float64 in dtypes or torch.complex128 in dtypes
                continue
        for q, g in zip(ps, grads, strict=True):
            assert torch.isfinite(q.grad).all()
            wide = torch.complex128 if g.is_complex() else torch.float64
            after, was = q.grad.to(wide), g.to(wide)
            relative, absolute = steps(g.dtype)
            aligned = after / after.abs().amax().clamp(min=1e-300) * (was / was.abs().amax().clamp(min=1e-300)).conj()
            assert (aligned.real >= -relative).all()
            assert (after.abs() <= was.abs() * (1 + relative) + absolute).all()


class Normalize:
    """A policy that gives every gradient a norm of 1."""

    p = 2.0

    def decide(self, grads):
        return gradrein.policies.Scale(1 / grads.total_norm(self.p))


@pytest.mark.parametrize("native", [True, False])
def test_a_factor_beyond_float32(native):
    (p,) = helpers.parameters([torch.tensor([3e-42, 0.0])])
    with kernels(native):
        assert gradrein.clip_([p], Normalize()).norm_after == pytest.approx(1.0)
    assert p.grad.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_coefficient_below_float32_without_kernels(dtype, foreach, without_kernels):
    (p,) = helpers.parameters([torch.full((4,), 1e38, dtype=dtype)])
    gradrein.clip_grad_norm_([p], 3e-6, foreach=foreach)
    expected = helpers.vector([torch.full((4,), 1e38, dtype=dtype)])
    expected = expected * (3e-6 / expected.norm())
    torch.testing.assert_close(
        helpers.vector([p.grad]), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )


def test_on_a_device_a_coefficient_beyond_float32_keeps_the_promises(as_on_a_device):
    """It cannot be read there: rounded down, it exceeds no limit and makes nothing infinite."""
    (p,) = helpers.parameters([torch.full((4,), 1e38)])
    gradrein.clip_grad_norm_([p], 3e-6)
    assert 0 < p.grad.norm() <= 3e-6


def test_two_gradients_whose_norm_is_beyond_float64():
    grads = [torch.tensor([1.7e308], dtype=torch.float64), torch.tensor([1.7e308], dtype=torch.float64)]
    ps = helpers.parameters([g.clone() for g in grads])
    for mode in ("raise", "zero"):
        with pytest.raises(NonFiniteGradientError, match="larger than any float64, though every value") as caught:
            gradrein.clip_(ps, gradrein.by_norm(1.0), nonfinite=mode)
        assert "another rank" not in str(caught.value)
        assert unchanged(ps, grads)
    with pytest.raises(NonFiniteGradientError, match="larger than any float64") as caught:
        gradrein.clip_grad_norm_(ps, 1.0, error_if_nonfinite=True)
    assert "another rank" not in str(caught.value)
    assert unchanged(ps, grads)
    assert gradrein.clip_(ps, gradrein.by_norm(1.0), nonfinite="skip").skipped
