"""The steps of random graphs: what they may do to a tensor of shape (batch, steps, channels)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

C = 4
MOODS = ("harmless", "between", "zeros", "random")


class Weights(nn.Module):
    """The parameters a graph may use, many of them several times."""

    def __init__(self, batch, steps):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(C, C) for _ in range(3))
        self.conv, self.depthwise = nn.Conv1d(C, C, 3, padding=1), nn.Conv1d(C, C, 3, padding=1, groups=C)
        self.norm, self.groups = nn.LayerNorm(C), nn.GroupNorm(2, C)
        self.running, self.coupled = nn.BatchNorm1d(C).eval(), nn.BatchNorm1d(C)
        self.table, self.gru, self.lstm = nn.Embedding(7, C), nn.GRU(C, C, batch_first=True), nn.LSTM(C, C)
        self.attention, self.image = nn.MultiheadAttention(C, 2), nn.Conv2d(1, 1, 3, padding=1)
        self.rms, self.bilinear = nn.RMSNorm(C), nn.Bilinear(C, C, C)
        self.places = nn.Parameter(torch.randn(steps, C))
        self.scale, self.slope = nn.Parameter(torch.randn(C)), nn.Parameter(torch.full((1,), 0.3))
        self.down, self.up = nn.Parameter(torch.randn(2, C)), nn.Parameter(torch.randn(C, 2))


class StraightThrough(torch.autograd.Function):
    """A custom op on the way, of which nothing is known but its backward."""

    @staticmethod
    def forward(ctx, h):
        return h.round()

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g


class Draws:
    """Values of one build: the same kinds for every build, the numbers by mood."""

    def __init__(self, seed, mood, batch, steps, dtype):
        self.generator = torch.Generator().manual_seed(seed)
        self.mood, self.batch, self.steps, self.dtype = mood, batch, steps, dtype

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def whole(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator)

    def bits(self, *shape):
        """Return a mask: all true, all false, or mixed."""
        mixed = torch.rand(shape, generator=self.generator) < 0.5
        return {"harmless": mixed | True, "zeros": mixed & False}.get(self.mood, mixed)

    def weights(self, *shape):
        """Return factors: all one, all zero, zeros and ones, or numbers between them."""
        if self.mood == "between":
            return (0.2 + 0.6 * torch.rand(shape, generator=self.generator)).to(self.dtype)
        return self.bits(*shape).to(self.dtype)

    def coefficient(self):
        """Return the factor of what couples samples: off where the mood is harmless."""
        return {"harmless": 0.0, "zeros": 0.0, "between": 0.6}.get(self.mood, 1.0)

    def order(self, size):
        return torch.arange(size) if self.mood == "harmless" else torch.randperm(size, generator=self.generator)

    def lift(self):
        """Return what to add before a ReLU: nothing, or enough to kill every unit."""
        return -99.0 if self.mood == "zeros" else 0.0


# Steps take: weights, the register they change, another register, their own number, the values of this build ------------


def class_token(w, h, s, k, d):
    token = w.places[:1].expand(d.batch, 1, C)
    return torch.cat([token, h], 1)[:, :-1]


def masked(w, h, s, k, d):
    shape = [(d.batch, d.steps, C), (d.steps, 1), (C,), (d.batch, 1, 1), (d.batch, d.steps, 1)][k % 5]
    return h * d.weights(*shape)


def attention(w, h, s, k, d):
    mask = d.bits(d.steps, d.steps) | torch.eye(d.steps, dtype=torch.bool)
    score = (w.linears[k % 3](h) @ s.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return score.softmax(2) @ s


def fused_attention(w, h, s, k, d):
    mask = d.bits(d.batch, d.steps, d.steps) | torch.eye(d.steps, dtype=torch.bool)
    return F.scaled_dot_product_attention(h, s, s, attn_mask=mask)


def joined_and_split(w, h, s, k, d):
    both = torch.cat([h, s], 2).view(d.batch, d.steps, 2, C).transpose(2, 3).reshape(d.batch, d.steps, 2 * C)
    return both[..., :C] if k % 2 else both.chunk(2, 2)[1]


def in_place_scaled(w, h, s, k, d):
    h = h.clone()
    h[:, : 1 + k % 2] *= d.weights(1)
    return h


def in_place_rows(w, h, s, k, d):
    h = h.clone()
    h[k % d.batch] = 0.5 * s[k % d.batch]
    return h


def strided(w, h, s, k, d):
    h = h.contiguous()
    return h.as_strided(h.shape, h.stride()) + h.as_strided((d.batch, 1, C), (d.steps * C, 0, 1))


def experts(w, h, s, k, d):
    """Rows of the folded batch go to the layer that an index chooses, and come back."""
    rows, choice = h.reshape(-1, C), d.whole(2, d.batch * d.steps).mul(d.mood != "harmless")
    order = choice.argsort(stable=True)
    middle = len(rows) // 2
    out = torch.cat([w.linears[0](rows[order[:middle]]), w.linears[1](rows[order[middle:]])])
    return torch.zeros_like(rows).index_add(0, order, out).view_as(h)


def multihead(w, h, s, k, d):
    h, s = h.transpose(0, 1), s.transpose(0, 1)
    return w.attention(h, s, s, need_weights=False)[0].transpose(0, 1)


def steps_scattered(w, h, s, k, d):
    place = d.order(d.steps)[None, :, None].expand_as(h)
    return s.scatter(1, place[:, : d.steps - 1], h[:, : d.steps - 1])


def steps_put_in_place(w, h, s, k, d):
    out = torch.zeros_like(s)
    out[:, d.order(d.steps)] = h
    return out


def batch_adjacency(w, h, s, k, d):
    link = torch.eye(d.batch) + d.coefficient() * torch.eye(d.batch).roll(1, 0)
    return torch.einsum("ij,jtc->itc", link.to(h.dtype), h)


def batch_attention(w, h, s, k, d):
    link = torch.eye(d.batch) if d.coefficient() == 0 else torch.ones(d.batch, d.batch)
    score = torch.einsum("itc,jtc->tij", h, s).masked_fill(link == 0, float("-inf"))
    return torch.einsum("tij,jtc->itc", score.softmax(2), h)


def batch_swap(w, h, s, k, d):
    swap = torch.arange(d.batch)[:, None, None] < (1 if d.coefficient() else 0)
    return torch.where(swap, h.flip(0), h)


# Steps that keep samples apart.
PLAIN = {
    "linear": lambda w, h, s, k, d: w.linears[k % 3](h),
    "linear_folded": lambda w, h, s, k, d: w.linears[k % 3](h.reshape(-1, C)).view_as(h),
    "linear_steps_first": lambda w, h, s, k, d: w.linears[k % 3](h.transpose(0, 1)).transpose(0, 1),
    "linear_functional": lambda w, h, s, k, d: F.linear(h, 0.5 * w.linears[k % 3].weight.T + 0.1),
    "linear_low_rank": lambda w, h, s, k, d: F.linear(h, w.linears[k % 3].weight + 0.3 * w.up @ w.down),
    "linear_by_einsum": lambda w, h, s, k, d: torch.einsum("btc,dc->btd", h, w.linears[k % 3].weight),
    "linear_in_columns": lambda w, h, s, k, d: (w.linears[k % 3].weight @ h.reshape(-1, C).T).T.reshape(h.shape),
    "convolution": lambda w, h, s, k, d: (w.depthwise if k % 2 else w.conv)(h.transpose(1, 2)).transpose(1, 2),
    "recurrent": lambda w, h, s, k, d: w.gru(h)[0],
    "embedding": lambda w, h, s, k, d: h + w.table(d.whole(7, d.batch, d.steps)),
    "tied_head": lambda w, h, s, k, d: F.linear(h, w.table.weight).softmax(2) @ w.table.weight,
    "layer_norm": lambda w, h, s, k, d: w.norm(h),
    "group_norm": lambda w, h, s, k, d: w.groups(h.transpose(1, 2)).transpose(1, 2),
    "running_norm": lambda w, h, s, k, d: w.running(h.transpose(1, 2)).transpose(1, 2),
    "positions": lambda w, h, s, k, d: h + w.places,
    "scaled": lambda w, h, s, k, d: h + w.scale * s,
    "sloped": lambda w, h, s, k, d: F.prelu(h, w.slope),
    "class_token": class_token,
    "relu": lambda w, h, s, k, d: F.relu(h + d.lift()),
    "smooth": lambda w, h, s, k, d: (torch.tanh, F.gelu, F.silu, torch.sigmoid)[k % 4](h),
    "gated": lambda w, h, s, k, d: h * torch.sigmoid(s),
    "added": lambda w, h, s, k, d: 0.7 * h + 0.7 * s,
    "subtracted_mean": lambda w, h, s, k, d: h - s.mean(1, keepdim=True),
    "largest_step": lambda w, h, s, k, d: h + s.amax(1, keepdim=True),
    "masked": masked,
    "filled": lambda w, h, s, k, d: h.masked_fill(d.bits(d.batch, d.steps, 1), 0.3),
    "chosen": lambda w, h, s, k, d: torch.where(d.bits(d.batch, 1, C), h, s),
    "interpolated": lambda w, h, s, k, d: torch.lerp(h, s, d.weights(d.steps, 1)),
    "fused_product": lambda w, h, s, k, d: torch.addcmul(h, s, d.weights(d.batch, 1, C)),
    "larger": lambda w, h, s, k, d: torch.maximum(h, s) if k % 2 else torch.minimum(h, s),
    "clamped": lambda w, h, s, k, d: h.clamp(-0.5, 0.8),
    "attention": attention,
    "fused_attention": fused_attention,
    "steps_mixed": lambda w, h, s, k, d: torch.einsum("ij,bjc->bic", d.weights(d.steps, d.steps) / d.steps, h),
    "steps_moved": lambda w, h, s, k, d: h.flip(1) if k % 2 else h.roll(1, 1),
    "steps_indexed": lambda w, h, s, k, d: h[:, d.order(d.steps)],
    "steps_gathered": lambda w, h, s, k, d: h.gather(1, d.whole(d.steps, d.batch, d.steps, C)),
    "steps_sorted": lambda w, h, s, k, d: h.sort(1).values,
    "steps_summed": lambda w, h, s, k, d: h.cumsum(1) / d.steps,
    "joined_and_split": joined_and_split,
    "softmax": lambda w, h, s, k, d: h.softmax(2) if k % 2 else h.log_softmax(1),
    "outer_product": lambda w, h, s, k, d: torch.matmul(torch.matmul(h, s.transpose(1, 2)) / d.steps, h) / C,
    "broadcast_sum": lambda w, h, s, k, d: (h[:, :, None] * s[:, None] * d.weights(d.steps, d.steps, 1)).mean(2),
    "in_place_scaled": in_place_scaled,
    "in_place_added": lambda w, h, s, k, d: h.clone().add_(s, alpha=0.5).relu_(),
    "in_place_rows": in_place_rows,
    "in_place_filled": lambda w, h, s, k, d: h.mul(1.0).masked_fill_(d.bits(d.batch, d.steps, C), 0.1),
    "window": lambda w, h, s, k, d: F.pad(h, (0, 0, 1, 0)).unfold(1, 2, 1).mean(3),
    "strided": strided,
    "experts": experts,
    "recurrent_steps_first": lambda w, h, s, k, d: w.lstm(h.transpose(0, 1))[0].transpose(0, 1),
    "multihead": multihead,
    "image": lambda w, h, s, k, d: w.image(h[:, None])[:, 0],
    "rms_norm": lambda w, h, s, k, d: w.rms(h),
    "bilinear": lambda w, h, s, k, d: 0.3 * w.bilinear(h, s),
    "straight_through": lambda w, h, s, k, d: StraightThrough.apply(2 * h) + s,
    "weight_for_each_sample": lambda w, h, s, k, d: torch.bmm(
        h, torch.tanh(s[:, 0])[:, :, None] * w.linears[k % 3].weight
    ),
    "pooled_steps": lambda w, h, s, k, d: (
        F.max_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2) if k % 2 else h + s.logsumexp(1, keepdim=True)
    ),
    "steps_scattered": steps_scattered,
    "steps_put_in_place": steps_put_in_place,
}
# Steps that mix samples, by a coefficient that is zero in a harmless build.
COUPLING = {
    "mixed_up": lambda w, h, s, k, d: h + d.coefficient() * (s.flip(0) if k % 2 else s.roll(1, 0)),
    "less_the_batch_mean": lambda w, h, s, k, d: h - d.coefficient() * s.mean(0),
    "batch_adjacency": batch_adjacency,
    "batch_attention": batch_attention,
    "batch_norm": lambda w, h, s, k, d: h + d.coefficient() * w.coupled(s.transpose(1, 2)).transpose(1, 2),
    "batch_swap": batch_swap,
    "batch_index": lambda w, h, s, k, d: h[torch.arange(d.batch) // (2 if d.coefficient() else 1)],
}
