"""The methods, against their formulas."""

import pytest
import torch

import gradrein
from gradrein.attribution import GradientStore, duplicates, less, margins, outliers, tracin, trak
from gradrein.errors import ArgumentError, ArgumentTypeError, StoreError


@pytest.fixture
def checkpoints(tmp_path, samples):
    """Two checkpoints, whose samples were added in another order, with their gradients and those of three queries."""
    stores, rows, queries = [], [], []
    for number, order in enumerate((torch.arange(40), torch.arange(39, -1, -1))):
        z = samples.project(slice(None), seed=0, size=32)
        store = GradientStore(tmp_path / str(number))
        for part in order.split(16):
            store.add(part, samples.project(part, size=32))
        stores.append(store)
        rows.append(z.double())
        queries.append(samples.project(slice(0, 3), size=32))
        with torch.no_grad():
            for p in samples.model.parameters():
                p += 0.1 * torch.randn_like(p)
    return stores, rows, queries


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def test_tracin(checkpoints):
    stores, rows, queries = checkpoints
    scores, ids = tracin(stores, queries, rates=[0.5, 2.0])
    expected = 0.5 * queries[0].double() @ rows[0].T + 2 * queries[1].double() @ rows[1].T
    torch.testing.assert_close(scores.double(), expected[:, ids], rtol=1e-4, atol=1e-5)
    scores, ids = tracin(stores[1], queries[1], cosine=True)
    torch.testing.assert_close(
        scores.double(), (unit(queries[1].double()) @ unit(rows[1]).T)[:, ids], rtol=1e-4, atol=1e-5
    )
    assert ids.tolist() == list(range(39, -1, -1))


def test_less(checkpoints):
    stores, rows, queries = checkpoints
    tasks = {"a": [q[:1] for q in queries], "b": [q[1:] for q in queries]}
    scores, ids = less(stores, tasks, rates=[1.0, 3.0])
    each = [
        sum(rate * (unit(q.double()) @ unit(r).T).mean(0) for rate, q, r in zip((1, 3), task, rows, strict=True))
        for task in tasks.values()
    ]
    torch.testing.assert_close(scores.double(), torch.stack(each).amax(0)[ids], rtol=1e-4, atol=1e-5)


def test_trak(checkpoints):
    stores, rows, queries = checkpoints
    residuals = torch.rand(2, 40)
    scores, ids = trak(stores, queries, residuals)
    each = [q.double() @ torch.linalg.inv(r.T @ r) @ r.T for q, r in zip(queries, rows, strict=True)]
    expected = sum(each) / 2 * residuals.double().mean(0)
    torch.testing.assert_close(scores.double(), expected[:, ids], rtol=1e-2, atol=1e-3)
    damped, _ = trak(stores[0], queries[0], residuals[0], damping=0.1)
    products = rows[0].T @ rows[0]
    products += 0.1 * products.diagonal().mean() * torch.eye(32)
    expected = queries[0].double() @ torch.linalg.inv(products) @ rows[0].T * residuals[0].double()
    torch.testing.assert_close(damped.double(), expected, rtol=1e-3, atol=1e-4)


def test_margins():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    p = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(margins(logits, labels), torch.log(p / (1 - p)))
    torch.testing.assert_close(torch.sigmoid(-margins(logits, labels)), 1 - p)


def test_outliers(checkpoints):
    stores, rows, _ = checkpoints
    scores, ids = outliers(stores, k=5)
    expected = (rows[0].square().sum(1) + rows[1].square().sum(1)) / 2
    assert ids.tolist() == expected.topk(5).indices.tolist()
    torch.testing.assert_close(scores.double(), expected[ids], rtol=1e-4, atol=1e-5)
    assert len(outliers(stores)[1]) == 40


@pytest.mark.parametrize("block", [300, 1 << 22])
def test_duplicates(tmp_path, samples, block, monkeypatch):
    monkeypatch.setattr("gradrein.attribution._store._BLOCK_BYTES", block)
    samples.x[7], samples.y[7] = samples.x[30], samples.y[30]
    samples.x[8], samples.y[8] = samples.x[9], samples.y[9]
    store = GradientStore(tmp_path)
    store.add(range(40), samples.project())
    scores, pairs = duplicates(store, 0.9999)
    assert sorted(pairs.tolist()) == [[7, 30], [8, 9]]
    torch.testing.assert_close(scores, torch.ones(2), rtol=1e-5, atol=1e-5)
    assert len(duplicates(store, -1)[0]) == 40 * 39 // 2


def test_bad_arguments(checkpoints, tmp_path):
    stores, _, queries = checkpoints
    few, two = GradientStore(tmp_path / "few"), queries[0][:2].clone()
    two.projection = queries[0].projection
    few.add([0, 1], two)
    for call, error, text in (
        (lambda: tracin([3], queries), ArgumentTypeError, "tracin: expected a GradientStore, or one for .*; found .3"),
        (lambda: tracin(stores, queries[0]), ArgumentError, "there are 2 stores, and queries for 1 of them"),
        (lambda: tracin(stores, queries, rates=[1.0]), ArgumentError, "there are 2 stores and 1 `rates`"),
        (lambda: tracin(stores, queries[::-1]), StoreError, "the model had other weights"),
        (lambda: less(stores, queries), ArgumentTypeError, "less: `tasks` is a dict"),
        (lambda: trak(stores, queries, torch.rand(4)), ArgumentError, r"residuals\[id\] is .*; found shape \(4,\) for"),
        (lambda: duplicates(stores[0], 2), ArgumentError, "`threshold` must be between -1 and 1"),
        (
            lambda: trak(few, queries[0], torch.rand(2)),
            ArgumentError,
            "the 2 gradients of .* do not span the 32 columns",
        ),
        (lambda: outliers([stores[0], few]), ArgumentError, "do not hold the same ids, 2 and 40. Add the same samples"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_the_same_inner_products_as_without_a_projection(samples, tmp_path):
    """With as many columns as the gradient has numbers a projection is still random, and near."""
    ps = samples.per_sample()
    store = GradientStore(tmp_path)
    z = ps.project(256)
    store.add(range(40), z)
    scores, _ = tracin(store, z)
    assert torch.corrcoef(torch.stack([scores.flatten(), ps.gram().flatten()]))[0, 1] > 0.95
    assert gradrein.attribution.tracin is tracin
