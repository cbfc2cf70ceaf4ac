"""TensorFlow's forms, against their documented formulas in float64."""

import math
from collections import OrderedDict
from typing import NamedTuple

import helpers
import pytest
import torch
from torch.utils._pytree import tree_flatten

import gradrein


def test_global_norm_keeps_none_and_inputs():
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])
    clipped, norm = gradrein.clip_by_global_norm([x, None, y], 1.0)
    assert norm.item() == 5
    assert clipped[1] is None
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(clipped[2], torch.tensor([[0.8]]))
    assert (x.tolist(), y.tolist()) == ([3, 0], [[4]])
    assert clipped[0] is not x


def test_global_norm_under_the_limit_is_exact():
    x = torch.randn(100)
    clipped, _ = gradrein.clip_by_global_norm([x], 1e3)
    assert torch.equal(clipped[0], x)


@pytest.mark.parametrize("known", [10.0, torch.tensor(10.0)])
def test_known_norm_is_used(known):
    clipped, norm = gradrein.clip_by_global_norm([torch.tensor([3.0])], 1.0, use_norm=known)
    assert norm.item() == 10
    torch.testing.assert_close(clipped[0], torch.tensor([0.3]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_norm_makes_all_nan_as_in_tensorflow(bad):
    clipped, norm = gradrein.clip_by_global_norm([torch.tensor([bad]), torch.tensor([1.0])], 1.0)
    assert not math.isfinite(norm.item())
    assert all(c.isnan().all() for c in clipped)


def test_empty():
    clipped, norm = gradrein.clip_by_global_norm([None], 1.0)
    assert clipped == [None]
    assert norm.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_dtypes_are_kept_and_extremes_are_right(dtype):
    big = torch.full((5,), torch.finfo(dtype).max / 4, dtype=dtype)
    clipped, norm = gradrein.clip_by_global_norm([big], 1.0)
    assert clipped[0].dtype == dtype
    assert norm.item() == pytest.approx(helpers.norm([big], 2), rel=1e-6)
    torch.testing.assert_close(helpers.vector(clipped).norm().item(), 1.0, rtol=1e-2, atol=0)
    one = gradrein.clip_by_norm(big, 1.0)
    torch.testing.assert_close(helpers.vector([one]).norm().item(), 1.0, rtol=1e-2, atol=0)


@pytest.mark.parametrize("axes", [None, 0, 1, -1, (0, 1), [1]])
def test_by_norm_along_axes(axes):
    x = torch.randn(4, 5) * 3
    dims = tuple(axes) if isinstance(axes, list) else axes
    size = torch.linalg.vector_norm(x.double(), dim=dims, keepdim=True)
    expected = x.double() * (1.0 / size).clamp(max=1)
    torch.testing.assert_close(gradrein.clip_by_norm(x, 1.0, axes).double(), expected, rtol=1e-6, atol=1e-7)


def test_by_norm_of_nothing_and_zeros():
    assert gradrein.clip_by_norm(torch.zeros(3), 1.0).tolist() == [0, 0, 0]
    assert gradrein.clip_by_norm(torch.zeros(0), 1.0).shape == (0,)


def test_by_value():
    x = torch.tensor([-2.0, 0.5, math.nan, 9.0])
    found = gradrein.clip_by_value(x, -1, torch.tensor(2.0))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.5, math.nan, 2.0]), equal_nan=True)
    assert x[0] == -2


def test_thresholds_are_checked():
    with pytest.raises(ValueError, match="`clip_norm` must be zero or more"):
        gradrein.clip_by_global_norm([torch.ones(1)], -1.0)
    with pytest.raises(ValueError, match="`clip_norm` must be zero or more"):
        gradrein.clip_by_norm(torch.ones(1), math.nan)
    with pytest.raises(ValueError, match="`use_norm` must be zero or more"):
        gradrein.clip_by_global_norm([torch.ones(1)], 1.0, use_norm=-2.0)


def nests():
    yield {"a": torch.tensor([3.0]), "b": {"c": torch.tensor([[4.0]]), "d": None}}
    yield (torch.tensor([3.0]), [torch.tensor([4.0]), ()])
    yield [torch.tensor([3.0]), {"x": (torch.tensor([4.0]),)}]
    yield OrderedDict(b=torch.tensor([3.0]), a=torch.tensor([4.0]))
    yield torch.tensor([3.0, 4.0])
    yield Pair(torch.tensor([3.0]), torch.tensor([4.0]))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize("nest", list(nests()), ids=lambda nest: type(nest).__name__)
def test_any_nest_keeps_its_structure(nest):
    clipped, norm = gradrein.clip_by_global_norm(nest, 1.0)
    assert norm.item() == 5
    assert type(clipped) is type(nest)
    before, after = tree_flatten(nest), tree_flatten(clipped)
    assert before[1] == after[1]
    for old, new in zip(before[0], after[0], strict=True):
        assert (old is None) == (new is None)
        if old is not None:
            torch.testing.assert_close(new, old / 5)


def test_an_iterator_is_walked_once_and_gives_a_list():
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    clipped, _ = gradrein.clip_by_global_norm(iter(tensors), 1.0)
    torch.testing.assert_close(clipped, [torch.tensor([0.6]), torch.tensor([0.8])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_under_vmap_as_in_a_loop(dtype):
    x, y = torch.randn(5, 3, 2, dtype=dtype), torch.randn(5, dtype=dtype)
    x[0] *= 1e-3
    limits = torch.tensor([1.0, 0.5, 2.0, 1e3, 0.0])

    def clip(a, b, limit):
        clipped, norm = gradrein.clip_by_global_norm({"a": a, "b": (b, None)}, limit)
        return clipped["a"], clipped["b"][0], norm, gradrein.clip_by_norm(a, limit, axes=1)

    found = torch.func.vmap(clip)(x, y, limits)
    for i in range(5):
        for whole, one in zip(found, clip(x[i], y[i], limits[i]), strict=True):
            assert whole.dtype == one.dtype
            torch.testing.assert_close(whole[i], one)


def test_under_vmap_at_every_size():
    x = torch.tensor([[3e38, 3e38], [1e-30, 1e-30], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    found = torch.func.vmap(lambda t: gradrein.clip_by_global_norm([t], 1.0)[0][0])(x)
    for i in range(5):
        torch.testing.assert_close(found[i], gradrein.clip_by_global_norm([x[i]], 1.0)[0][0], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_point_is_limited_by_value(dtype):
    with pytest.raises(gradrein.errors.UnsupportedGradientError, match=f"this one is {dtype}"):
        gradrein.clip_by_value(torch.ones(2, dtype=dtype), 0, 1)


def test_a_limit_that_the_type_cannot_hold_limits_infinity():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=torch.float16)
    found = gradrein.clip_by_value(x, -1e6, 1e6).nan_to_num(7.0, math.inf, -math.inf)
    assert found.tolist() == [65504, -65504, 7, 1]
    assert gradrein.clip_by_value(x, -math.inf, math.inf)[0] == math.inf


def test_per_sample_gradients_are_clipped_under_vmap():
    model, x = torch.nn.Linear(3, 1), torch.randn(5, 3)
    parameters = dict(model.named_parameters())  # which require a gradient

    def clipped(sample):
        loss = lambda ps: torch.func.functional_call(model, ps, (sample,)).square().sum()  # noqa: E731
        return gradrein.clip_by_global_norm(torch.func.grad(loss)(parameters), 0.1)

    found, norms = torch.func.vmap(clipped)(x)
    ps = gradrein.per_sample(model(x).square().sum(1), model)
    torch.testing.assert_close(norms, ps.norms())
    for name, each in ps.grads().items():
        factor = (0.1 / ps.norms()).clamp(max=1).view(-1, *[1] * (each.dim() - 1))
        torch.testing.assert_close(found[name], each * factor)


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda t: torch.func.jvp(f, (t,), (t,))])
def test_what_would_be_differentiated_in_silence_is_refused(transform):
    for clip in (
        lambda t: gradrein.clip_by_global_norm([t], 1.0)[0][0].sum(),
        lambda t: torch.func.vmap(lambda row: gradrein.clip_by_norm(row, 1.0))(t[None]).sum(),
    ):
        with pytest.raises(gradrein.errors.UnsupportedGradientError, match="is not differentiable"):
            transform(clip)(torch.ones(3))


def test_a_detached_tensor_is_clipped_inside_a_derivative():
    found = torch.func.grad(lambda t: (gradrein.clip_by_norm(t.detach(), 1.0) * t).sum())(torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(found, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("axes", [(0, 0), [1, -1]])
def test_an_axis_is_named_once(axes):
    with pytest.raises(gradrein.errors.ArgumentError, match="each once"):
        gradrein.clip_by_norm(torch.ones(2, 3), 1.0, axes)
