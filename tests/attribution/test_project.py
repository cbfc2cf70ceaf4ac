"""Projections: the same by every way, right in expectation, and a function of seed, names and shapes alone."""

import copy
import math
from hashlib import blake2b

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein.errors import ArgumentError, ArgumentTypeError, InplaceModifiedError
from gradrein.persample.queries.project import Projection
from gradrein.persample.representations.base import Dense
from persample import test_experts
from persample.cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.")
KINDS = {"sparse": 5, "factored": 2}
GROUPED = hasattr(torch, "_grouped_mm")


@pytest.fixture
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def from_dense(ps, size, kind):
    """Project gradients that are written down: what every shorter way has to give."""
    grads = ps.grads()
    projection = Projection(size, kind, 3, {n: tuple(p.shape) for n, p in ps._views.held.items()})
    out = torch.zeros(len(ps), projection.columns, dtype=torch.float64)
    projection.apply({n: Dense(g) for n, g in grads.items()}, {}, out, 1 << 20)
    return out


def total(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same(name, kind):
    model, losses = CASES[name]()
    ps = gradrein.per_sample(losses(), model)
    size = min(KINDS[kind], total(model)) if kind == "sparse" else KINDS[kind]
    try:
        expected = from_dense(ps, size, kind)
    except ArgumentError:
        assert kind == "factored"  # no weight has a side above `size`
        return
    torch.testing.assert_close(ps.project(size, kind=kind, seed=3).double(), expected)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "tied_embedding_and_head", "small_cnn", "embedding_called_twice"])
def test_scales(name, kind):
    model, losses = CASES[name]()
    ps = gradrein.per_sample(losses(), model, memory_budget=0)
    scales = {name: torch.rand_like(p) for name, p in model.named_parameters() if p.requires_grad}
    found = ps.project(KINDS[kind], kind=kind, seed=3, scales=scales)
    scaled = {n: Dense(g * scales[n]) for n, g in ps.grads().items()}
    projection = Projection(KINDS[kind], kind, 3, {n: tuple(p.shape) for n, p in scales.items()})
    out = torch.zeros(found.shape, dtype=torch.float64)
    projection.apply(scaled, {}, out, 0)
    torch.testing.assert_close(found.double(), out)


@pytest.mark.skipif(not GROUPED, reason="this torch has no grouped product")
@pytest.mark.parametrize("kind", KINDS)
def test_stacks_of_experts(kind):
    model, losses = test_experts.grouped_experts(6)
    ps = gradrein.per_sample(losses(), model)
    assert "stacked" in ps.plan()
    found = ps.project(KINDS[kind], kind=kind, seed=3)
    torch.testing.assert_close(found.double(), from_dense(ps, KINDS[kind], kind), rtol=1e-4, atol=1e-4)


def test_complex_parameters_are_refused():
    weight = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    ps = gradrein.per_sample((torch.randn(5, 3).to(weight) @ weight).abs().sum(1), {"weight": weight})
    with pytest.raises(ArgumentError, match="'weight' is complex. Pass real ones"):
        ps.project(2)


def word(counter, keys):
    """The hash, in whole numbers of Python."""
    x = ((counter ^ ((counter >> 32) * 0x2C1B3C6D)) ^ keys[0]) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x21F0AAAD & 0xFFFFFFFF) ^ keys[1]
    x ^= x >> 15
    x = x * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def test_the_sparse_kind_is_what_it_says_number_by_number():
    model = nn.Linear(5, 4)
    g = torch.arange(1.0, 25).double()
    out = torch.zeros(1, 7, dtype=torch.float64)
    parts = {"weight": Dense(g[:20].view(1, 4, 5)), "bias": Dense(g[20:].view(1, 4))}
    Projection(7, "sparse", 11, {n: tuple(p.shape) for n, p in model.named_parameters()}).apply(parts, {}, out, 1 << 20)
    expected = [0.0] * 7
    for name, shape, start in (("weight", (4, 5), 0), ("bias", (4,), 20)):
        digest = blake2b("\0".join(["sparse", "11", name, str(shape)]).encode(), digest_size=8).digest()
        keys = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
        for i in range(math.prod(shape)):
            found = word(i, keys)
            expected[found * 7 >> 32] += float(g[start + i]) * (-1 if found & 1 else 1)
    assert out[0].tolist() == expected
    assert expected == [-11.0, 1.0, -13.0, -9.0, 4.0, 45.0, 7.0]  # a stored index stays comparable


def test_large_counters():
    from gradrein.persample.queries.project import _hash_

    counters = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 5]
    found = _hash_(torch.tensor(counters), (0x12345678, 0x9ABCDEF0)).tolist()
    assert found == [word(i, (0x12345678, 0x9ABCDEF0)) for i in counters]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("kind", "size"), [("sparse", 32), ("factored", 4)])
def test_inner_products_in_expectation(samples, kind, size):
    ps = samples.per_sample(slice(0, 6))
    grams = []
    for seed in range(200):
        z = ps.project(size, kind=kind, seed=seed).double()
        grams.append(z @ z.T)
    grams = torch.stack(grams)
    error = (grams.mean(0) - ps.gram().double()).abs() / (grams.std(0) / 200**0.5)
    assert error.max() < 5
    if kind == "sparse":
        g = torch.cat([x.flatten(1) for x in ps.grads().values()], 1).double()
        squares = g.square().sum(1)
        theory = (torch.outer(squares, squares) + (g @ g.T) ** 2 - 2 * g.square() @ g.square().T) / size
        assert (grams.var(0) / theory).mean() < 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_batches_order_and_names_of_wrappers_do_not_matter(samples, kind):
    whole = samples.project(kind=kind, size=6, seed=2)
    parts = [samples.project(part, kind=kind, size=6, seed=2) for part in (slice(0, 7), slice(7, 40))]
    torch.testing.assert_close(torch.cat(parts), whole)
    losses = nn.functional.cross_entropy(samples.model(samples.x), samples.y, reduction="none")
    pairs = list(samples.model.named_parameters())
    for named in (dict(reversed(pairs)), {f"module._orig_mod.{n}": p for n, p in pairs}):
        again = gradrein.per_sample(losses, named).project(6, kind=kind, seed=2)
        torch.testing.assert_close(again, whole)
        assert again.projection == whole.projection
    assert not torch.allclose(samples.project(kind=kind, size=6, seed=3), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_checkpoints_bf16_and_scalers(samples, kind):
    whole = samples.project(size=6, kind=kind)
    losses = nn.functional.cross_entropy(samples.model(samples.x), samples.y, reduction="none")
    groups = torch.arange(40) // 10
    grouped = gradrein.per_sample(losses, samples.model, sample_groups=groups).project(6, kind=kind)
    torch.testing.assert_close(grouped, whole.view(4, 10, -1).sum(1))
    out = checkpoint(samples.model, samples.x, use_reentrant=False)
    losses = nn.functional.cross_entropy(out, samples.y, reduction="none")
    torch.testing.assert_close(gradrein.per_sample(losses, samples.model).project(6, kind=kind), whole)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = nn.functional.cross_entropy(samples.model(samples.x), samples.y, reduction="none")
    scaled = gradrein.per_sample(scaler.scale(losses), samples.model, scaler=scaler).project(6, kind=kind)
    torch.testing.assert_close(scaled, whole)
    half = copy.deepcopy(samples.model).bfloat16()
    losses = nn.functional.cross_entropy(half(samples.x.bfloat16()).float(), samples.y, reduction="none")
    rough = gradrein.per_sample(losses, half).project(6, kind=kind)
    assert rough.dtype == torch.float32
    assert torch.cosine_similarity(rough, whole).min() > 0.97


def test_unused_parameters_and_no_samples(samples):
    samples.model.extra = nn.Linear(3, 3)
    for kind, size in (("sparse", 20), ("factored", 3)):
        losses = samples.model[2](samples.x[:, :16].new_ones(2, 16)).sum(1)
        z = gradrein.per_sample(losses, samples.model).project(size, kind=kind)
        none = gradrein.per_sample(losses[:0], samples.model).project(size, kind=kind)
        assert none.shape == (0, z.shape[1])
        assert z.projection["parameters"]["extra.weight"] == [3, 3]


def test_a_bad_sample_spoils_its_own_row_alone(samples):
    samples.x[3, 0] = torch.inf
    for kind in KINDS:
        bad = ~torch.isfinite(samples.project(size=4, kind=kind)).all(1)
        assert bad.nonzero().tolist() == [[3]]


def test_what_was_made_of_is_kept_by_torch_save(samples, tmp_path):
    z = samples.project(kind="factored", size=4, seed=5)
    torch.save(z, tmp_path / "z.pt")
    again = torch.load(tmp_path / "z.pt", weights_only=True)
    assert again.projection == z.projection
    assert [z.projection[key] for key in ("kind", "seed", "size", "scales")] == ["factored", 5, 4, None]


def test_the_fingerprint_sees_a_step_and_a_narrow_change(samples):
    first = samples.project().projection["weights"]
    assert first == samples.project(slice(0, 3), seed=9).projection["weights"]
    with torch.no_grad():
        samples.model[0].weight[3, 4] += 1e-4
    assert first != samples.project().projection["weights"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "`size` is a whole number of at least 1; found 0"),
        ({"size": 2.5}, "`size` is a whole number"),
        ({"size": 260}, "`size` 260 gives 260 numbers for a gradient of 259. Pass a smaller size, or use grads"),
        ({"size": 16, "kind": "factored"}, "`size` 16 gives 496 numbers for a gradient of 259"),
        ({"size": 4, "kind": "dense"}, "`kind` is 'sparse' or 'factored'; found 'dense'"),
        ({"size": 4, "seed": -1}, "`seed` is a whole number of at least 0; found -1"),
        (
            {"size": 4, "scales": {}},
            "`scales` needs a tensor for every parameter: see '0.weight'",
        ),
    ],
)
def test_bad_arguments(samples, options, text):
    with pytest.raises(ArgumentError, match=text):
        samples.project(**options)


def test_weights_that_changed_are_refused(samples):
    ps = samples.per_sample()
    with torch.no_grad():
        samples.model[2].weight.mul_(2)
    with pytest.raises(InplaceModifiedError, match="weights have changed since. Project before optimizer.step"):
        ps.project(4)


def test_stacked_directions_are_refused(samples):
    ps = samples.per_sample(slice(0, 5))
    with pytest.raises(ArgumentError, match=r"one direction at a time; .* go to cross\(other\)"):
        ps.dot(ps.grads())


def products(a, b):
    """Return the inner products of all pairs, from gradients written down."""
    rows = ([torch.cat([g[i].flatten() for g in ps.grads().values()]) for i in range(len(ps))] for ps in (a, b))
    left, right = map(torch.stack, rows)
    return left @ right.T


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["linear", "tied_embedding_and_head", "embedding_called_twice", "small_cnn"])
def test_cross(name):
    model, losses = CASES[name]()
    first, second = losses(), losses()
    a, b = gradrein.per_sample(first, model), gradrein.per_sample(second[1:], model)
    expected = products(a, b)
    torch.testing.assert_close(a.cross(b), expected)
    torch.testing.assert_close(b.cross(a), expected.T)


def test_cross_of_outer_products_with_many_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30, bias=False))
    for steps in (2, 40):
        a, b = (gradrein.per_sample(model(torch.randint(30, (n, steps))).square().sum((1, 2)), model) for n in (3, 4))
        torch.testing.assert_close(a.cross(b), products(a, b), rtol=1e-4, atol=1e-3)


def test_cross_with_something_else(samples):
    ps = samples.per_sample(slice(0, 2))
    with pytest.raises(ArgumentTypeError, match="expected what per_sample returned for another batch, found Tensor"):
        ps.cross(torch.ones(3))
    other = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match=r"the two batches have different parameters, such as \("):
        ps.cross(gradrein.per_sample(other(torch.ones(2, 4)).sum(1), other))


@pytest.mark.usefixtures("in_float64")
def test_one_side_of_a_weight_is_shorter_than_what_it_would_become():
    model = nn.Linear(1, 30)
    ps = gradrein.per_sample(model(torch.randn(4, 1)).square().sum(1), model)
    torch.testing.assert_close(ps.project(3, kind="factored", seed=3).double(), from_dense(ps, 3, "factored"))
