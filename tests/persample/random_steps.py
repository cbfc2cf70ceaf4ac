"""The steps of random graphs: what they may do to a tensor of shape (batch, steps, channels)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

C = 4
MOODS = ("harmless", "between", "zeros", "random")
PLAIN, COUPLING = [], []


def plain(op):
    """Add a step that keeps samples apart."""
    PLAIN.append(op)
    return op


def couples(op):
    """Add a step that mixes samples, by a coefficient that is zero in a harmless build."""
    COUPLING.append(op)
    return op


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


@plain
def linear(w, h, s, k, d):
    return w.linears[k % 3](h)


@plain
def linear_folded(w, h, s, k, d):
    return w.linears[k % 3](h.reshape(-1, C)).view_as(h)


@plain
def linear_steps_first(w, h, s, k, d):
    return w.linears[k % 3](h.transpose(0, 1)).transpose(0, 1)


@plain
def linear_functional(w, h, s, k, d):
    return F.linear(h, 0.5 * w.linears[k % 3].weight.T + 0.1)


@plain
def linear_low_rank(w, h, s, k, d):
    return F.linear(h, w.linears[k % 3].weight + 0.3 * w.up @ w.down)


@plain
def linear_by_einsum(w, h, s, k, d):
    return torch.einsum("btc,dc->btd", h, w.linears[k % 3].weight)


@plain
def linear_in_columns(w, h, s, k, d):
    return (w.linears[k % 3].weight @ h.reshape(-1, C).T).T.reshape(h.shape)


@plain
def convolution(w, h, s, k, d):
    return (w.depthwise if k % 2 else w.conv)(h.transpose(1, 2)).transpose(1, 2)


@plain
def recurrent(w, h, s, k, d):
    return w.gru(h)[0]


@plain
def embedding(w, h, s, k, d):
    return h + w.table(d.whole(7, d.batch, d.steps))


@plain
def tied_head(w, h, s, k, d):
    return F.linear(h, w.table.weight).softmax(2) @ w.table.weight


@plain
def layer_norm(w, h, s, k, d):
    return w.norm(h)


@plain
def group_norm(w, h, s, k, d):
    return w.groups(h.transpose(1, 2)).transpose(1, 2)


@plain
def running_norm(w, h, s, k, d):
    return w.running(h.transpose(1, 2)).transpose(1, 2)


@plain
def positions(w, h, s, k, d):
    return h + w.places


@plain
def scaled(w, h, s, k, d):
    return h + w.scale * s


@plain
def sloped(w, h, s, k, d):
    return F.prelu(h, w.slope)


@plain
def class_token(w, h, s, k, d):
    token = w.places[:1].expand(d.batch, 1, C)
    return torch.cat([token, h], 1)[:, :-1]


@plain
def relu(w, h, s, k, d):
    return F.relu(h + d.lift())


@plain
def smooth(w, h, s, k, d):
    return (torch.tanh, F.gelu, F.silu, torch.sigmoid)[k % 4](h)


@plain
def gated(w, h, s, k, d):
    return h * torch.sigmoid(s)


@plain
def added(w, h, s, k, d):
    return 0.7 * h + 0.7 * s


@plain
def subtracted_mean(w, h, s, k, d):
    return h - s.mean(1, keepdim=True)


@plain
def largest_step(w, h, s, k, d):
    return h + s.amax(1, keepdim=True)


@plain
def masked(w, h, s, k, d):
    shape = [(d.batch, d.steps, C), (d.steps, 1), (C,), (d.batch, 1, 1), (d.batch, d.steps, 1)][k % 5]
    return h * d.weights(*shape)


@plain
def filled(w, h, s, k, d):
    return h.masked_fill(d.bits(d.batch, d.steps, 1), 0.3)


@plain
def chosen(w, h, s, k, d):
    return torch.where(d.bits(d.batch, 1, C), h, s)


@plain
def interpolated(w, h, s, k, d):
    return torch.lerp(h, s, d.weights(d.steps, 1))


@plain
def fused_product(w, h, s, k, d):
    return torch.addcmul(h, s, d.weights(d.batch, 1, C))


@plain
def larger(w, h, s, k, d):
    return torch.maximum(h, s) if k % 2 else torch.minimum(h, s)


@plain
def clamped(w, h, s, k, d):
    return h.clamp(-0.5, 0.8)


@plain
def attention(w, h, s, k, d):
    mask = d.bits(d.steps, d.steps) | torch.eye(d.steps, dtype=torch.bool)
    score = (w.linears[k % 3](h) @ s.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return score.softmax(2) @ s


@plain
def fused_attention(w, h, s, k, d):
    mask = d.bits(d.batch, d.steps, d.steps) | torch.eye(d.steps, dtype=torch.bool)
    return F.scaled_dot_product_attention(h, s, s, attn_mask=mask)


@plain
def steps_mixed(w, h, s, k, d):
    return torch.einsum("ij,bjc->bic", d.weights(d.steps, d.steps) / d.steps, h)


@plain
def steps_moved(w, h, s, k, d):
    return h.flip(1) if k % 2 else h.roll(1, 1)


@plain
def steps_indexed(w, h, s, k, d):
    return h[:, d.order(d.steps)]


@plain
def steps_gathered(w, h, s, k, d):
    return h.gather(1, d.whole(d.steps, d.batch, d.steps, C))


@plain
def steps_sorted(w, h, s, k, d):
    return h.sort(1).values


@plain
def steps_summed(w, h, s, k, d):
    return h.cumsum(1) / d.steps


@plain
def joined_and_split(w, h, s, k, d):
    both = torch.cat([h, s], 2).view(d.batch, d.steps, 2, C).transpose(2, 3).reshape(d.batch, d.steps, 2 * C)
    return both[..., :C] if k % 2 else both.chunk(2, 2)[1]


@plain
def softmax(w, h, s, k, d):
    return h.softmax(2) if k % 2 else h.log_softmax(1)


@plain
def outer_product(w, h, s, k, d):
    return torch.matmul(torch.matmul(h, s.transpose(1, 2)) / d.steps, h) / C


@plain
def broadcast_sum(w, h, s, k, d):
    return (h[:, :, None] * s[:, None] * d.weights(d.steps, d.steps, 1)).mean(2)


@plain
def in_place_scaled(w, h, s, k, d):
    h = h.clone()
    h[:, : 1 + k % 2] *= d.weights(1)
    return h


@plain
def in_place_added(w, h, s, k, d):
    return h.clone().add_(s, alpha=0.5).relu_()


@plain
def in_place_rows(w, h, s, k, d):
    h = h.clone()
    h[k % d.batch] = 0.5 * s[k % d.batch]
    return h


@plain
def in_place_filled(w, h, s, k, d):
    return h.mul(1.0).masked_fill_(d.bits(d.batch, d.steps, C), 0.1)


@plain
def window(w, h, s, k, d):
    return F.pad(h, (0, 0, 1, 0)).unfold(1, 2, 1).mean(3)


@plain
def strided(w, h, s, k, d):
    h = h.contiguous()
    return h.as_strided(h.shape, h.stride()) + h.as_strided((d.batch, 1, C), (d.steps * C, 0, 1))


@plain
def experts(w, h, s, k, d):
    """Rows of the folded batch go to the layer that an index chooses, and come back."""
    rows, choice = h.reshape(-1, C), d.whole(2, d.batch * d.steps).mul(d.mood != "harmless")
    order = choice.argsort(stable=True)
    middle = len(rows) // 2
    out = torch.cat([w.linears[0](rows[order[:middle]]), w.linears[1](rows[order[middle:]])])
    return torch.zeros_like(rows).index_add(0, order, out).view_as(h)


@plain
def recurrent_steps_first(w, h, s, k, d):
    return w.lstm(h.transpose(0, 1))[0].transpose(0, 1)


@plain
def multihead(w, h, s, k, d):
    h, s = h.transpose(0, 1), s.transpose(0, 1)
    return w.attention(h, s, s, need_weights=False)[0].transpose(0, 1)


@plain
def image(w, h, s, k, d):
    return w.image(h[:, None])[:, 0]


@plain
def rms_norm(w, h, s, k, d):
    return w.rms(h)


@plain
def bilinear(w, h, s, k, d):
    return 0.3 * w.bilinear(h, s)


@plain
def straight_through(w, h, s, k, d):
    return StraightThrough.apply(2 * h) + s


@plain
def weight_for_each_sample(w, h, s, k, d):
    return torch.bmm(h, torch.tanh(s[:, 0])[:, :, None] * w.linears[k % 3].weight)


@plain
def pooled_steps(w, h, s, k, d):
    return F.max_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2) if k % 2 else h + s.logsumexp(1, keepdim=True)


@plain
def steps_scattered(w, h, s, k, d):
    place = d.order(d.steps)[None, :, None].expand_as(h)
    return s.scatter(1, place[:, : d.steps - 1], h[:, : d.steps - 1])


@plain
def steps_put_in_place(w, h, s, k, d):
    out = torch.zeros_like(s)
    out[:, d.order(d.steps)] = h
    return out


# Steps that couple samples ---------------------------------------------------------------------------------------------


@couples
def mixed_up(w, h, s, k, d):
    return h + d.coefficient() * (s.flip(0) if k % 2 else s.roll(1, 0))


@couples
def less_the_batch_mean(w, h, s, k, d):
    return h - d.coefficient() * s.mean(0)


@couples
def batch_adjacency(w, h, s, k, d):
    link = torch.eye(d.batch) + d.coefficient() * torch.eye(d.batch).roll(1, 0)
    return torch.einsum("ij,jtc->itc", link.to(h.dtype), h)


@couples
def batch_attention(w, h, s, k, d):
    link = torch.eye(d.batch) if d.coefficient() == 0 else torch.ones(d.batch, d.batch)
    score = torch.einsum("itc,jtc->tij", h, s).masked_fill(link == 0, float("-inf"))
    return torch.einsum("tij,jtc->itc", score.softmax(2), h)


@couples
def batch_norm(w, h, s, k, d):
    return h + d.coefficient() * w.coupled(s.transpose(1, 2)).transpose(1, 2)


@couples
def batch_swap(w, h, s, k, d):
    swap = torch.arange(d.batch)[:, None, None] < (1 if d.coefficient() else 0)
    return torch.where(swap, h.flip(0), h)


@couples
def batch_index(w, h, s, k, d):
    return h[torch.arange(d.batch) // (2 if d.coefficient() else 1)]
