"""The C kernels against plain torch in float64, value by value where the type allows it."""

import math
import subprocess
import sys
import threading

import pytest
import torch

import gradrein
from gradrein import _kernels
from gradrein._kernels import foreach as torch_operations

CPU = _kernels.BACKENDS["cpu"]

pytestmark = pytest.mark.skipif(CPU is None, reason=gradrein.kernel_status())

SIZES = [1, 2, 63, 64, 65, 1023, 1024, 1025, 32 * 1024, 32 * 1024 + 1, 100_003]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def every_half(dtype):
    """All 65536 bit patterns of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 2.5, 3.0, 4.0, math.inf])
def test_norm(dtype, n, p):
    x = [torch.randn(n).to(dtype), torch.randn(7).to(dtype)]
    each = torch.empty(2, dtype=torch.float64)
    total, any_double = CPU.extension.norm(x, p, 2, each)
    expected = torch.stack([torch.linalg.vector_norm(t.double(), p) for t in x])
    torch.testing.assert_close(each, expected, rtol=1e-6, atol=0)
    assert total == pytest.approx(torch.linalg.vector_norm(expected, p).item(), rel=1e-6)
    assert any_double == (dtype == torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_scale_and_clamp(dtype, n):
    x = torch.randn(n).to(dtype)
    scaled, clamped = x.clone(), x.clone()
    assert CPU.extension.scale([scaled], 0.3, 2)
    factor = 0.3 if dtype == torch.float64 else torch.tensor(0.3)
    assert torch.equal(scaled, (x.float() * factor).to(dtype) if dtype != torch.float64 else x * 0.3)
    assert CPU.extension.clamp([clamped], 0.5, 2)
    assert torch.equal(clamped, x.clamp(-0.5, 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1e-3, 7.7e-6, 0.0, 1e-42])
def test_every_half_value_is_converted_right(dtype, plain, factor):
    x = every_half(dtype)
    CPU.extension.plain(plain)
    try:
        found = x.clone()
        CPU.extension.scale([found], factor, 1)
        expected = (x.double() * factor).to(dtype) if factor == 1e-42 else (x.float() * torch.tensor(factor)).to(dtype)
        assert torch.equal(found.isnan(), expected.isnan())
        ok = ~expected.isnan()
        assert torch.equal(found[ok], expected[ok])
        for limit in (0.5, 1e-6, 3.0):
            found = x.clone()
            CPU.extension.clamp([found], limit, 1)
            expected = x.clamp(-limit, limit)
            ok = ~expected.isnan()
            assert torch.equal(found[ok], expected[ok])
            assert torch.equal(found.isnan(), expected.isnan())
        finite = x[x.isfinite()]
        total, *_ = CPU.extension.norm([finite], 1.0, 1)
        assert total == pytest.approx(finite.double().abs().sum().item(), rel=1e-6)
    finally:
        CPU.extension.plain(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 70, 40_000, 65_999])
def test_nan_and_infinity_are_never_lost(dtype, p, place):
    x = torch.randn(66_000).to(dtype)
    x[place] = math.inf
    assert CPU.extension.norm([x], p, 2)[0] == math.inf
    x[place] = math.nan
    assert math.isnan(CPU.extension.norm([torch.ones(3), x, torch.full((2,), math.inf)], p, 2)[0])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 7.0, math.inf])
@pytest.mark.parametrize("exponent", [-320, -300, -160, -45, -38, -20, 0, 19, 37, 100, 200, 307])
def test_the_whole_range_of_double(p, exponent):
    for dtype in (torch.float64, torch.float32):
        x = torch.tensor([3.0, -4.0, 1.0, 0.0], dtype=torch.float64) * 10.0**exponent
        x = x.to(dtype)
        if not x.isfinite().all() or not x.abs().max() > 0:
            continue
        top = x.double().abs().max()
        expected = top.item() * torch.linalg.vector_norm(x.double() / top, p).item()
        assert CPU.extension.norm([x], p, 1)[0] == pytest.approx(expected, rel=1e-6)


def test_a_chunk_of_tiny_values_beside_large_ones():
    x = torch.cat([torch.full((40_000,), 1e-24), torch.full((40_000,), 1e19), torch.zeros(40_000)])
    assert CPU.extension.norm([x], 2.0, 2)[0] == pytest.approx(1e19 * 200, rel=1e-6)
    tiny = torch.full((40_000,), 1e-24)
    assert CPU.extension.norm([tiny], 2.0, 2)[0] == pytest.approx(2e-22, rel=1e-6)


def test_the_answer_does_not_depend_on_threads():
    x = [torch.randn(200_000), torch.randn(17), torch.randn(50_000).bfloat16()]
    answers = {CPU.extension.norm(x, p, threads)[0] for threads in (1, 2, 3, 7) for p in (2.0,)}
    assert len(answers) == 1


def test_one_factor_each():
    x = [torch.ones(3), torch.ones(4), torch.ones(0), torch.ones(2)]
    assert CPU.extension.scale(x, torch.tensor([0.5, 1.0, 0.1, 0.25], dtype=torch.float64), 2)
    assert [t.tolist() for t in x] == [[0.5] * 3, [1.0] * 4, [], [0.25] * 2]
    with pytest.raises(ValueError, match="a float64 CPU tensor of 4 values is expected"):
        CPU.extension.scale(x, torch.ones(3, dtype=torch.float64), 2)
    with pytest.raises(TypeError, match="a list of tensors is expected"):
        CPU.extension.scale(tuple(x), 0.5, 2)


def test_no_tensor_at_all():
    nothing = torch.empty(0, dtype=torch.float64)
    assert CPU.extension.norm([], 2.0, 2, nothing) == (0.0, False)
    assert CPU.extension.scale([], nothing, 2)


class Subclass(torch.Tensor):
    pass


REFUSED = {
    "strided": lambda: torch.randn(4, 4)[:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 3),
    "overlapping": lambda: torch.randn(6).as_strided((3, 3), (1, 1)),
    "integer": lambda: torch.ones(3, dtype=torch.int32),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.randn(3).as_subclass(Subclass),
    "not a tensor": lambda: 3,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_ours_is_left_alone(kind):
    ours = torch.ones(3)
    tensors = [ours, REFUSED[kind]()]
    assert not CPU.extension.is_dense(tensors[1])
    assert CPU.extension.norm(tensors, 2.0, 1) is None
    assert CPU.extension.scale(tensors, 0.5, 1) is False
    assert CPU.extension.clamp(tensors, 0.5, 1) is False
    assert ours.tolist() == [1, 1, 1]


DENSE = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "size one": lambda: torch.randn(4, 1, 3).as_strided((4, 1, 3), (3, 77, 1)),
    "offset": lambda: torch.randn(10)[3:],
    "0-dim": lambda: torch.tensor(2.0),
    "empty": lambda: torch.zeros(0, 3),
    "grad of a graph": lambda: torch.randn(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)).requires_grad_(False),
    "negated view": lambda: torch._neg_view(torch.randn(3)),
}


@pytest.mark.parametrize("kind", DENSE)
def test_any_dense_block_is_taken(kind):
    x = DENSE[kind]()
    x = x.detach() if x.requires_grad else x
    before = x.clone()
    assert CPU.extension.norm([x], 2.0, 1)[0] == pytest.approx(before.double().norm().item(), rel=1e-6)
    assert CPU.extension.scale([x], 0.5, 1)
    torch.testing.assert_close(x, before * 0.5)
    assert CPU.extension.clamp([x], 0.1, 1)
    torch.testing.assert_close(x, (before * 0.5).clamp(-0.1, 0.1))


def test_two_threads_at_once():
    x = [[torch.full((5000,), float(k)) for _ in range(50)] for k in (1, 2, 3, 4)]
    found = [[] for _ in x]

    def work(k):
        for _ in range(50):
            found[k].append(CPU.extension.norm(x[k], 2.0, 2)[0])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k, answers in enumerate(found):
        assert set(answers) == {answers[0]}
        assert answers[0] == pytest.approx((k + 1) * math.sqrt(250_000), rel=1e-6)


def test_a_forked_process_waits_for_no_thread():
    code = (
        "import os, torch\nfrom gradrein._kernels._cpu import norm\nx = [torch.ones(2_000_000)]\nnorm(x, 1.0, 3)\n"
        "child = os.fork()\nif child == 0:\n    os._exit(0 if norm(x, 1.0, 3)[0] == 2_000_000 else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_the_torch_twin_agrees(p):
    x = [torch.randn(50).to(d) for d in DTYPES] + [torch.randn(3, 4).t()]
    each = torch.empty(len(x), dtype=torch.float64)
    CPU.extension.norm(x, p, 2, each)
    for foreach in (True, False):
        torch.testing.assert_close(torch_operations.norms(x, p, foreach=foreach), each, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [*SIZES, 100_003])
def test_follow(n):
    place, grad, average = torch.randn(3, n)
    way, before = place - average, average.clone()
    dd, dp, pp, dg, pg = CPU.extension.follow([place, grad, average], 0.25, 2)
    rows = torch.stack([way, place, grad]).double()
    torch.testing.assert_close(average, before + 0.25 * way)
    expected = (rows @ rows.T).tolist()
    assert [[dd, dp, dg], [pp, pg]] == [pytest.approx(expected[0]), pytest.approx(expected[1][1:])]


def test_follow_takes_vectors_of_float32_alone():
    vectors = [torch.ones(4), torch.ones(4), torch.ones(4)]
    for wrong in ([*vectors[:2], torch.ones(5)], [*vectors[:2], torch.ones(4).double()], vectors[:2]):
        assert CPU.extension.follow(wrong, 0.5, 1) is None
