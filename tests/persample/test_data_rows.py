"""One place in memory holds data of one sample: rows that are looked up, and windows over one series."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import BatchCouplingError

from .oracle import flat, loop

STEPS, D, WIDTH = 8, 5, 3
SAMPLES = STEPS - WIDTH + 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, D))
        self.embedding = nn.Embedding(7, D)
        self.bilinear = nn.Bilinear(D, D, 2)
        self.linear = nn.Linear(D, 2)
        self.window = nn.Linear(WIDTH, 2)


def answered(losses, model):
    for _ in range(2):
        expected = flat(loop(losses, dict(model.named_parameters())))
        torch.testing.assert_close(flat(gradrein.per_sample(losses, model).grads()), expected)


def refused(losses, model):
    for _ in range(2):
        with pytest.raises(BatchCouplingError):
            gradrein.per_sample(losses, model)
    expected = flat(loop(losses, dict(model.named_parameters())))
    torch.testing.assert_close(flat(gradrein.per_sample(losses, model, allow_coupling=True).grads()), expected)


LOOK_UPS = {
    "embedding": lambda m, ids: m.embedding(ids),
    "index": lambda m, ids: m.table[ids],
    "index_select": lambda m, ids: m.table.index_select(0, ids),
    "gather": lambda m, ids: m.table[:, 0].gather(0, ids)[:, None],
}


@pytest.mark.parametrize("first", LOOK_UPS)
@pytest.mark.parametrize("second", LOOK_UPS)
def test_ids_of_one_sample_looked_up_for_another(first, second):
    model, ids = Model(), torch.randint(7, (STEPS,))
    one, other = LOOK_UPS[first], LOOK_UPS[second]
    refused((one(model, ids[:-1]) * other(model, ids[1:])).sum(1), model)
    answered((one(model, ids) * other(model, ids)).sum(1), model)


def test_ids_that_only_say_where_rows_go_are_no_data():
    model, order = Model(), torch.randperm(STEPS)
    hidden = model.linear(torch.randn(STEPS, D))
    answered((hidden[order][order] * hidden[order][order]).sum(1), model)


def test_both_inputs_of_a_bilinear_layer():
    model, x = Model(), torch.randn(STEPS, D)
    refused(model.bilinear(x[:-1], x[1:]).square().sum(1), model)
    refused((model.bilinear(x[:-1], torch.randn(STEPS - 1, D)) + model.linear(x[1:])).square().sum(1), model)
    answered((model.bilinear(x, x) + model.linear(x)).square().sum(1), model)


WINDOWS = {
    "unfold": lambda x: x.unfold(0, WIDTH, 1),
    "as_strided": lambda x: x.as_strided((SAMPLES, WIDTH), (1, 1)),
}
USES = {
    "one layer": lambda m, w, _: m.window(w),
    "times the last": lambda m, w, _: m.window(w) * w[:, -1:],
    "times their mean": lambda m, w, _: m.window(w) * w.mean(1, keepdim=True),
    "times the series": lambda m, w, x: m.window(w) * x[WIDTH - 1 :, None],
}


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("use", USES)
def test_windows_over_a_series_of_data(windows, use):
    model, x = Model(), torch.randn(STEPS)
    view = WINDOWS[windows](x)
    refused(USES[use](model, view, x).square().sum(1), model)
    copied = view.clone()
    answered(USES[use](model, copied, x.clone()).square().sum(1), model)


OVER_HIDDEN = {
    "unfold": lambda h: h.unfold(0, WIDTH, 1).tanh().sum((1, 2)),
    "slices": lambda h: torch.stack([h[i : i + WIDTH].square().sum() for i in range(SAMPLES)]),
    "stacked slices": lambda h: torch.stack([h[i : i + WIDTH] for i in range(SAMPLES)]).tanh().sum((1, 2)),
    "differences": lambda h: (h[1:] - h[:-1]).square().sum(1),
}


@pytest.mark.parametrize("over", OVER_HIDDEN)
@pytest.mark.parametrize("width", [D, SAMPLES, STEPS - 1])
def test_windows_over_what_was_made_from_a_series(over, width):
    """Whether a feature dimension happens to be as large as the batch does not matter."""
    layer = nn.Linear(width, 2)
    refused(OVER_HIDDEN[over](layer(torch.randn(STEPS, width))), layer)


@pytest.mark.parametrize("copies", [lambda losses: losses.repeat(2), lambda losses: torch.cat([losses, losses])])
def test_losses_that_are_there_twice(copies):
    layer = nn.Linear(D, 2)
    refused(copies(layer(torch.randn(SAMPLES, D)).square().sum(1)), layer)


def test_a_recurrent_layer_over_a_series():
    layer = nn.GRU(D, 2)
    refused(layer(torch.randn(STEPS, D))[0][WIDTH:].square().sum(1), layer)


def test_windows_inside_a_sample():
    """Patches of an image overlap in memory, and belong to one sample."""
    layer, x = nn.Linear(WIDTH, 2), torch.randn(SAMPLES, STEPS)
    answered(layer(x.unfold(1, WIDTH, 1)).square().sum((1, 2)), layer)
    patches = x.unfold(1, WIDTH, 1)
    answered((layer(patches)[..., :1] * patches).square().sum((1, 2)), layer)


def test_windows_over_learned_positions():
    """What is made from parameters alone is no data, however samples share it."""
    positions, x = nn.Parameter(torch.randn(STEPS, D)), torch.randn(SAMPLES, WIDTH, D)
    windows = torch.stack([positions[i : i + WIDTH] for i in range(SAMPLES)])
    losses = (x * windows.tanh()).sum((1, 2))
    expected = loop(losses, {"positions": positions})
    torch.testing.assert_close(gradrein.per_sample(losses, {"positions": positions}).grads(), expected)


def test_data_of_all_samples_used_as_a_whole():
    model, x = Model(), torch.randn(STEPS, D)
    square = nn.Linear(D, D)
    attend = nn.functional.scaled_dot_product_attention
    refused(attend(square(x)[None, None], x[None, None], x[None, None])[0, 0].square().sum(1), square)
    refused((square(x) @ x.T).logsumexp(1), square)
    answered((square(x) @ torch.randn(D, 6)).logsumexp(1), square)
    series = torch.randn(STEPS, 3, D)
    answered(attend(square(series)[:, None], series[:, None], series[:, None]).square().sum((1, 2, 3)), square)
    neighbours = [one[:, None] for one in (series[1:], series[1:])]
    refused(attend(square(series[:-1])[:, None], *neighbours).square().sum((1, 2, 3)), square)
    answered(model.linear(x).square().sum(1), model)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_of_a_neighbour_in_a_bag(mode):
    bags, table, ids = nn.EmbeddingBag(7, D, mode=mode), nn.Embedding(7, D), torch.randint(7, (STEPS, 2))
    both = nn.ModuleList([bags, table])
    refused((bags(ids[:-1]) * bags(ids[1:])).sum(1), bags)
    refused((bags(ids[:-1]) * table(ids[1:]).sum(1)).sum(1), both)
    answered((bags(ids) * table(ids).sum(1)).sum(1), both)
    lengths = torch.tensor([0, 3, 4])
    answered(bags(ids.flatten(), lengths).square().sum(1), bags)


def test_one_norm_of_two_neighbours():
    layer, x = nn.LayerNorm(D), torch.randn(STEPS, D)
    refused((layer(x[:-1]) * layer(x[1:])).sum(1), layer)
