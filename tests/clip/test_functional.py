"""TensorFlow's forms, against their documented formulas in float64."""

import math

import helpers
import pytest
import torch

import bridle


def test_global_norm_keeps_none_and_inputs():
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])
    clipped, norm = bridle.clip_by_global_norm([x, None, y], 1.0)
    assert norm.item() == 5
    assert clipped[1] is None
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(clipped[2], torch.tensor([[0.8]]))
    assert (x.tolist(), y.tolist()) == ([3, 0], [[4]])
    assert clipped[0] is not x


def test_global_norm_under_the_limit_is_exact():
    x = torch.randn(100)
    clipped, _ = bridle.clip_by_global_norm([x], 1e3)
    assert torch.equal(clipped[0], x)


@pytest.mark.parametrize("known", [10.0, torch.tensor(10.0)])
def test_known_norm_is_used(known):
    clipped, norm = bridle.clip_by_global_norm([torch.tensor([3.0])], 1.0, use_norm=known)
    assert norm.item() == 10
    torch.testing.assert_close(clipped[0], torch.tensor([0.3]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_norm_makes_all_nan_as_in_tensorflow(bad):
    clipped, norm = bridle.clip_by_global_norm([torch.tensor([bad]), torch.tensor([1.0])], 1.0)
    assert not math.isfinite(norm.item())
    assert all(c.isnan().all() for c in clipped)


def test_empty():
    clipped, norm = bridle.clip_by_global_norm([None], 1.0)
    assert clipped == [None]
    assert norm.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept_and_extremes_are_right(dtype):
    big = torch.full((5,), torch.finfo(dtype).max / 4, dtype=dtype)
    clipped, norm = bridle.clip_by_global_norm([big], 1.0)
    assert clipped[0].dtype == dtype
    assert norm.item() == pytest.approx(helpers.norm([big], 2), rel=1e-6)
    torch.testing.assert_close(helpers.vector(clipped).norm().item(), 1.0, rtol=1e-2, atol=0)
    one = bridle.clip_by_norm(big, 1.0)
    torch.testing.assert_close(helpers.vector([one]).norm().item(), 1.0, rtol=1e-2, atol=0)


@pytest.mark.parametrize("axes", [None, 0, 1, -1, (0, 1), [1]])
def test_by_norm_along_axes(axes):
    x = torch.randn(4, 5) * 3
    dims = tuple(axes) if isinstance(axes, list) else axes
    size = torch.linalg.vector_norm(x.double(), dim=dims, keepdim=True)
    expected = x.double() * (1.0 / size).clamp(max=1)
    torch.testing.assert_close(bridle.clip_by_norm(x, 1.0, axes).double(), expected, rtol=1e-6, atol=1e-7)


def test_by_norm_of_nothing_and_zeros():
    assert bridle.clip_by_norm(torch.zeros(3), 1.0).tolist() == [0, 0, 0]
    assert bridle.clip_by_norm(torch.zeros(0), 1.0).shape == (0,)


def test_by_value():
    x = torch.tensor([-2.0, 0.5, math.nan, 9.0])
    found = bridle.clip_by_value(x, -1, torch.tensor(2.0))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.5, math.nan, 2.0]), equal_nan=True)
    assert x[0] == -2


def test_thresholds_are_checked():
    with pytest.raises(ValueError, match="`clip_norm` is a limit"):
        bridle.clip_by_global_norm([torch.ones(1)], -1.0)
    with pytest.raises(ValueError, match="`clip_norm` is a limit"):
        bridle.clip_by_norm(torch.ones(1), math.nan)
    with pytest.raises(ValueError, match="`use_norm` is a limit"):
        bridle.clip_by_global_norm([torch.ones(1)], 1.0, use_norm=-2.0)
