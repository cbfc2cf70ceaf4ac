"""The kernels of policies that remember every element, against torch operations: to the bit where each element is alone."""

import math

import pytest
import torch

import gradrein
from gradrein import _kernels
from gradrein.policies import ByElementSpike, ByOvershoot

CPU = _kernels.BACKENDS["cpu"]

pytestmark = pytest.mark.skipif(CPU is None, reason=gradrein.kernel_status())

NARROW = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {
    "one": [()],
    "small": [(3,), (), (2, 3), (4, 3), (0,), (5,), (7, 2, 2), (1,), (40,)],
    "blocks": [(1023,), (1024,), (1025,), (32, 32)],
    "chunks": [(32 * 1024 + 1,), (3,)],
}
SCALES = {"usual": 1.0, "tiny": 1e-42, "small": 1e-25, "large": 1e25, "huge": 1e38}


def values(shape, dtype, rng, scale=1.0, zeros=0.2):
    """Return random values over some orders of magnitude, some of them zero."""
    x = torch.randn(shape, generator=rng, dtype=torch.float64) * 10 ** (2 * torch.rand(shape, generator=rng) - 1)
    x = x * scale * (torch.rand(shape, generator=rng) >= zeros)
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def float32_of(t):
    return t.detach().float().reshape(-1)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_follow(dtype, shapes, scale):
    rng = torch.Generator().manual_seed(0)
    places = [torch.nn.Parameter(values(shape, dtype, rng, scale)) for shape in shapes]
    grads = [values(shape, dtype, rng, scale) for shape in shapes]
    place, g = (torch.cat([float32_of(t) for t in ts]) for ts in (places, grads))
    average = place * (1 + 0.1 * torch.randn(place.shape, generator=rng))
    average = average.clamp(-torch.finfo(torch.float32).max / 8, torch.finfo(torch.float32).max / 8)
    way, found = place - average, average.clone()
    sums = CPU.follow_(places, grads, found, 0.05)
    assert same_bits(found, average + way * torch.tensor(0.05))
    w, p, d = way.double(), place.double(), g.double()
    expected = [(w * w), (w * p), (p * p), (w * d), (p * d)]
    for ours, terms in zip(sums, expected, strict=True):  # finite, however large or small the values are
        assert ours == pytest.approx(terms.sum().item(), rel=1e-12, abs=1e-12 * terms.abs().sum().item())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_follow_is_the_same_to_the_bit_without_vector_instructions(dtype, shapes, scale):
    rng = torch.Generator().manual_seed(0)
    places, grads = ([values(shape, dtype, rng, scale) for shape in shapes] for _ in range(2))
    grads[0] = grads[0].to(torch.bfloat16)  # of another dtype than its parameter, or of the same
    start = torch.randn(sum(p.numel() for p in places), generator=rng)
    found = []
    for plain in (False, True):
        average = start.clone()
        CPU.extension.plain(plain)
        try:
            found.append((torch.tensor(CPU.follow_(places, grads, average, 0.05), dtype=torch.float64), average))
        finally:
            CPU.extension.plain(False)
    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])


def test_follow_does_not_depend_on_threads():
    rng = torch.Generator().manual_seed(0)
    places, grads = ([torch.randn(n, generator=rng) for n in (2_000_003, 5, 70_000)] for _ in range(2))
    start = torch.randn(2_070_008, generator=rng)
    found = set()
    for threads in (1, 2, 3):
        average = start.clone()
        found.add((CPU.extension.follow(places, grads, average, 0.1, threads), average.sum().item()))
    assert len(found) == 1


REFUSED = {
    "transposed": lambda: torch.ones(3, 2).t(),
    "channels last": lambda: torch.ones(1, 2, 3, 1).contiguous(memory_format=torch.channels_last),
    "strided": lambda: torch.ones(2, 6)[:, ::2],
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "float64": lambda: torch.ones(2, 3, dtype=torch.float64),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "another size": lambda: torch.ones(7),
}


@pytest.mark.parametrize("kind", [*REFUSED, "negated"])
def test_what_is_not_in_order_is_left_alone(kind):
    odd = torch._neg_view(torch.ones(2, 3)) if kind == "negated" else REFUSED[kind]()
    memory, kept = torch.zeros(6), torch.zeros(6)
    assert CPU.follow_([odd], [torch.ones(2, 3)], memory, 0.1) is None
    assert CPU.follow_([torch.ones(2, 3)], [odd], memory, 0.1) is None
    if kind != "negated":  # a magnitude has no sign
        assert CPU.limit_spikes_([odd], memory, torch.ones(4, 1, dtype=torch.float64), 0.0, 1.0) is None
    assert torch.equal(memory, kept)


@pytest.mark.parametrize("memory", [torch.zeros(5), torch.zeros(6).double(), torch.zeros(12)[::2]], ids=str)
def test_a_memory_that_does_not_fit_is_left_alone(memory):
    kept, settings = memory.clone(), torch.ones(4, 1, dtype=torch.float64)
    assert CPU.follow_([torch.ones(6)], [torch.ones(6)], memory, 0.1) is None
    assert CPU.limit_spikes_([torch.ones(6)], memory, settings, 0.0, 1.0) is None
    assert torch.equal(memory, kept)


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="a float64 CPU tensor of 4 values is expected"):
        CPU.limit_spikes_([torch.ones(6)], torch.ones(6), torch.ones(3, dtype=torch.float64), 0.0, 1.0)
    for call in (CPU.extension.kinds, lambda ts: CPU.follow_(ts, [], torch.ones(6), 0.1)):
        with pytest.raises(TypeError, match="a list of tensors is expected"):
            call((torch.ones(6),))


def test_kinds_differ_where_a_shape_or_a_dtype_does():
    calls = [
        [torch.ones(6)],
        [torch.ones(2, 3)],
        [torch.ones(3, 2)],
        [torch.ones(6, 1)],
        [torch.ones(6).double()],
        [torch.ones(6).half()],
        [torch.ones(6).bfloat16()],
        [torch.ones(6), torch.ones(())],
        [torch.ones(()), torch.ones(6)],
        [torch.ones(1, 1, 1, 1, 1, 1, 6)],
    ]
    assert len({CPU.kinds(tensors) for tensors in calls}) == len(calls)
    assert CPU.kinds([torch.ones(2, 3)]) == CPU.kinds([torch.nn.Parameter(torch.zeros(3, 2).t())])
    for odd in (torch.ones(3, dtype=torch.int32), torch.eye(3).to_sparse(), torch.ones(4)[::2]):
        assert CPU.kinds([torch.ones(2), odd]) is None
    assert CPU.kinds([]) is None


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "negated": lambda t: torch._neg_view(-t),
}
SPECIAL = {"none": None, "nan": math.nan, "inf": math.inf, "all zero": 0.0}


def follow_policy(policy, shapes, dtypes, scale, layout, special, steps=7):
    """Return every gradient after every step, along a path that does not depend on them, and the state at the end."""
    rng, found = torch.Generator().manual_seed(1), []
    dtype_of = [dtypes[i % len(dtypes)] for i in range(len(shapes))]
    size = min(max(scale, 1e-15), 1e15)  # of parameters: torch.dot of float32 keeps their squares in float32
    ps = [torch.nn.Parameter(values(s, d, rng, size)) for s, d in zip(shapes, dtype_of, strict=True)]
    for step in range(steps):
        for i, p in enumerate(ps):
            spike = 60.0 if (step + i) % 3 == 0 else 1.0
            g = values(p.shape, p.dtype, rng, scale / 60 * spike)
            if special is not None and step % 2 and i == len(ps) // 2 and g.numel():
                g.view(-1)[-1:] = special
                g = g * 0 if special == 0 else g
            p.grad = layout(g)
        gradrein.clip_(ps, policy, nonfinite="propagate")
        found.append([p.grad.clone() for p in ps])
        with torch.no_grad():
            for p in ps:
                p += values(p.shape, p.dtype, rng, size / 100)
    return found, policy.state_dict()


def both(make, monkeypatch, *args):
    native = follow_policy(make(), *args)
    monkeypatch.setitem(_kernels.BACKENDS, "cpu", None)
    return native, follow_policy(make(), *args)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtypes", [*([d] for d in NARROW), [torch.float32, torch.float64, torch.complex64]], ids=str)
def test_spikes_with_and_without_the_kernel(scale, shapes, dtypes, monkeypatch):
    bounds = {"floor": 1e-3, "ceiling": 2.0} if scale == SCALES["usual"] else {}
    make = lambda: ByElementSpike(theta=4.0, decay=0.9, warmup=2, **bounds)  # noqa: E731
    ours, theirs = both(make, monkeypatch, shapes, dtypes, scale, LAYOUTS["plain"], None)
    assert_same(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
def test_spikes_of_odd_layouts_and_values(layout, special, monkeypatch):
    make = lambda: ByElementSpike(theta=4.0, decay=0.9, warmup=2)  # noqa: E731
    for shapes in (SHAPES["small"], SHAPES["blocks"]):
        with monkeypatch.context() as patch:
            ours, theirs = both(make, patch, shapes, [torch.float32], 1.0, layout, special)
        assert_same(ours, theirs)


def assert_same(ours, theirs):
    for mine, other in zip(ours[0], theirs[0], strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    state, other = ours[1]["corrected_rms"], theirs[1]["corrected_rms"]
    assert state["shapes"] == other["shapes"]
    for key, t in state["flat"].items():
        assert same_bits(t, other["flat"][key])


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtypes", [*([d] for d in NARROW), [torch.float32, torch.float64, torch.complex64]], ids=str)
def test_overshoot_with_and_without_the_kernel(scale, shapes, dtypes, monkeypatch):
    ours, theirs = both(ByOvershoot, monkeypatch, shapes, dtypes, scale, LAYOUTS["plain"], None)
    assert_near(ours, theirs, 1e-2 if scale == SCALES["tiny"] else 1e-5)  # torch.dot rounds to subnormal float32


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
def test_overshoot_of_odd_layouts_and_values(layout, special, monkeypatch):
    for shapes in (SHAPES["small"], SHAPES["blocks"]):
        with monkeypatch.context() as patch:
            ours, theirs = both(ByOvershoot, patch, shapes, [torch.float32], 1.0, layout, special)
        assert_near(ours, theirs)


def assert_near(ours, theirs, rel=1e-5):
    """The averages to the bit, and what is a sum over all elements to rounding."""
    torch.testing.assert_close(ours[1]["rows"]["limit"], theirs[1]["rows"]["limit"], rtol=rel, atol=0)
    assert torch.equal(ours[1]["rows"]["seen"], theirs[1]["rows"]["seen"])
    for key, t in ours[1]["average"]["flat"].items():
        assert same_bits(t, theirs[1]["average"]["flat"][key])


@pytest.mark.parametrize("native", [True, False])
def test_what_only_decays_has_not_overshot(native, monkeypatch):
    """A single number that goes straight to zero: nothing but rounding errors is left to compare."""
    if not native:
        monkeypatch.setitem(_kernels.BACKENDS, "cpu", None)
    p, policy = torch.nn.Parameter(torch.tensor([0.9])), ByOvershoot(rate=1.0)
    for step in range(6):
        p.grad = torch.tensor([1.0 + 0.1 * step])
        assert gradrein.clip_([p], policy).norm_after == pytest.approx(1.0 + 0.001 * step, abs=0.005)
        p.data *= 0.9
