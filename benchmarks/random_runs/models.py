"""Models of a task: small, one of each kind that people train."""

from __future__ import annotations

from typing import Any

import torch
from data import PEOPLE, Data
from torch import Tensor, nn


class Sine(nn.Module):
    """A sine, as networks of coordinates have it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x)


_ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "leaky": nn.LeakyReLU,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "hardtanh": nn.Hardtanh,
    "mish": nn.Mish,
    "sine": Sine,
    "selu": nn.SELU,
    "hardswish": nn.Hardswish,
    "softsign": nn.Softsign,
}


def make_model(kind: str, data: Data, task: dict[str, Any]) -> nn.Module:
    """Return a model of a kind for some data, with weights from torch's generator."""
    if kind in _WHOLE:
        return _WHOLE[kind](data, task)
    vocabulary = data.outputs if data.x.dtype == torch.long else 0
    if kind in _BODIES:
        return Sequence(kind, data, task, vocabulary)
    if kind == "cnn":
        return _cnn(data, task)
    return nn.Sequential(nn.Flatten(), *_dense(kind, data.x[0].numel(), data.outputs, task))


def _dense(kind: str, inputs: int, outputs: int, task: dict[str, Any]) -> list[nn.Module]:
    if kind == "linear":
        return [nn.Linear(inputs, outputs)]
    width, layers, size = task["width"], [], inputs
    for _ in range(3 * task["depth"] if kind == "deep" else task["depth"]):
        layers += [nn.Linear(size, width), *_norm(width, task), _ACTIVATIONS[task["activation"]]()]
        size = width
        if kind in _BLOCKS:
            layers.append(_BLOCKS[kind](width, task))
            size = 2 * width if kind == "joined" else width
        if task["dropout"]:
            layers.append(nn.Dropout(task["dropout"]))
    return [*layers, nn.Linear(size, outputs)]


def _norm(width: int, task: dict[str, Any]) -> list[nn.Module]:
    if task["norm"] == "none":
        return []
    if task["norm"] == "batch":
        return [nn.BatchNorm1d(width, track_running_stats=False)]
    return [nn.LayerNorm(width) if task["norm"] == "layer" else nn.RMSNorm(width)]


class Residual(nn.Module):
    """Adds what a small network makes of its input to it."""

    def __init__(self, width: int, task: dict[str, Any]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), _ACTIVATIONS[task["activation"]](), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gated(nn.Module):
    """Multiplies one half of what it makes of its input by gates of the other."""

    def __init__(self, width: int, _task: dict[str, Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(x).chunk(2, -1)
        return value * torch.sigmoid(gate)


class Products(nn.Module):
    """Multiplies two linear maps of its input."""

    def __init__(self, width: int, _task: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(x)


class Joined(nn.Module):
    """Keeps its input beside what it makes of it."""

    def __init__(self, width: int, task: dict[str, Any]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), _ACTIVATIONS[task["activation"]]())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.inner(x)), -1)


class Highway(nn.Module):
    """Passes on its input where a gate is closed."""

    def __init__(self, width: int, task: dict[str, Any]) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(width, width), nn.Linear(width, width)
        self.act = _ACTIVATIONS[task["activation"]]()

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x) - 1)
        return gate * self.act(self.inner(x)) + (1 - gate) * x


class Maxout(nn.Module):
    """The larger of two linear maps."""

    def __init__(self, width: int, _task: dict[str, Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(*self.inner(x).chunk(2, -1))


class Experts(nn.Module):
    """Three linear maps, weighed by a fourth."""

    def __init__(self, width: int, _task: dict[str, Any]) -> None:
        super().__init__()
        self.experts, self.choose = nn.Linear(width, 3 * width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.choose(x), -1)
        return (self.experts(x).unflatten(-1, (3, -1)) * weights.unsqueeze(-1)).sum(-2)


class Shared(nn.Module):
    """One layer, four times."""

    def __init__(self, width: int, task: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(width, width), _ACTIVATIONS[task["activation"]]()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.act(self.inner(x))
        return x


_BLOCKS = {
    "residual": Residual,
    "gated": Gated,
    "products": Products,
    "joined": Joined,
    "highway": Highway,
    "maxout": Maxout,
    "experts": Experts,
    "shared": Shared,
}


class Pairs(nn.Module):
    """Applies one network to both of a pair."""

    def __init__(self, data: Data, task: dict[str, Any]) -> None:
        super().__init__()
        self.each = nn.Sequential(*_dense("mlp", data.x.shape[2], data.outputs, task))

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Sets(nn.Module):
    """Adds up what it makes of each point."""

    def __init__(self, data: Data, task: dict[str, Any]) -> None:
        super().__init__()
        self.each = nn.Sequential(*_dense("mlp", data.x.shape[2], task["width"], task))
        self.leave = nn.Sequential(nn.ReLU(), nn.Linear(task["width"], data.outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.each(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1))


class Factors(nn.Module):
    """The product of a vector of a person and one of a thing."""

    def __init__(self, _data: Data, task: dict[str, Any]) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(PEOPLE, task["width"]), nn.Embedding(PEOPLE, task["width"])

    def forward(self, x: Tensor) -> Tensor:
        return (self.people(x[:, 0]) * self.things(x[:, 1])).sum(1, keepdim=True)


class Codes(nn.Module):
    """Draws a code of its input and gives back the input from it; then the means and the log variances of the code."""

    def __init__(self, data: Data, task: dict[str, Any]) -> None:
        super().__init__()
        self.enter = nn.Sequential(*_dense("mlp", data.outputs, 6, task))
        self.leave = nn.Sequential(*_dense("mlp", 3, data.outputs, task))

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.enter(x).chunk(2, -1)
        return torch.cat((self.leave(mean + torch.exp(log / 2) * torch.randn_like(mean)), mean, log), -1)


class Graph(nn.Module):
    """Takes the mean over neighbours twice, and then over all nodes."""

    def __init__(self, data: Data, task: dict[str, Any]) -> None:
        super().__init__()
        self.nodes, width = data.x.shape[1], task["width"]
        self.first, self.second = nn.Linear(data.x.shape[2] - self.nodes, width), nn.Linear(width, width)
        self.leave, self.act = nn.Linear(width, data.outputs), _ACTIVATIONS[task["activation"]]()

    def forward(self, x: Tensor) -> Tensor:
        edges, h = x[..., : self.nodes], x[..., self.nodes :]
        for layer in (self.first, self.second):
            h = self.act(edges @ layer(h))
        return self.leave(h.mean(-2))


_WHOLE = {"pairs": Pairs, "sets": Sets, "factors": Factors, "codes": Codes, "graph": Graph}


def _cnn(data: Data, task: dict[str, Any]) -> nn.Module:
    channels = max(4, task["width"] // 4)
    act = _ACTIVATIONS[task["activation"]]
    norm = [nn.BatchNorm2d(channels, track_running_stats=False)] if task["norm"] == "batch" else []
    first, second = Patches(1, channels), Patches(channels, channels)  # of 8 x 8 there remain 3 x 3, and then one
    return nn.Sequential(first, *norm, act(), second, act(), nn.Flatten(), nn.Linear(channels, data.outputs))


class Patches(nn.Module):
    """A convolution over every second 3 x 3 patch, as one product: torch's own is slow for many models at once."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.product = nn.Linear(9 * channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 3, 2).unfold(3, 3, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
        return self.product(patches).permute(0, 3, 1, 2)


class Sequence(nn.Module):
    """Reads a sequence of vectors or letters; returns one output, or one for each letter."""

    def __init__(self, kind: str, data: Data, task: dict[str, Any], vocabulary: int) -> None:
        super().__init__()
        width = 4 * max(2, task["width"] // 8)
        self.each = vocabulary > 0
        self.enter = nn.Embedding(vocabulary, width) if vocabulary else nn.Linear(data.x.shape[2], width)
        self.body = _BODIES[kind](width, data.x.shape[1])
        self.leave = nn.Linear(width, data.outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.enter(x))
        return self.leave(h if self.each else h[:, -1])


class Recurrent(nn.Module):
    """A recurrent layer, written out: torch's own have no form for several models at once."""

    gates = 1

    def __init__(self, width: int, _length: int) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(width, self.gates * width), nn.Linear(width, self.gates * width)

    def forward(self, x: Tensor) -> Tensor:
        inputs, states = self.enter(x), []
        state = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]))
        for t in range(x.shape[1]):
            state = self.advance(inputs[:, t], self.again(state[0]), *state)
            states.append(state[0])
        return torch.stack(states, 1)

    def advance(self, inputs: Tensor, again: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return torch.tanh(inputs + again), cell


class LSTM(Recurrent):
    """A recurrent layer with a memory cell."""

    gates = 4

    def advance(self, inputs: Tensor, again: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        let_in, keep, let_out, new = (inputs + again).chunk(4, -1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(let_in) * torch.tanh(new)
        return torch.sigmoid(let_out) * torch.tanh(cell), cell


class GRU(Recurrent):
    """A recurrent layer with gates."""

    gates = 3

    def advance(self, inputs: Tensor, again: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        (reset, update, new), (again_reset, again_update, again_new) = inputs.chunk(3, -1), again.chunk(3, -1)
        keep = torch.sigmoid(update + again_update)
        new = torch.tanh(new + torch.sigmoid(reset + again_reset) * again_new)
        return keep * hidden + (1 - keep) * new, cell


class Transformer(nn.Module):
    """One block with two heads; a position sees those before it."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place
        query, key, value = (h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.mix(self.first(x)).chunk(3, -1))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1]).triu(1) * 1e9
        mixed = torch.softmax(scores - later, -1) @ value
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(torch.relu(self.widen(self.second(x))))


class Attention(nn.Module):
    """Two rounds in which each position takes from those before it, without normalisation."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.rounds = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place
        later = torch.ones(x.shape[1], x.shape[1]).triu(1) * 1e9
        for mix in self.rounds:
            query, key, value = mix(x).chunk(3, -1)
            x = x + torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 - later, -1) @ value
        return x


class Convolution(nn.Module):
    """Two convolutions along the sequence; its end is their mean."""

    def __init__(self, width: int, _length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(1, 2)).mean(2, keepdim=True).transpose(1, 2)


class Mixer(nn.Module):
    """Mixes the places of a sequence, and then what is at each of them."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.places = nn.LayerNorm(width), nn.Linear(length, length)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm(x).transpose(-1, -2)).transpose(-1, -2)
        return x + self.narrow(torch.relu(self.widen(x)))


_BODIES = {
    "rnn": Recurrent,
    "lstm": LSTM,
    "gru": GRU,
    "transformer": Transformer,
    "convolution": Convolution,
    "attention": Attention,
    "mixer": Mixer,
}
