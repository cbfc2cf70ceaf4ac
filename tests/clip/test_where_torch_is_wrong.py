"""Each row of the table in docs/clipping.md: what torch 2.13 gets wrong, done right."""

import math

import helpers
import pytest
import torch

import gradrein

FOREACH = [None, True, False]


def clip(grads, max_norm=1.0, p=2.0, foreach=None):
    ps = helpers.parameters(grads)
    return gradrein.clip_grad_norm_(ps, max_norm, p, foreach=foreach), [q.grad for q in ps]


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize(
    ("grad", "true_norm"),
    [
        (torch.full((1000, 1000), 100.0, dtype=torch.float16), 1e5),
        (torch.full((4,), 1e19), 2e19),
        (torch.full((4,), 1e-25), 2e-25),
        (torch.full((4,), 3e38), 6e38),  # larger than any float32: returned in float64
        (torch.full((4,), 1e200, dtype=torch.float64), 2e200),
        (torch.full((4,), 1e-200, dtype=torch.float64), 2e-200),
        (torch.full((4,), 1e-310, dtype=torch.float64), 2e-310),
        (torch.full((100_000,), 1e-24), 1e-24 * math.sqrt(1e5)),
    ],
)
def test_norm_neither_overflows_nor_vanishes(grad, true_norm, foreach):
    norm, (clipped,) = clip([grad.clone()], max_norm=true_norm / 10, foreach=foreach)
    assert norm.item() == pytest.approx(true_norm, rel=1e-3 if grad.dtype == torch.float16 else 1e-5)
    expected = helpers.clipped([grad], true_norm / 10, 2.0)
    torch.testing.assert_close(helpers.vector([clipped]), expected, rtol=2e-3, atol=2e-45)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("foreach", FOREACH)
def test_half_norm_is_not_rounded_to_half(dtype, foreach):
    grads = [torch.rand(37).to(dtype) for _ in range(100)]
    norm, _ = clip(grads, math.inf, foreach=foreach)
    assert norm.dtype == torch.float32
    assert clip([*grads, torch.ones(1, dtype=torch.float64)], math.inf, foreach=foreach)[0].dtype == torch.float64
    assert norm.item() == pytest.approx(helpers.norm(grads, 2), rel=1e-6)


@pytest.mark.parametrize("foreach", FOREACH)
def test_a_parameter_listed_twice_counts_once(foreach):
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    assert gradrein.clip_grad_norm_([p, p], 1.0, foreach=foreach).item() == 5
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    assert gradrein.get_total_norm([p.grad, p.grad]).item() == pytest.approx(1)


@pytest.mark.parametrize("bad", [-1.0, math.nan, -math.inf, torch.tensor(-1.0), "much", None])
def test_thresholds_that_mean_nothing(bad):
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    with pytest.raises(ValueError, match=r"`max_norm` (is|must be)"):
        gradrein.clip_grad_norm_(p, bad)
    with pytest.raises(ValueError, match=r"`clip_value` (is|must be)"):
        gradrein.clip_grad_value_(p, bad)
    with pytest.raises(ValueError, match=r"`max_norm` (is|must be)"):
        gradrein.clip_grads_with_norm_(p, bad, torch.tensor(5.0))
    assert p.grad.tolist() == [3, 4]


@pytest.mark.parametrize("bad", [0, -1, -math.inf, math.nan, "two"])
def test_orders_that_mean_nothing(bad):
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    with pytest.raises(ValueError, match="the order of a norm must be"):
        gradrein.clip_grad_norm_(p, 1.0, bad)
    with pytest.raises(ValueError, match="the order of a norm must be"):
        gradrein.get_total_norm([p.grad], bad)
    assert p.grad.tolist() == [3, 4]


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("limit", [math.inf, torch.tensor(math.inf)])
def test_infinite_threshold_only_measures(foreach, limit):
    norm, (g,) = clip([torch.tensor([math.inf, 1.0, -2.0])], limit, foreach=foreach)
    assert norm.item() == math.inf
    assert g.tolist() == [math.inf, 1.0, -2.0]


def test_exhausted_iterators_are_noticed():
    ps = helpers.parameters([torch.tensor([3.0, 4.0])])
    generator = (p for p in ps)
    gradrein.clip_grad_norm_(generator, 1.0)
    for make in (lambda: filter(None, []), lambda: map(abs, []), lambda: iter([]), lambda: generator):
        for clip_grad in (gradrein.clip_grad_norm_, gradrein.clip_grad_value_):
            with pytest.warns(
                gradrein.errors.GradreinWarning, match="is an empty generator, no gradient clipping will occur.$"
            ):
                clip_grad(make(), 1.0)


def test_the_warning_points_at_the_caller():
    with pytest.warns(UserWarning, match="is an empty generator") as caught:
        gradrein.clip_grad_norm_(iter([]), 1.0)
    assert caught[0].filename == __file__


def test_raw_gradients_are_noticed():
    grads = [torch.ones(3), torch.ones(2)]
    with pytest.warns(gradrein.errors.GradreinWarning, match="pass the parameters they belong to"):
        gradrein.clip_grad_norm_(grads, 1.0)
    with pytest.warns(gradrein.errors.GradreinWarning, match="none of the 2 tensors"):
        gradrein.clip_grads_with_norm_(grads, 1.0, torch.tensor(5.0))
    with pytest.warns(gradrein.errors.GradreinWarning, match="pass the parameters"):
        gradrein.clip_grad_value_(grads, 1.0)


def sparse(coalesced):
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        g = torch.sparse_coo_tensor([[0, 2, 2]], [[3.0, 0.0], [1.0, 1.0], [3.0, -1.0]], (4, 2))
    return g.coalesce() if coalesced else g


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("foreach", FOREACH)
def test_sparse(coalesced, foreach):
    norm, (g, other) = clip([sparse(coalesced), torch.zeros(2)], 1.0, foreach=foreach)
    assert norm.item() == 5  # the entries of row 2 add up to (4, 0)
    torch.testing.assert_close(g.to_dense(), sparse(True).to_dense() / 5)
    p = torch.nn.Parameter(torch.zeros(4, 2))
    p.grad = sparse(coalesced)
    gradrein.clip_grad_value_([p], 3.5, foreach)
    torch.testing.assert_close(p.grad.to_dense(), sparse(True).to_dense().clamp(-3.5, 3.5))


@pytest.mark.needs("Tensor.grad_dtype")
def test_kinds_that_are_refused_by_name():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad_dtype = None
    p.grad = torch.ones(3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"a gradient of shape \(3,\) is int64"):
        gradrein.clip_grad_norm_([p], 1.0)


def test_inference_tensors():
    with torch.inference_mode():
        p = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        p.grad = torch.tensor([3.0, 4.0])
        assert gradrein.clip_grad_norm_([p], 1.0).item() == 5
        torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("foreach", FOREACH)
def test_the_coefficient_is_not_rounded_to_half(dtype, foreach):
    g = torch.randn(500).to(dtype)
    norm, (after, scalar) = clip([g.clone(), torch.zeros((), dtype=dtype)], 1.0, foreach=foreach)
    expected = (g.float() * torch.tensor(1.0 / (norm.item() + 1e-6))).to(dtype)
    assert (after != expected).sum() <= 2  # a tie that falls the other way
    assert scalar == 0


def test_a_known_norm_may_be_any_number():
    for known in (5, 5.0, torch.tensor(5.0)):
        (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
        gradrein.clip_grads_with_norm_([p], 1.0, known)
        torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
