"""A captured step has the bits of the eager one: results, gradients, buffers, generators."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein

from .helpers import B, C, D, Twins, batch, losses_of, mlp

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")

T, WORDS = 6, 9


class Block(nn.Module):
    """Causal attention with grouped queries and a gated feed-forward part, each behind an RMS norm."""

    def __init__(self, width=8, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * groups * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Gpt(nn.Module):
    """A language model with positions that all samples share, and a head tied to the table of words."""

    def __init__(self, block=Block):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(T, 8)
        self.block, self.norm = block(), nn.LayerNorm(8)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return F.linear(self.norm(self.block(x)), self.words.weight)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(D, 6, batch_first=True), nn.Linear(6, C)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, 8)
        self.inner, self.head = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), nn.Linear(8, C)

    def forward(self, x):
        return self.head(self.inner(self.up(x)).mean(1))


class Called(nn.Module):
    """Uses one layer three times, functionally and with a scale."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.head = nn.Linear(D, D), nn.Parameter(torch.ones(D)), nn.Linear(D, C)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.inner(x)) * (1 + self.scale)
        return self.head(F.linear(x, self.inner.weight))


def tokens():
    return torch.randint(WORDS, (B, T)), torch.randint(WORDS, (B, T))


def images():
    return batch(B, 3, 8, 8)


def sequences():
    return batch(B, T, D)


CNN = [nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)]
CNN += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, C)]
MODELS = {
    "mlp": (mlp, batch),
    "relu": (lambda: mlp(activation=nn.ReLU), batch),
    "cnn": (lambda: nn.Sequential(*CNN), images),
    "gpt": (Gpt, tokens),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences),
    "gru": (lambda: Recurrent(nn.GRU), sequences),
    "shared": (Called, batch),
    "batch norm": (lambda: nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Linear(6, C)).eval(), batch),
    "double": (lambda: mlp().double(), lambda: (batch()[0].double(), batch()[1])),
    "bfloat16": (lambda: mlp().bfloat16(), lambda: (batch()[0].bfloat16(), batch()[1])),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, C))), batch),
    "transformer": (lambda: Pooled(), sequences),
    "dropout": (lambda: nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.3), nn.Linear(6, C)), batch),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    make, data = MODELS[name]
    twins = Twins(make())
    twins.eager(*data())
    for _ in range(2):
        twins.captured(*data())


def everything_at_once(model):
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}

    def step(x, y):
        losses = losses_of(model, x, y)
        ps = gradrein.per_sample(losses, model)
        numbers = {"norms": ps.norms(), "each": ps.norms(per_parameter=True), "grads": ps.grads()}
        more = [ps.dot(), ps.dot(direction), ps.cosine(), ps.cosine(direction), ps.gram(), len(ps)]
        ps.clip_(0.1, per_parameter=True, gamma=0.01, divide_by=3.0)
        ps.weighted_(torch.arange(x.shape[0]))
        ps.weighted_(lambda norms: 1 / (1 + norms))
        return numbers, more, (losses, losses.detach().mean())

    return step


def some_parameters(model):
    def step(x, y):
        losses = losses_of(model, x, y)
        head = gradrein.per_sample(losses, {"w": model[2].weight, "b": model[2].bias})
        return head.norms(), gradrein.per_sample(losses, model[0].weight).norms(), head.grads()

    return step


def autocast_inside(model):
    def step(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = losses_of(model, x, y)
        return gradrein.per_sample(losses, model).clip_(0.5)

    return step


@pytest.mark.parametrize("make", [everything_at_once, some_parameters, autocast_inside])
def test_steps(make):
    twins = Twins(mlp(), make)
    twins.run(*batch())
    for _ in range(2):
        twins.captured(*batch())


def test_a_parameter_that_no_loss_depends_on():
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    twins = Twins(model)
    twins.run(*batch())
    twins.captured(*batch())
    assert twins.model.unused.grad is None


def test_results_that_have_a_graph_in_the_eager_step():
    def make(model):
        def step(x, y):
            losses = losses_of(model, x, y)
            gradrein.per_sample(losses, model).clip_(0.5)
            return losses.mean()

        return step

    twins = Twins(mlp(), make)
    twins.run(*batch())
    loss = twins.captured(*batch())
    assert loss.requires_grad
    with pytest.raises(gradrein.errors.GraphFreedError, match="a compiled step returned"):
        loss.backward()


def test_gradients_of_two_parameters_are_two_tensors():
    """The biases of a recurrent layer have the same gradient; clipping one in place must leave the other."""
    twins = Twins(Recurrent(nn.LSTM))
    for _ in range(2):
        for model in (twins.model, twins.other):
            model.zero_grad()
        twins.run(*sequences())
    grads = [p.grad for p in twins.model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)


@pytest.mark.parametrize("gamma", [None, 0.1])
def test_a_threshold_that_is_a_tensor(gamma):
    def make(model):
        def step(x, y, quantile):
            ps = gradrein.per_sample(losses_of(model, x, y), model)
            return ps.clip_(torch.quantile(ps.norms(), quantile), gamma=gamma)

        return step

    twins = Twins(mlp(), make)
    twins.run(*batch(), torch.tensor(0.5))
    for quantile in (0.2, 0.7):
        twins.captured(*batch(), torch.tensor(quantile))


def test_a_threshold_that_is_negative_is_refused_by_its_value():
    model = mlp()
    step = gradrein.compile(
        lambda x, y, limit: gradrein.per_sample(losses_of(model, x, y), model).clip_(limit), model, backend="captured"
    )
    for _ in range(2):
        step(*batch(), torch.tensor(1.0))
    with pytest.raises(gradrein.errors.ArgumentError, match="must be positive, found -1.0"):
        step(*batch(), torch.tensor(-1.0))


def test_nested_inputs_and_keywords():
    def make(model):
        def step(batch, *, scale=1.0):
            losses = losses_of(model, batch["x"][0], batch["y"]) * scale
            return {"norms": gradrein.per_sample(losses, model).clip_(0.5), "scale": scale}

        return step

    twins = Twins(mlp(), make)
    x, y = batch()
    twins.run({"x": [x], "y": y}, scale=2.0)
    twins.captured({"x": [x], "y": y}, scale=2.0)
    twins.run({"x": [x], "y": y})
