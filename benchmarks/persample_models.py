"""The five models that per-sample methods are measured on, each with its data and one loss per sample."""

from __future__ import annotations

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
    return Problem(nn.Sequential(*layers[:-1]), torch.randn(batch, 784), torch.randint(10, (batch,)))


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


MODELS = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "gpt": gpt, "lstm": lstm}
