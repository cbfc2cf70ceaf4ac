"""Calls whose launches and host reads are counted: in the tests against limits, in `benchmarks/launches.py` in a table."""

import torch
import torch.nn.functional as F
from simulated import DEVICE
from torch import nn

import gradrein
from gradrein import policies

BATCH = 8


# --- Tiny models ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's block with causal attention."""

    def __init__(self, width, norm):
        super().__init__()
        self.before, self.after = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    """One block over nine tokens: of as many as there are samples, positions might be data, and are looked at."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Embedding(9, 16)
        self.block = Block(16, norm)
        self.norm, self.head = norm(16), nn.Linear(16, 11, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.block(x))).transpose(1, 2)


class Recurrent(nn.Module):
    """An LSTM over eight steps."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def cnn():
    first = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()]
    second = [nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))


def _classes(*shape):
    return torch.randn(BATCH, *shape), torch.randint(4, (BATCH,))


def _text():
    return torch.randint(11, (BATCH, 9)), torch.randint(11, (BATCH, 9))


MODELS = {
    "MLP": (mlp, lambda: _classes(8)),
    "CNN": (cnn, lambda: _classes(3, 7, 7)),
    "GPT": (GPT, _text),
    "GPT with RMS norm": (lambda: GPT(nn.RMSNorm), _text),
    "LSTM": (Recurrent, lambda: _classes(8, 6)),
}


def made(name):
    """Return a model of the device and a batch."""
    build, batch = MODELS[name]
    with DEVICE:
        return build(), *batch()


def losses_of(model, x, y):
    """Return one loss per sample."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses if losses.dim() == 1 else losses.mean(1)


def plain_step(model, x, y):
    """Forward and backward, as everybody does it."""
    losses_of(model, x, y).mean().backward()


def clipped_step(model, x, y):
    """Forward, and a backward that clips each sample."""
    gradrein.per_sample(losses_of(model, x, y), model).clip_(1.0)


# --- Clipping -------------------------------------------------------------------------------------------------------


def with_gradients(count=6, dtype=torch.float32):
    """Return parameters of the device with gradients: those of the MLP, or so many of 32 x 32."""
    shapes = [p.shape for p in mlp().parameters()] if count == 6 else [(32, 32)] * count
    with DEVICE:
        parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
    return parameters


def _clip(policy, **options):
    return lambda parameters: gradrein.clip_(parameters, policy, **options)


# name: how torch's own function is called, and ours.
DROP_INS = {
    "clip_grad_norm_": lambda module, ps: module.clip_grad_norm_(ps, 0.1),
    "clip_grad_norm_, order 1": lambda module, ps: module.clip_grad_norm_(ps, 0.1, 1),
    "clip_grad_norm_, order 3": lambda module, ps: module.clip_grad_norm_(ps, 0.1, 3),
    "clip_grad_norm_, order inf": lambda module, ps: module.clip_grad_norm_(ps, 0.1, "inf"),
    "clip_grad_value_": lambda module, ps: module.clip_grad_value_(ps, 0.1),
}
# name: (how it is called, at most so many launches for six tensors, so many host reads).
CLIPPING = {
    "by_norm, propagate": (_clip(gradrein.by_norm(0.1), nonfinite="propagate"), 14, 0),
    "by_norm, raise": (_clip(gradrein.by_norm(0.1), nonfinite="raise"), 14, 1),
    "by_norm, skip": (_clip(gradrein.by_norm(0.1), nonfinite="skip"), 20, 0),
    "by_norm, zero": (_clip(gradrein.by_norm(0.1), nonfinite="zero"), 25, 0),
    "by_norm per parameter": (_clip(gradrein.by_norm(0.1, per_parameter=True), nonfinite="propagate"), 14, 0),
    "by_rms": (_clip(policies.by_rms(0.1), nonfinite="propagate"), 14, 0),
    "by_value": (_clip(policies.by_value(0.1), nonfinite="propagate"), 6, 0),
    "by_unit": (_clip(policies.by_unit(0.1), nonfinite="propagate"), 40, 0),
}
# policy: at most so many launches, in a later step.
LEARNING = {
    policies.ByMedian: 30,
    policies.ByQuantile: 30,
    policies.ByRunningNorm: 30,
    policies.ByZScore: 30,
    policies.SkipSpikes: 35,
    policies.ByOvershoot: 58,
}
