"""Data of one sample that enters the loss of another is refused every time it is asked; what samples may share is not.

One place in memory holds data of one sample: rows that are looked up, windows over one series, inputs that need a
gradient and are mixed before the first layer. What is made from parameters alone is no data, however samples share it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein
from gradrein.errors import BatchCouplingError

from .oracle import flat, loop

ROWS, D, WIDTH = 8, 5, 3
SAMPLES = ROWS - WIDTH + 1


class Model(nn.Module):
    """What is not used has no gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.square, self.window = nn.Linear(D, 2), nn.Linear(D, D), nn.Linear(WIDTH, 2)
        self.table, self.places = nn.Parameter(torch.randn(7, D)), nn.Parameter(torch.randn(ROWS, D))
        self.embedding, self.bilinear = nn.Embedding(7, D), nn.Bilinear(D, D, 2)
        self.gru, self.norm = nn.GRU(D, 2), nn.LayerNorm(D)


def data(*shape):
    return torch.randn(*(shape or (ROWS, D)))


def leaf(*shape):
    return torch.randn(*(shape or (ROWS, D)), requires_grad=True)


def ids(*shape):
    return torch.randint(7, shape or (ROWS,))


def sums(out):
    return out.sin().flatten(1).sum(1)


def with_data(function, *shape):
    """Let one tensor of data be used in several places."""
    return lambda m: sums(function(m, data(*shape)))


def with_ids(function, *shape):
    return lambda m: sums(function(m, ids(*shape)))


def attend(m, q, k):
    return F.scaled_dot_product_attention(m.square(q)[:, None], k[:, None], k[:, None])


LOOK_UPS = {
    "embedding": lambda m, ids: m.embedding(ids),
    "index": lambda m, ids: m.table[ids],
    "index_select": lambda m, ids: m.table.index_select(0, ids),
    "gather": lambda m, ids: m.table[:, 0].gather(0, ids)[:, None],
}
WINDOWS = {"unfold": lambda x: x.unfold(0, WIDTH, 1), "as_strided": lambda x: x.as_strided((SAMPLES, WIDTH), (1, 1))}
USES = {
    "one layer": lambda m, w, _: m.window(w),
    "times the last": lambda m, w, _: m.window(w) * w[:, -1:],
    "times their mean": lambda m, w, _: m.window(w) * w.mean(1, keepdim=True),
    "times the series": lambda m, w, x: m.window(w) * x[WIDTH - 1 :, None],
}
OVER_HIDDEN = {
    "unfold": lambda h: h.unfold(0, WIDTH, 1).tanh().sum((1, 2)),
    "slices": lambda h: torch.stack([h[i : i + WIDTH].square().sum() for i in range(SAMPLES)]),
    "stacked slices": lambda h: torch.stack([h[i : i + WIDTH] for i in range(SAMPLES)]).tanh().sum((1, 2)),
    "differences": lambda h: (h[1:] - h[:-1]).square().sum(1),
}
# Before the first layer, of an input that needs a gradient.
MIXED = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "fourier": lambda x: torch.fft.fft(x, dim=0).real,
    "layer_norm over the batch": lambda x: F.layer_norm(x, x.shape),
    "convolution over the batch": lambda x: F.conv1d(x[None], torch.randn(len(x), len(x), 1, dtype=x.dtype))[0],
    "scaled, then centred": lambda x: (lambda y: y - y.mean(0))(2 * x),
    "scaled, then mixed up": lambda x: (lambda y: 0.7 * y + 0.3 * y.flip(0))(2 * x),
    "scaled, then divided by the norm of all": lambda x: (lambda y: y / y.norm())(2 * x),
}
REFUSED = {
    **{
        f"{one}, {other} of a neighbour": with_ids(
            lambda m, i, one=one, other=other: LOOK_UPS[one](m, i[:-1]) * LOOK_UPS[other](m, i[1:])
        )
        for one in LOOK_UPS
        for other in LOOK_UPS
    },
    **{
        f"windows by {how}, {use}": with_data(lambda m, x, how=how, use=use: USES[use](m, WINDOWS[how](x), x), ROWS)
        for how in WINDOWS
        for use in USES
    },
    **{
        f"{name} over what was made from a series": lambda m, over=over: over(m.linear(data()))
        for name, over in OVER_HIDDEN.items()
    },
    # Whether a feature dimension happens to be as large as the batch does not matter.
    **{
        f"{name} over {ROWS - 1} features": lambda m, over=over: over(F.linear(data(ROWS, ROWS - 1), m.places[:7].T))
        for name, over in OVER_HIDDEN.items()
    },
    **{
        f"{name} of an input, {folded} rows each": lambda m, mix=mix, folded=folded: sums(
            m.linear(mix(leaf(SAMPLES * folded, D))).reshape(SAMPLES, -1)
        )
        for name, mix in MIXED.items()
        for folded in (1, 3)
    },
    "an index does not hide it": lambda m: sums(m.linear(leaf().softmax(0)))[torch.randperm(ROWS)],
    "bilinear of neighbours": with_data(lambda m, x: m.bilinear(x[:-1], x[1:])),
    "bilinear, and a layer": with_data(lambda m, x: m.bilinear(x[:-1], data(ROWS - 1, D)) + m.linear(x[1:])),
    "losses repeated": lambda m: sums(m.linear(data())).repeat(2),
    "losses joined": lambda m: torch.cat([sums(m.linear(data()))] * 2),
    "a recurrent layer over a series": lambda m: sums(m.gru(data())[0][WIDTH:]),
    "attention over all": with_data(lambda m, x: attend(m, x[None], x[None])[0, 0]),
    "attention to a neighbour": with_data(lambda m, x: attend(m, x[:-1], x[1:]), ROWS, 3, D),
    "scores of all": with_data(lambda m, x: (m.square(x) @ x.T).logsumexp(1)[:, None]),
    "one norm of two neighbours": with_data(lambda m, x: m.norm(x[:-1]) * m.norm(x[1:])),
    "a weight times all": lambda m: sums(m.places @ leaf().T),
    "columns whose rows an index has moved": lambda m: sums(
        F.linear(leaf(ROWS, 3, D), m.places).view(-1, ROWS)[torch.randperm(3 * ROWS)].view(ROWS, 3, ROWS).swapaxes(0, 2)
    ),
    "a column for all": with_data(lambda m, x: m.square(x)[:D, :1] * x[:D, 0]),
    "the first row for all": with_data(lambda m, x: m.square(x) * x[0]),
    "one number for all": with_data(lambda m, x: m.square(x) * x[1, 2]),
}
ANSWERED = {
    **{
        f"{one}, {other}": with_ids(lambda m, i, one=one, other=other: LOOK_UPS[one](m, i) * LOOK_UPS[other](m, i))
        for one in LOOK_UPS
        for other in LOOK_UPS
    },
    **{
        f"windows by {how} that are copied, {use}": with_data(
            lambda m, x, how=how, use=use: USES[use](m, WINDOWS[how](x).clone(), x.clone()), ROWS
        )
        for how in WINDOWS
        for use in USES
    },
    "ids that only say where rows go": lambda m: (lambda h, order: sums(h[order][order] * h[order][order]))(
        m.linear(data()), torch.randperm(ROWS)
    ),
    "bilinear of one": with_data(lambda m, x: m.bilinear(x, x) + m.linear(x)),
    "patches of one sample": with_data(lambda m, x: m.window(x.unfold(1, WIDTH, 1)), SAMPLES, ROWS),
    "patches, twice": with_data(
        lambda m, x: m.window(x.unfold(1, WIDTH, 1))[..., :1] * x.unfold(1, WIDTH, 1), SAMPLES, ROWS
    ),
    "windows over learned positions": with_data(
        lambda m, x: x * torch.stack([m.places[i : i + WIDTH] for i in range(SAMPLES)]).tanh(), SAMPLES, WIDTH, D
    ),
    "scores of a constant": with_data(lambda m, x: (m.square(x) @ data(D, 6)).logsumexp(1)[:, None]),
    "attention within samples": with_data(lambda m, x: attend(m, x, x), ROWS, 3, D),
    "a causal mask twice": with_data(
        lambda m, x: m.square(x) * torch.ones(ROWS, D).tril()[:1] + m.square(x).tanh() * torch.ones(ROWS, D).tril()[:1]
    ),
    "a mask of each sample": with_data(lambda m, x: m.square(x) * (torch.rand(ROWS, D) < 0.5)),
    "gates of the row itself": with_data(lambda m, x: m.square(x) * x * x[:, :1]),
    "an input": lambda m: sums(m.linear(2 * leaf())),
    "an input with samples second": lambda m: sums(m.linear(2 * leaf(3, ROWS, D)).transpose(0, 1)),
    "other rows of an input": lambda m: sums(m.linear((2 * leaf())[torch.randperm(ROWS)])),
    "a learned mask": lambda m: sums(m.linear(data(ROWS, ROWS, D) * (2 * leaf()).tanh())),
    "a prompt": lambda m: sums(m.linear(torch.cat([(2 * leaf()).expand(ROWS, ROWS, D), data(ROWS, ROWS, D)], 1))),
    "a repeated prompt": lambda m: sums(m.linear(torch.cat([leaf().repeat(ROWS, 1, 1), data(ROWS, ROWS, D)], 1))),
    "a memory": lambda m: sums(F.linear(m.linear(data(ROWS, ROWS, D)), 2 * leaf(ROWS, 2))),
    "a weight before it": lambda m: sums(m.linear(F.linear(data(ROWS, ROWS, D), 2 * leaf(D, D)))),
    "a weight of as many rows": lambda m: sums(m.linear(F.linear(data(ROWS, ROWS, D).mT, leaf(ROWS, ROWS)).mT)),
}


def assert_same(losses, model, **options):
    model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    expected = flat(loop(losses, dict(model.named_parameters())))
    torch.testing.assert_close(flat(gradrein.per_sample(losses, model, **options).grads()), expected)


def assert_refused(losses, model, text="."):
    with pytest.raises(BatchCouplingError, match=text):
        gradrein.per_sample(losses, model)
    assert_same(losses, model, allow_coupling=True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model = Model()
    text = "is used for one sample by" if name.endswith("for all") else "."
    for _ in range(2):
        assert_refused(REFUSED[name](model), model, text)


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name):
    model = Model()
    for _ in range(2):
        assert_same(ANSWERED[name](model), model)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_of_a_neighbour_in_a_bag(mode):
    bags, table, of = nn.EmbeddingBag(7, D, mode=mode), nn.Embedding(7, D), ids(ROWS, 2)
    both = nn.ModuleList([bags, table])
    assert_refused((bags(of[:-1]) * bags(of[1:])).sum(1), bags)
    assert_refused((bags(of[:-1]) * table(of[1:]).sum(1)).sum(1), both)
    assert_same((bags(of) * table(of).sum(1)).sum(1), both)
    assert_same(bags(of.flatten(), torch.tensor([0, 3, 4])).square().sum(1), bags)


OVER_THE_BATCH = [(nn.Conv1d, {}), (nn.Conv1d, {"groups": 5}), (nn.Conv1d, {"dilation": 2}), (nn.ConvTranspose1d, {})]


@pytest.mark.parametrize(("kind", "options"), OVER_THE_BATCH)
def test_convolutions_to_which_the_batch_is_their_length(kind, options):
    """A kernel of one mixes no samples, and is refused too: nobody uses one so, and a linear layer does the same."""
    for kernel in (1, 1, 3, 3):
        layer = kind(D, D, kernel, padding=kernel // 2 * options.get("dilation", 1), **options)
        assert_refused(layer(data().t()).t().tanh().sum(1), layer)


BELOW = [
    lambda body, head, x: head(body(x)),
    lambda body, head, x: head(body[0](x) - body[0](x).mean(0)),
    lambda body, head, x: head(body[0](x)) + body[0](x)[:, :2].roll(1, 0),
]


@pytest.mark.parametrize("losses", BELOW)
def test_coupling_below_the_parameters_that_are_asked_about(losses):
    body, head = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 2)
    for _ in range(2):
        assert_refused(sums(losses(body, head, data())), head)
