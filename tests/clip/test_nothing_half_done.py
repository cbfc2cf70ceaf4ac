"""An error leaves every gradient as it was, bit for bit, and every policy's memory; whatever the gradients are."""

import math
from unittest import mock

import helpers
import pytest
import torch

import gradrein
from gradrein import _kernels
from gradrein.errors import GradreinError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

CALLS = {
    "clip_grad_norm_": lambda ps: gradrein.clip_grad_norm_(ps, 0.5, error_if_nonfinite=True),
    "clip_grad_norm_, loop": lambda ps: gradrein.clip_grad_norm_(ps, 0.5, error_if_nonfinite=True, foreach=False),
    "clip_grad_norm_, a bad limit": lambda ps: gradrein.clip_grad_norm_(ps, torch.tensor(-1.0)),
    "clip_grad_value_": lambda ps: gradrein.clip_grad_value_(ps, 0.5),
    "clip_grad_value_, loop": lambda ps: gradrein.clip_grad_value_(ps, 0.5, foreach=False),
    "clip_grad_value_, beyond": lambda ps: gradrein.clip_grad_value_(ps, 1e39),
    "clip_grad_value_, a bad limit": lambda ps: gradrein.clip_grad_value_(ps, torch.tensor(math.nan)),
    "clip_grads_with_norm_": lambda ps: gradrein.clip_grads_with_norm_(ps, 1.0, torch.tensor(10.0)),
    "clip_grads_with_norm_, None": lambda ps: gradrein.clip_grads_with_norm_(ps, 1.0, None),
    "get_total_norm": lambda ps: gradrein.get_total_norm([p.grad for p in ps], error_if_nonfinite=True),
    "clip_by_global_norm": lambda ps: gradrein.clip_by_global_norm([p.grad for p in ps], 0.5),
    "clip_by_norm": lambda ps: [gradrein.clip_by_norm(p.grad, 0.5) for p in ps],
    "clip_by_value": lambda ps: [gradrein.clip_by_value(p.grad, -0.5, 0.5) for p in ps],
}
POLICIES = {
    "by_norm": lambda: gradrein.by_norm(0.5),
    "by_norm, a bad limit": lambda: gradrein.by_norm(torch.tensor(-1.0)),
    "by_norm 3": lambda: gradrein.by_norm(0.5, 3),
    "by_norm, per parameter": lambda: gradrein.by_norm(0.5, per_parameter=True),
    "by_rms": lambda: gradrein.by_rms(0.1),
    "by_value": lambda: gradrein.by_value(0.5),
    "by_unit": gradrein.by_unit,
    "ByZScore": lambda: gradrein.policies.ByZScore(warmup=0, ceiling=0.5),
    "ByQuantile": lambda: gradrein.policies.ByQuantile(ceiling=0.5),
    "ByMedian": lambda: gradrein.policies.ByMedian(warmup=0, ceiling=0.5),
    "ByRunningNorm": lambda: gradrein.policies.ByRunningNorm(warmup=0, ceiling=0.5),
    "ByOvershoot": gradrein.policies.ByOvershoot,
    "SkipSpikes": lambda: gradrein.policies.SkipSpikes(gradrein.by_value(0.5)),
}
MODES = ["raise", "skip", "zero", "propagate"]


def conjugate():
    return torch.tensor([3 + 4j, 1 - 2j, 0j]).conj()


def negative():
    return torch.tensor([3 + 4j, 1 - 2j, 0j]).conj().imag


def sparse(coalesced=False):
    g = torch.sparse_coo_tensor([[0, 2, 2]], [[3.0, 0.0], [1.0, 1.0], [3.0, -1.0]], (4, 2), check_invariants=False)
    return g.coalesce() if coalesced else g


def nan():
    return torch.tensor([1.0, math.nan, math.inf])


def inference():
    with torch.inference_mode():
        return torch.tensor([3.0, 4.0, 5.0]).repeat_interleave(2)[::2]


AWKWARD = {
    "conjugate": conjugate,
    "negative": negative,
    "sparse": sparse,
    "coalesced": lambda: sparse(True),
    "compressed": lambda: torch.tensor([[3.0, 0.0], [0.0, -4.0]]).to_sparse_csr(),
    "strided half": lambda: torch.full((4, 4), 3.0, dtype=torch.float16)[:, ::2],
    "strided bfloat16": lambda: torch.full((4, 4), 3.0, dtype=torch.bfloat16)[:, ::2],
    "complex": lambda: torch.tensor([[3e38 + 3e38j, 1j], [0j, 1 + 1j]]),
    "expanded": lambda: torch.tensor([[3.0], [4.0]]).expand(2, 3),
    "over each other": lambda: torch.arange(1.0, 7.0).unfold(0, 3, 1),
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.tensor(-7.0, dtype=torch.float16),
    "inference": inference,
    "integer": lambda: torch.tensor([3, 4]),
    "float8": lambda: torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn),
    "nan": nan,
    "beyond float64": lambda: torch.tensor([1.7e308, 1.7e308], dtype=torch.float64),
}


def parameters(kind):
    """Plain gradients on both sides of an awkward one, each in a parameter that takes it."""
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0], dtype=torch.float16), AWKWARD[kind]()]
    grads += [torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([[3.0, 4.0]]).t()]
    found = []
    for g in grads:
        like = g.detach().clone() if g.layout is torch.sparse_csr else torch.zeros(g.shape, dtype=g.dtype)
        p = torch.nn.Parameter(like, requires_grad=g.is_floating_point() or g.is_complex())
        p.grad = g
        found.append(p)
    return found


def bits(g):
    """Everything that a gradient holds, as bytes."""
    if g.layout is not torch.strided:
        parts = [g._indices(), g._values()] if g.is_sparse else [g.crow_indices(), g.col_indices(), g.values()]
        return [bits(t) for t in parts]
    return bytes(g.untyped_storage()), g.is_conj(), g.is_neg()


def assert_whole(ps, before, error):
    assert [bits(p.grad) for p in ps] == before, f"half done: {error}"


def attempt(call, ps):
    """What it raised, if anything: one of ours, or what torch raises for a kind of tensor that it has no op for."""
    before = [bits(p.grad) for p in ps]
    try:
        call(ps)
    except (GradreinError, NotImplementedError, RuntimeError, TypeError) as error:
        assert_whole(ps, before, error)
        return error
    return None


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("name", CALLS)
def test_a_call(name, kind, native):
    with mock.patch.dict(_kernels.BACKENDS, {} if native else {"cpu": None}):
        error = attempt(CALLS[name], parameters(kind))
    if "norm_" in name or "value_" in name or name == "get_total_norm":
        assert error is None or isinstance(error, GradreinError), repr(error)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy(name, kind, mode, native):
    """By itself, and as the second of two policies, of which the first has a memory."""
    with mock.patch.dict(_kernels.BACKENDS, {} if native else {"cpu": None}):
        first = gradrein.policies.ByRunningNorm(warmup=0, ceiling=0.5)
        ps = dict(zip("abcde", parameters(kind), strict=True))
        policy = POLICIES[name]()
        error = attempt(lambda _: gradrein.clip_(ps, {"[ab]": first, "*": policy}, nonfinite=mode), list(ps.values()))
        assert error is None or isinstance(error, GradreinError), repr(error)
        if error is not None:
            assert not first.state_dict()["rows"]["keys"]
            if hasattr(policy, "state_dict"):
                assert memory(policy) == memory(POLICIES[name]())
        else:
            left_alone = mode == "propagate" or name == "by_value"
            assert left_alone or all(torch.isfinite(helpers.dense(p.grad)).all() for p in ps.values())


def memory(policy):
    return shapes(policy.state_dict())


def shapes(state):
    if isinstance(state, dict):
        return {key: shapes(value) for key, value in state.items()}
    return tuple(state.shape) if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["conjugate", "negative", "strided half", "complex"])
@pytest.mark.parametrize("name", ["by_norm", "by_norm, per parameter", "by_rms", "by_value"])
def test_what_is_awkward_is_clipped_as_its_plain_copy(name, kind, native):
    with mock.patch.dict(_kernels.BACKENDS, {} if native else {"cpu": None}):
        awkward, plain = parameters(kind), parameters(kind)
        for p in plain:
            p.grad = p.grad.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        found, expected = (gradrein.clip_(ps, POLICIES[name]()) for ps in (awkward, plain))
    assert found.norm == pytest.approx(expected.norm, rel=1e-7)
    assert found.norm_after == pytest.approx(expected.norm_after, rel=1e-6)
    for a, b in zip(awkward, plain, strict=True):
        torch.testing.assert_close(a.grad.resolve_conj().resolve_neg(), b.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["expanded", "over each other"])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "by_norm", "by_value", "by_unit"])
def test_elements_in_one_memory_are_measured_and_not_written(name, kind, native):
    with mock.patch.dict(_kernels.BACKENDS, {} if native else {"cpu": None}):
        call = CALLS.get(name) or (lambda ps: gradrein.clip_(ps, POLICIES[name]()))
        ps = parameters(kind)
        assert gradrein.get_total_norm([p.grad for p in ps]) == gradrein.get_total_norm([p.grad.clone() for p in ps])
        error = attempt(call, ps)
    assert "stores several elements in the same memory, as an expanded tensor does" in str(error)
