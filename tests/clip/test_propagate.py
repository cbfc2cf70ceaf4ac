"""`nonfinite="propagate"` with a limit on each value: what torch's `clip_grad_value_` does, and a report that says so."""

import itertools
import math

import helpers
import pytest
import torch

import gradrein

VALUES = [math.nan, math.inf, -math.inf, 100.0, -0.5]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def gradients(dtype):
    """All gradients of two values out of the above."""
    return [torch.tensor(pair, dtype=dtype) for pair in itertools.product(VALUES, repeat=2)]


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("limit", [1.0, torch.tensor(1.0), 1e3, 1e4, math.inf])
def test_each_gradient_is_clamped_as_torch_does(dtype, limit):
    for grad in gradients(dtype):
        ours, theirs = helpers.parameters([grad.clone()]), helpers.parameters([grad.clone()])
        report = gradrein.clip_(ours, gradrein.by_value(limit), nonfinite="propagate")
        torch.nn.utils.clip_grad_value_(theirs, float(limit))
        torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=0, atol=0, equal_nan=True)
        changed = not torch.equal(ours[0].grad.nan_to_num(7.0), grad.nan_to_num(7.0))
        assert report.clipped == (changed or bool(grad.isnan().any()))  # a NaN hides whether values were limited
        largest = ours[0].grad.abs().amax().item()
        assert report.norm_after == pytest.approx(largest, rel=1e-2, nan_ok=True)


def test_a_nan_elsewhere_does_not_switch_the_limit_off():
    first, second = torch.tensor([math.nan, 0.5]), torch.tensor([0.1, 3.0])
    for grads in ([first, second], [second, first], [torch.tensor([math.nan, 9.0]), torch.tensor([0.1])]):
        ps = helpers.parameters([g.clone() for g in grads])
        report = gradrein.clip_(ps, gradrein.by_value(1.0), nonfinite="propagate")
        assert all(bool((p.grad.nan_to_num(0.0) <= 1).all()) for p in ps)
        assert report.clipped


def test_a_dry_run_says_what_would_be_done():
    ps = helpers.parameters([torch.tensor([math.nan, 9.0])])
    report = gradrein.clip_(ps, gradrein.by_value(1.0), nonfinite="propagate", dry_run=True)
    assert report.clipped
    assert ps[0].grad[1] == 9


def test_a_sparse_gradient_with_a_nan():
    where, values = torch.tensor([[0, 0, 2]]), torch.tensor([2.0, 3.0, math.nan])
    grad = torch.sparse_coo_tensor(where, values, (4,), check_invariants=True)
    ps = helpers.parameters([grad])
    assert gradrein.clip_(ps, gradrein.by_value(1.0), nonfinite="propagate").clipped
    assert ps[0].grad.to_dense().nan_to_num(7.0).tolist() == [1, 0, 7, 0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_infinite_complex_values_keep_their_direction(dtype):
    inf, nan = math.inf, math.nan
    given = [complex(inf, 5), complex(-inf, inf), complex(0, -inf), complex(3, 4), complex(0.3, 0), complex(nan, 1)]
    half = 0.5**0.5
    expected = [complex(1, 0), complex(-half, half), complex(0, -1), complex(0.6, 0.8), complex(0.3, 0)]
    ps = helpers.parameters([torch.tensor(given, dtype=dtype)])
    report = gradrein.clip_(ps, gradrein.by_value(1.0), nonfinite="propagate")
    torch.testing.assert_close(ps[0].grad[:5], torch.tensor(expected, dtype=dtype))
    assert torch.isnan(ps[0].grad[5].real)
    assert report.clipped
    infinite = helpers.parameters([torch.tensor(given[:3], dtype=dtype)])
    assert gradrein.clip_(infinite, gradrein.by_value(2.0), nonfinite="propagate").norm_after == 2
    gradrein.clip_(infinite, gradrein.by_value(inf), nonfinite="propagate")
    assert bool(torch.isfinite(torch.view_as_real(infinite[0].grad)).all())


def test_a_limit_beyond_the_type_beside_a_nan():
    ps = helpers.parameters([torch.tensor([math.nan, math.inf], dtype=torch.float16)])
    assert gradrein.clip_(ps, gradrein.by_value(1e6), nonfinite="propagate").clipped
    assert ps[0].grad[1] == torch.finfo(torch.float16).max
    ps = helpers.parameters([torch.tensor([1.0, math.inf], dtype=torch.float16)])
    assert (
        gradrein.clip_(ps, gradrein.by_value(1e6), nonfinite="propagate").norm_after == torch.finfo(torch.float16).max
    )
