"""A policy that remembers every element: many small tensors at once give what one at a time gives, in few operations."""

import copy
import dataclasses
import io
import math
import pickle

import pytest
import torch

import gradrein
from gradrein.policies import ByOvershoot, elements

SHAPES = [(3,), (), (2, 3), (4, 3), (0,), (5,), (2, 3), (7, 2, 2), (1,), (40,)]


def parameters(dtypes):
    torch.manual_seed(0)
    return {
        f"{i}": torch.nn.Parameter(torch.randn(shape).to(dtypes[i % len(dtypes)])) for i, shape in enumerate(SHAPES)
    }


def follow(policy, ps, steps=12, missing=lambda step, i: False):
    """Return every gradient after every step; parameters move along what is left of them."""
    rng, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for i, p in enumerate(ps.values()):
            g = torch.randn(p.shape, generator=rng).to(p.dtype) * (30.0 if (step + i) % 5 == 0 else 1.0)
            p.grad = None if missing(step, i) else g
        gradrein.clip_(ps, policy)
        found.append([None if p.grad is None else p.grad.clone() for p in ps.values()])
        with torch.no_grad():
            for p in ps.values():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    return found


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


DTYPES = [
    [torch.float32],
    [torch.float64, torch.float32],
    [torch.complex64, torch.float32],
    [torch.bfloat16, torch.float64, torch.float32],
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("together", [1, 9, 50])
def test_however_they_are_put_together(dtypes, together, monkeypatch):
    """The twin handles every tensor alone."""
    found = follow(ByOvershoot(), parameters(dtypes))
    monkeypatch.setattr(elements, "_TOGETHER", together)
    assert_same(follow(ByOvershoot(), parameters(dtypes)), found)
    monkeypatch.setattr(elements, "_SMALL", 0)
    assert_same(follow(ByOvershoot(), parameters(dtypes)), found)


def test_a_gradient_that_is_missing_for_a_while(monkeypatch):
    missing = lambda step, i: (step + i) % 3 == 0 and step > 1  # noqa: E731
    found = follow(ByOvershoot(), parameters([torch.float32]), missing=missing)
    monkeypatch.setattr(elements, "_SMALL", 0)
    assert_same(follow(ByOvershoot(), parameters([torch.float32]), missing=missing), found)


def saved_and_loaded(policy):
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    again = type(policy)(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})
    again.load_state_dict(torch.load(file, weights_only=True))
    return again


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy)), saved_and_loaded])
def test_a_copy_goes_on_by_itself(dtype, copied):
    ps, policy = parameters([dtype]), ByOvershoot()
    follow(policy, ps, 6)
    again, copies = copied(policy), {name: torch.nn.Parameter(p.detach().clone()) for name, p in ps.items()}
    assert_same(follow(again, copies, 4), follow(policy, ps, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_overshoot_of_a_sparse_gradient(dtype):
    """The twin has the same gradient in dense form."""
    found = []
    for to in (torch.Tensor.to_dense, lambda g: g):
        torch.manual_seed(0)
        table, head = torch.nn.Parameter(torch.randn(6, 3).to(dtype)), torch.nn.Parameter(torch.randn(3).to(dtype))
        policy, norms = ByOvershoot(rate=1.0), []
        for _ in range(8):
            rows = torch.randint(6, (1, 4))  # some twice: not coalesced
            table.grad = to(torch.sparse_coo_tensor(rows, torch.randn(4, 3).to(dtype), (6, 3), check_invariants=True))
            head.grad = torch.randn(3).to(dtype)
            norms.append(gradrein.clip_({"table": table, "head": head}, policy).norm_after)
            with torch.no_grad():
                table -= 0.5 * table.grad.to_dense()
                head -= 0.5 * head.grad
        found.append(norms)
    assert found[1] == pytest.approx(found[0], rel=1e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_from_inference_mode(dtype):
    def begun(ps):
        for p in ps.values():
            p.grad = torch.ones_like(p)
        policy, loaded = ByOvershoot(), ByOvershoot()
        gradrein.clip_(ps, policy)
        loaded.load_state_dict(policy.state_dict())
        return loaded

    ps = parameters([dtype])
    expected = follow(begun(ps), ps, steps=4)
    ps = parameters([dtype])
    with torch.inference_mode():
        policy = begun(ps)
    assert_same(follow(policy, ps, steps=4), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_of_a_bad_step_are_not_averaged(dtype):
    """A run is restored after its parameters became infinite: the average is still of where they were."""
    policy, p = ByOvershoot(), torch.nn.Parameter(torch.ones(3, dtype=dtype))
    for step in range(3):
        p.data.add_(0.1)
        p.grad = torch.full((3,), 1.0 + step, dtype=dtype)
        gradrein.clip_([p], policy)
    before, kept = policy.state_dict()["average"]["values"]["parameter 0"], p.data.clone()
    p.data.fill_(math.inf)
    p.grad = torch.full((3,), math.nan, dtype=dtype)
    gradrein.clip_([p], policy, nonfinite="skip")
    p.grad = torch.full((3,), math.nan, dtype=dtype)
    gradrein.clip_([p], policy, nonfinite="propagate")
    p.data.copy_(kept)
    assert torch.equal(policy.state_dict()["average"]["values"]["parameter 0"], before)
