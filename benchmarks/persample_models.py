"""The seven models that per-sample methods are measured on, each with its data and one loss per sample."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Problem:
    """A model, a batch, and the loss of each sample."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        if out.dim() == 3:  # tokens
            return F.cross_entropy(out.transpose(1, 2), y, reduction="none").mean(1)
        return F.cross_entropy(out, y, reduction="none")


def mlp(batch: int = 256) -> Problem:
    sizes = (784, 1024, 1024, 10)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return Problem(model, away_from_kinks(model, torch.randn(batch, 784)), torch.randint(10, (batch,)))


def away_from_kinks(model: nn.Sequential, x: Tensor, nearest: float = 1e-5) -> Tensor:
    """Draw those samples again that bring an input of a ReLU so near to zero that rounding decides its derivative.

    Of half a million inputs one is about 1e-8. Libraries that add up in different orders would then differ by a
    thousandth, and none of them would be wrong.
    """
    x, exact = x.clone(), copy.deepcopy(model).double()
    again = torch.ones(len(x), dtype=torch.bool)
    while again.any():
        value, again = x.double(), torch.zeros(len(x), dtype=torch.bool)
        for layer in exact:
            if isinstance(layer, nn.ReLU):
                again |= (value.abs() < nearest).any(1)
            value = layer(value)
        x[again] = torch.randn(int(again.sum()), *x.shape[1:])
    return x


def cnn(batch: int = 64) -> Problem:
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )
    return Problem(model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


class Residual(nn.Module):
    """Two convolutions and a short cut, with group norm."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.GroupNorm(8, c_out), nn.ReLU()),
            *(nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.GroupNorm(8, c_out)),
        )
        same = stride == 1 and c_in == c_out
        self.short = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        self.end = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inner(x) + self.short(x))


def resnet(batch: int = 32) -> Problem:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    before = 64
    for i, width in enumerate((64, 128, 256, 512)):
        layers += [Residual(before, width, 1 if i == 0 else 2), Residual(width, width, 1)]
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return Problem(nn.Sequential(*layers), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


class Attention(nn.Module):
    """Causal self-attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small language model with learned positions."""

    def __init__(self, width: int = 256, depth: int = 4, words: int = 512, steps: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(steps, width)
        self.blocks = nn.Sequential(*(Attention(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        # Positions are looked up once per sample, which every peer can follow.
        places = torch.arange(ids.shape[-1]).expand(ids.shape)
        return self.head(self.norm(self.blocks(self.words(ids) + self.places(places))))


def gpt(batch: int = 16) -> Problem:
    return Problem(Gpt(), torch.randint(512, (batch, 128)), torch.randint(512, (batch, 128)))


class Recurrent(nn.Module):
    """An LSTM and a classifier on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 256, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm(batch: int = 32) -> Problem:
    return Problem(Recurrent(), torch.randn(batch, 64, 128), torch.randint(10, (batch,)))


class LlamaBlock(nn.Module):
    """Causal attention with grouped queries and rotated positions, and a gated part, each behind an RMS norm."""

    def __init__(self, width: int, heads: int, groups: int, steps: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(3 * width, width, bias=False), nn.SiLU()
        angles = torch.arange(steps)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[-2]] + torch.cat([-second, first], -1) * self.sin[: x.shape[-2]]

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q = self.rotated(self.q(h).view(b, t, self.heads, -1).transpose(1, 2))
        k = self.rotated(self.k(h).view(b, t, self.groups, -1).transpose(1, 2))
        v = self.v(h).view(b, t, self.groups, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class Experts(nn.Module):
    """Each token goes to the one expert that its router prefers."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        share, chosen = self.router(flat).softmax(1).max(1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(flat[rows]) * share[rows, None])
        return x + out.view_as(x)


class Language(nn.Module):
    """Words, some blocks, and a head."""

    def __init__(self, width: int, blocks: list[nn.Module], words: int = 512) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, width), nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(ids))))


def tokens(model: nn.Module, batch: int, steps: int = 128) -> Problem:
    return Problem(model, torch.randint(512, (batch, steps)), torch.randint(512, (batch, steps)))


def llama(batch: int = 16) -> Problem:
    return tokens(Language(256, [LlamaBlock(256, 8, 2, 128) for _ in range(4)]), batch)


def experts(batch: int = 16) -> Problem:
    blocks = [part for _ in range(2) for part in (Attention(256, 4), Experts(256, 8))]
    return tokens(Language(256, blocks), batch)


def deep(depth: int) -> Problem:
    """A language model of some depth at fixed width."""
    return tokens(Gpt(128, depth), 8)


MODELS = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "gpt": gpt, "lstm": lstm, "llama": llama, "experts": experts}
