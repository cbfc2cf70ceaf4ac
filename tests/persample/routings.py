"""Graphs of one form that get other data: who owns what may not be remembered from a harmless batch.

A routing is a function of a model, the data and a *setting* (a mask, a gate, a coefficient, an index, a margin) that
returns one loss per sample. All settings of a routing record a graph of the same form. Each setting has a verdict:

- ``FREE``: every row of the data enters one loss only. It must be answered.
- ``COUPLED``: a row enters the losses of several samples. It must be refused, every time.
- ``EITHER``: a zero switches the coupling off, a dead branch hides it, or it is not in the graph (`detach`). It may be
  answered or refused, but not wrongly.

The first setting is the harmless one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .cases import flat_sum

FREE, COUPLED, EITHER = "free", "coupled", "either"
D, T = 5, 3


class Parts(nn.Module):
    """What the routings are made of. What a routing does not use has no gradient."""

    def __init__(self, batch):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.norm, self.batch_norm = nn.LayerNorm(D), nn.BatchNorm1d(D)
        self.own_norm = nn.BatchNorm1d(D, track_running_stats=False)
        self.conv, self.table = nn.Conv1d(D, D, 3, padding=1), nn.Embedding(7, D)
        self.attention, self.lstm = nn.MultiheadAttention(D, 1), nn.LSTM(D, D)
        self.gate = nn.Parameter(torch.ones(1))
        self.rows = nn.Parameter(torch.randn(batch, D))
        for norm in (self.batch_norm, self.norm):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        self.batch_norm.running_mean.normal_()


@dataclass(frozen=True)
class Routing:
    """A function from model, data and setting to losses, and what must come of it."""

    losses: Callable[[Parts, torch.Tensor, Any], torch.Tensor]
    verdicts: dict[Any, str]
    data: Callable[[int], torch.Tensor]
    dtype: torch.dtype = torch.float64
    one_form: bool = True
    groups: Callable[[int, Any], torch.Tensor] | None = None
    autocast: bool = False
    reentrant: bool = False
    opaque: bool = False

    def model(self, batch):
        return Parts(batch).to(self.dtype)

    def draw(self, batch):
        x = self.data(batch)
        return x.to(self.dtype) if x.is_floating_point() else x

    def rounding(self):
        """Return the dtype whose rounding errors the gradients have."""
        return torch.bfloat16 if self.autocast else self.dtype


def vectors(batch):
    return torch.randn(batch, D)


def steps(batch):
    return torch.randn(batch, T, D)


def square(batch):
    """As many steps as samples."""
    return torch.randn(batch, batch, D)


def pieces(batch):
    """Two rows of data for each sample, packed."""
    return torch.randn(2 * batch, D)


def ids(batch):
    return torch.randint(7, (batch, T))


ROUTINGS: dict[str, Routing] = {}


def routing(verdicts, data=vectors, **options):
    def add(function):
        assert function.__name__ not in ROUTINGS
        ROUTINGS[function.__name__] = Routing(function, verdicts, data, **options)
        return function

    return add


OFF_ON = {0.0: EITHER, 0.7: COUPLED, 1.0: COUPLED}
ANY = {1.0: FREE, 0.0: FREE, 0.4: FREE}


# Coefficients ---------------------------------------------------------------------------------------------------------


@routing({1.0: EITHER, 0.7: COUPLED, 0.0: EITHER})
def mixup(m, x, lam):
    h = m.a(x)
    return flat_sum(lam * h + (1 - lam) * h.flip(0))


@routing({1.0: EITHER, 0.7: COUPLED, 0.0: EITHER})
def mixup_by_tensor(m, x, lam):
    h, lam = torch.tanh(m.a(x)), torch.full((len(x), 1), lam)
    return flat_sum(m.b(lam * h + (1 - lam) * h.flip(0)))


@routing(OFF_ON)
def mixup_of_some_rows(m, x, c):
    h = m.a(x)
    part = torch.zeros(len(x), 1).index_fill(0, torch.tensor([1]), c)
    return flat_sum(h + part * h.roll(1, 0))


@routing({0.0: EITHER, 0.7: COUPLED, 1.0: EITHER})
def lerp_with_weight(m, x, c):
    h = m.a(x)
    return flat_sum(torch.lerp(h, h.flip(0), torch.full((len(x), 1), c)))


@routing({0.0: EITHER, 0.7: COUPLED, 1.0: EITHER})
def lerp_with_number(m, x, c):
    h = m.a(x)
    return flat_sum(torch.lerp(h, h.flip(0), c))


@routing(OFF_ON)
def addcmul_of_rolled(m, x, c):
    h = m.a(x)
    return flat_sum(torch.addcmul(h, torch.full((1, D), c), h.roll(1, 0)))


@routing(OFF_ON)
def addcdiv_of_mean(m, x, c):
    h = m.a(x)
    return flat_sum(torch.addcdiv(h, c * h.mean(0), torch.full((1, D), 2.0)))


@routing(OFF_ON)
def add_with_alpha(m, x, c):
    h = m.a(x)
    return flat_sum(torch.add(h, h.flip(0), alpha=c))


@routing(OFF_ON)
def learned_gate_over_the_mean(m, x, c):
    m.gate.data.fill_(c)
    h = m.a(x)
    return flat_sum(h + m.gate * h.mean(0))


@routing(OFF_ON)
def learned_gate_over_a_neighbour(m, x, c):
    m.gate.data.fill_(c)
    h = m.a(x)
    return flat_sum(m.b(h + m.gate * torch.tanh(h.roll(1, 0))))


@routing(OFF_ON)
def centred(m, x, c):
    h = m.a(x)
    return flat_sum(h - c * h.mean(0, keepdim=True))


@routing(OFF_ON)
def divided_by_the_deviation(m, x, c):
    h = m.a(x)
    return flat_sum(h / (1 + c * h.std(0)))


@routing(OFF_ON)
def loss_less_the_mean(m, x, c):
    losses = flat_sum(m.a(x))
    return (losses - c * losses.mean()).square()


@routing(OFF_ON)
def loss_times_the_sum(m, x, c):
    losses = flat_sum(m.a(x))
    return losses * (1 + c * losses.sum())


@routing(OFF_ON, square)
def steps_and_samples_swapped(m, x, c):
    h = m.a(x)
    return flat_sum(h + c * h.transpose(0, 1))


# Masks over packed rows -----------------------------------------------------------------------------------------------


# Nothing in the graph tells packed rows that several documents pool from rows of a constant table.
PACKED = {"equal": EITHER, "unequal": EITHER, "overlapping": EITHER}


def document_mask(batch, setting):
    """Which of the 2 * batch rows each document pools."""
    row = torch.arange(2 * batch)
    if setting == "unequal":
        owner = torch.cat([torch.zeros(3, dtype=torch.long), (row[3:] - 1) // 2])
    else:
        owner = row // 2
    mask = owner == torch.arange(batch)[:, None]
    return mask | (row % 2 == 0) if setting == "overlapping" else mask


def mean_of(pooled, mask):
    return flat_sum(pooled / mask.sum(1, keepdim=True))


@routing(PACKED, pieces)
def documents_by_mul(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of((mask[:, :, None].double() * m.a(x)).sum(1), mask)


@routing(PACKED, pieces)
def documents_by_where(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of(torch.where(mask[:, :, None], m.a(x), 0.0).sum(1), mask)


@routing(PACKED, pieces)
def documents_by_masked_fill(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    rows = m.a(x).expand(len(mask), -1, -1)
    return mean_of(rows.masked_fill(~mask[:, :, None], 0.0).sum(1), mask)


@routing(PACKED, pieces)
def documents_by_matmul(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of(mask.double() @ m.a(x), mask)


@routing(PACKED, pieces)
def documents_by_einsum(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of(torch.einsum("bn,nd->bd", mask.double(), m.a(x)), mask)


@routing(PACKED, pieces)
def documents_by_max(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    mask = torch.ones_like(mask) if setting == "overlapping" else mask
    return flat_sum(torch.where(mask[:, :, None], m.a(x), -1e9).amax(1))


@routing(PACKED, pieces)
def documents_by_softmax(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    h = m.a(x)
    weights = h[:, 0].expand(len(mask), -1).masked_fill(~mask, float("-inf")).softmax(1)
    return flat_sum(weights @ h)


@routing(PACKED, pieces)
def documents_by_addcmul(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    start = torch.zeros(*mask.shape, D)
    return mean_of(torch.addcmul(start, mask[:, :, None].double(), m.a(x)).sum(1), mask)


@routing(PACKED, pieces)
def documents_by_baddbmm(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    h = m.a(x).expand(len(mask), -1, -1)
    return mean_of(torch.baddbmm(torch.zeros(1), mask[:, None].double(), h).squeeze(1), mask)


@routing(PACKED, pieces)
def documents_by_relu(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of(F.relu(m.a(x) + torch.where(mask, 9.0, -99.0)[:, :, None]).mean(1), mask)


@routing(PACKED, pieces)
def documents_by_maximum(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of(torch.maximum(m.a(x), torch.where(mask, -99.0, 99.0)[:, :, None]).sum(1), mask)


@routing(PACKED, pieces)
def documents_by_clamp(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    floor = torch.where(mask, -99.0, 99.0)[:, :, None]
    return mean_of(m.a(x).expand(len(mask), -1, -1).clamp(min=floor).mean(1), mask)


@routing(PACKED, pieces)
def documents_by_nested_where(m, x, setting):
    mask = document_mask(len(x) // 2, setting)[:, :, None]
    h = m.a(x)
    inner = torch.where(mask, torch.tanh(h), h)
    return flat_sum(torch.where(~mask, 0.0, inner).sum(1))


@routing({"equal": EITHER, "unequal": EITHER}, pieces)
def documents_by_cumsum(m, x, setting):
    """Differences of running sums: what is between them cancels, up to rounding."""
    mask = document_mask(len(x) // 2, setting)
    ends = mask.sum(1).cumsum(0) - 1
    sums = m.a(x).cumsum(0)[ends]
    return flat_sum(sums - F.pad(sums, (0, 0, 1, 0))[:-1])


def document_ids(batch, setting):
    return document_mask(batch, setting).double().argmax(0)


DOCUMENTS = {"equal": FREE, "unequal": FREE}


@routing(DOCUMENTS, pieces)
def documents_by_index_add(m, x, setting):
    place = document_ids(len(x) // 2, setting)
    return flat_sum(torch.zeros(len(x) // 2, D).index_add(0, place, torch.tanh(m.a(x))))


@routing(DOCUMENTS, pieces)
def documents_by_scatter_add(m, x, setting):
    place = document_ids(len(x) // 2, setting)[:, None].expand(-1, D)
    return flat_sum(torch.zeros(len(x) // 2, D).scatter_add(0, place, torch.tanh(m.a(x))))


@routing(DOCUMENTS, pieces)
def documents_by_scatter_reduce(m, x, setting):
    place = document_ids(len(x) // 2, setting)[:, None].expand(-1, D)
    return flat_sum(torch.zeros(len(x) // 2, D).scatter_reduce(0, place, m.a(x), "amax", include_self=False))


@routing(DOCUMENTS, pieces)
def documents_by_index_put(m, x, setting):
    place = document_ids(len(x) // 2, setting)
    return flat_sum(torch.zeros(len(x) // 2, D).index_put((place,), m.a(x), accumulate=True))


# Attention and graphs over the batch ----------------------------------------------------------------------------------


LINKS = {"self": EITHER, "one other": EITHER, "ring": COUPLED, "all": COUPLED}


def links(batch, setting):
    own = torch.eye(batch)
    return {"self": own, "one other": own.roll(1, 0), "ring": own + own.roll(1, 0), "all": torch.ones_like(own)}[
        setting
    ]


@routing(LINKS)
def adjacency_by_matmul(m, x, setting):
    return flat_sum(m.b(torch.tanh(links(len(x), setting) @ m.a(x))))


@routing(LINKS)
def adjacency_over_the_degree(m, x, setting):
    link = links(len(x), setting)
    return flat_sum(link @ m.a(x) / link.sum(1, keepdim=True))


@routing({"self": EITHER, "one other": EITHER})
def adjacency_sparse(m, x, setting):
    link = links(len(x), setting).to_sparse()
    return flat_sum(torch.sparse.mm(link, m.a(x)))


@routing({"ring": COUPLED})
def adjacency_sparse_ring(m, x, setting):
    link = links(len(x), setting).to_sparse()
    return flat_sum(torch.sparse.mm(link, m.a(x)))


@routing(LINKS)
def adjacency_by_bmm(m, x, setting):
    return flat_sum(torch.bmm(links(len(x), setting)[None], m.a(x)[None])[0])


@routing(LINKS, steps)
def adjacency_by_einsum(m, x, setting):
    return flat_sum(torch.einsum("ij,jtd->itd", links(len(x), setting), m.a(x)))


@routing(LINKS)
def attention_under_a_float_mask(m, x, setting):
    h = m.a(x)
    score = h @ m.b(x).T + links(len(x), setting).log()
    return flat_sum(score.softmax(1) @ h)


@routing(LINKS)
def attention_under_a_bool_mask(m, x, setting):
    h = torch.tanh(m.a(x))[None]
    return flat_sum(F.scaled_dot_product_attention(h, h, h, attn_mask=links(len(x), setting).bool())[0])


@routing(LINKS, steps)
def attention_with_the_batch_first_by_mistake(m, x, setting):
    """`nn.MultiheadAttention` takes the steps first: here it attends over the samples."""
    h = m.a(x)
    return flat_sum(m.attention(h, h, h, attn_mask=links(len(x), setting) == 0, need_weights=False)[0])


@routing({"self": COUPLED, "all": COUPLED})
def attention_gated_by_products(m, x, setting):
    """A product with a mask after the softmax: the denominator still sees everyone."""
    h = m.a(x)
    return flat_sum((h @ h.T).softmax(1) * links(len(x), setting) @ h)


@routing({"own": FREE, "shifted": FREE, "twice": COUPLED})
def edges_by_index(m, x, setting):
    n = len(x)
    source = {"own": torch.arange(n), "shifted": torch.arange(n).roll(1), "twice": torch.arange(n) // 2}[setting]
    return flat_sum(torch.zeros(n, D).index_add(0, torch.arange(n), torch.tanh(m.a(x))[source]))


@routing({"full": FREE, "causal": FREE, "padded": FREE}, square)
def attention_within_samples(m, x, setting):
    n = x.shape[1]
    mask = {"full": torch.ones(n, n), "causal": torch.ones(n, n).tril(), "padded": torch.eye(n)}[setting].bool()
    h = m.a(x)
    return flat_sum(m.b(F.scaled_dot_product_attention(h, h, h, attn_mask=mask)))


@routing({"full": FREE, "padded": FREE}, square)
def attention_with_steps_first(m, x, setting):
    h = m.a(x).transpose(0, 1)
    pad = torch.zeros(len(x), len(x), dtype=torch.bool)
    pad[:, -1] = setting == "padded"
    return flat_sum(m.attention(h, h, h, key_padding_mask=pad, need_weights=False)[0].transpose(0, 1))


@routing({1.0: COUPLED, 0.5: COUPLED})
def softmax_over_the_batch(m, x, heat):
    return flat_sum((m.a(x) / heat).softmax(0))


# Margins and rankings -------------------------------------------------------------------------------------------------


MARGIN = {-99.0: EITHER, 99.0: COUPLED}


@routing(MARGIN)
def triplet(m, x, margin):
    h = m.a(x)
    return F.relu((h - h.roll(1, 0)).square().sum(1) - (h - h.roll(2, 0)).square().sum(1) + margin)


@routing(MARGIN)
def ranking_of_pairs(m, x, margin):
    score = m.a(x).sum(1)
    return F.relu(margin + score[:, None] - score).sum(1)


@routing(MARGIN)
def ranking_beside_a_task(m, x, margin):
    """The usual shape of it: a task of one's own, and a ranking that is inactive at first."""
    h = torch.tanh(m.a(x))
    score = m.b(h)[:, 0]
    return flat_sum(m.b(h)) + F.margin_ranking_loss(score, score.roll(1), torch.ones(len(x)), margin, reduction="none")


@routing(MARGIN)
def above_the_mean_loss(m, x, margin):
    losses = flat_sum(m.a(x))
    return losses + (losses - losses.mean() + margin).clamp(min=0)


@routing(MARGIN)
def cosine_to_a_neighbour(m, x, margin):
    h = m.a(x)
    near = F.cosine_similarity(h, h.roll(1, 0))
    return flat_sum(h) + F.relu(near + margin)


@routing({"self": EITHER, "all": COUPLED})
def contrastive_with_masked_negatives(m, x, setting):
    h = F.normalize(m.a(x), dim=1)
    logits = (h @ F.normalize(m.b(x), dim=1).T).masked_fill(links(len(x), setting) == 0, float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(x)), reduction="none") + logits.diagonal()


@routing({0.1: COUPLED, 1.0: COUPLED})
def contrastive(m, x, heat):
    h = F.normalize(m.a(x), dim=1)
    return F.cross_entropy(h @ h.T / heat, torch.arange(len(x)), reduction="none")


@routing({-99.0: FREE, 99.0: FREE, 0.0: FREE})
def hinge_of_each_sample(m, x, margin):
    return flat_sum(m.b(x)) + F.relu(margin - m.a(x)).sum(1)


@routing({1.0: FREE, 9.0: FREE})
def multi_margin(m, x, margin):
    return F.multi_margin_loss(m.a(x), torch.arange(len(x)) % D, margin=margin, reduction="none")


@routing({1.0: FREE, -1.0: FREE})
def hardest_samples(m, x, sign):
    return (sign * flat_sum(m.a(x))).topk(len(x) // 2).values


# Hooks ----------------------------------------------------------------------------------------------------------------


def hooked(h, hook):
    h.register_hook(hook)
    return h


@routing({1.0: FREE, 3.0: FREE})
def hook_that_scales(m, x, c):
    return flat_sum(m.b(hooked(torch.tanh(m.a(x)), lambda g: c * g)))


@routing({1.0: FREE, 3.0: FREE})
def hook_that_looks(m, x, c):
    seen = []
    return flat_sum(m.b(hooked(torch.tanh(c * m.a(x)), lambda g: seen.append(float(g.sum())))))


@routing({0.0: EITHER, 1.0: EITHER})
def hook_that_moves_rows(m, x, c):
    return flat_sum(m.b(hooked(torch.tanh(m.a(x)), lambda g: g.flip(0) if c else g)))


@routing({0.0: EITHER, 1.0: EITHER})
def hook_that_mixes_rows(m, x, c):
    return flat_sum(m.b(hooked(torch.tanh(m.a(x)), lambda g: g + c * g.flip(0))))


@routing({99.0: EITHER, 0.1: EITHER})
def hook_that_clamps(m, x, c):
    return flat_sum(m.b(hooked(torch.tanh(m.a(x)), lambda g: g.clamp(-c, c))))


@routing({0.0: EITHER, 1.0: EITHER})
def hook_that_normalises(m, x, c):
    return flat_sum(m.b(hooked(torch.tanh(m.a(x)), lambda g: g / g.norm() if c else g)))


@routing({0.0: EITHER, 1.0: EITHER})
def hook_on_the_losses(m, x, c):
    return hooked(flat_sum(m.a(x)), lambda g: g + c * g.sum())


@routing({0.0: EITHER, 1.0: EITHER})
def hook_on_a_node(m, x, c):
    h = torch.tanh(m.a(x))
    h.grad_fn.register_prehook(lambda gs: (gs[0] + c * gs[0].flip(0),))
    return flat_sum(m.b(h))


@routing({1.0: FREE, 2.0: FREE})
def kept_gradient(m, x, c):
    h = torch.tanh(c * m.a(x))
    h.retain_grad()
    return flat_sum(m.b(h))


# Rows moved within the batch ------------------------------------------------------------------------------------------


PICKED = {"in order": FREE, "shuffled": FREE, "twice": COUPLED}


def picked(batch, setting):
    order = torch.arange(batch)
    return {"in order": order, "shuffled": order.roll(1).flip(0), "twice": order // 2 * 2}[setting]


@routing(PICKED)
def rows_by_index(m, x, setting):
    return flat_sum(m.b(torch.tanh(m.a(x))[picked(len(x), setting)]))


@routing(PICKED)
def rows_by_index_select(m, x, setting):
    return flat_sum(m.b(torch.tanh(m.a(x)).index_select(0, picked(len(x), setting))))


@routing(PICKED)
def rows_by_gather(m, x, setting):
    return flat_sum(torch.tanh(m.a(x)).gather(0, picked(len(x), setting)[:, None].expand(-1, D)))


@routing({"in order": FREE, "shuffled": FREE})
def rows_by_scatter(m, x, setting):
    place = picked(len(x), setting)[:, None].expand(-1, D)
    return flat_sum(torch.zeros(len(x), D).scatter(0, place, torch.tanh(m.a(x))))


@routing({"in order": FREE, "shuffled": FREE})
def rows_by_index_copy(m, x, setting):
    return flat_sum(torch.zeros(len(x), D).index_copy(0, picked(len(x), setting), torch.tanh(m.a(x))))


@routing({"in order": EITHER, "apart": COUPLED})
def columns_gathered_apart(m, x, setting):
    order = torch.arange(len(x))[:, None].expand(-1, D)
    if setting == "apart":
        order = (order + torch.arange(D)) % len(x)
    return flat_sum(torch.tanh(m.a(x)).gather(0, order))


@routing({"in order": EITHER, "apart": COUPLED})
def columns_sorted_over_the_batch(m, x, setting):
    lift = 99.0 * torch.arange(len(x))[:, None].expand(-1, D)
    if setting == "apart":
        lift = lift * (-1.0) ** torch.arange(D)
    return flat_sum(torch.sort(torch.tanh(m.a(x)) + lift, 0).values)


@routing({"in order": FREE, "shuffled": FREE})
def rows_sorted_by_score(m, x, setting):
    h = torch.tanh(m.a(x))
    order = (h[:, 0] if setting == "shuffled" else -torch.arange(len(x))).argsort(descending=True)
    return flat_sum(m.b(h[order]))


@routing({"own": EITHER, "others": COUPLED})
def rows_by_masked_scatter(m, x, setting):
    """Only the rows of the mask are filled, from the first rows of the source."""
    h, n = m.a(x), len(x)
    mask = (torch.arange(n) < 2 if setting == "own" else torch.arange(n) >= n - 2)[:, None]
    return flat_sum(h.masked_scatter(mask.expand(-1, D), m.b(h)))


@routing({"none": EITHER, "all": EITHER, "both ends": EITHER, "one end": COUPLED})
def rows_swapped_by_where(m, x, setting):
    n = len(x)
    swap = torch.full((n, 1), setting == "all")
    swap[0] |= setting in ("both ends", "one end")
    swap[-1] |= setting == "both ends"
    h = torch.tanh(m.a(x))
    return flat_sum(torch.where(swap, h.flip(0), h))


@routing({"none": EITHER, "some": COUPLED})
def columns_cut_and_mixed(m, x, setting):
    cut = torch.arange(D) < (2 if setting == "some" else 0)
    h = torch.tanh(m.a(x))
    return flat_sum(m.b(torch.where(cut, h.flip(0), h)))


@routing({1.0: FREE, 0.0: FREE})
def all_rows_flipped(m, x, c):
    return flat_sum(c * torch.tanh(m.a(x)).flip(0))


@routing(OFF_ON)
def halves_swapped(m, x, c):
    h = torch.tanh(m.a(x))
    first, second = h.chunk(2)
    return flat_sum(h + c * torch.cat([second, first]))


@routing(OFF_ON)
def next_sample(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h + c * F.pad(h, (0, 0, 0, 1))[1:])


@routing(OFF_ON)
def sums_so_far(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h + c * h.cumsum(0))


@routing({1.0: COUPLED, 2.0: COUPLED})
def maximum_so_far(m, x, c):
    return flat_sum(c * m.a(x).cummax(0).values + m.a(x))


@routing(OFF_ON)
def first_sample_for_all(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h + c * h[:1].expand(len(x), -1))


@routing({1.0: EITHER, 2.0: EITHER})
def rows_repeated(m, x, c):
    """Two losses for each row: it has as many rows as a constant table might."""
    return c * flat_sum(m.b(torch.tanh(m.a(x)).repeat(2, 1)))


@routing({0: FREE, 1: FREE}, pieces, groups=lambda batch, setting: torch.arange(4 * batch) % (2 * batch))
def rows_repeated_within_groups(m, x, setting):
    return flat_sum(m.b(torch.tanh(m.a(x)).repeat(2, 1)))


@routing({(0.0, 1.0, 0.0): EITHER, (1.0, 1.0, 1.0): COUPLED, (1.0, 0.0, 1.0): COUPLED})
def blurred_over_the_batch(m, x, kernel):
    h = m.a(x).T[:, None]
    return flat_sum(F.conv1d(h, torch.tensor(kernel)[None, None], padding=1)[:, 0].T)


@routing({1.0: COUPLED, 2.0: COUPLED})
def pooled_over_the_batch(m, x, c):
    return flat_sum(F.avg_pool1d((c * m.a(x)).T[None], 3, 1, 1)[0].T)


@routing({1.0: COUPLED, 2.0: COUPLED})
def fourier_over_the_batch(m, x, c):
    return flat_sum(torch.fft.fft(c * m.a(x), dim=0).real)


@routing(ANY, square)
def fourier_over_the_steps(m, x, c):
    mask = torch.ones(x.shape[1], 1)
    mask[1] = c
    return flat_sum(torch.fft.irfft(torch.fft.rfft(mask * m.a(x), dim=1), dim=1, n=len(x)))


# One row, seen by two owners ------------------------------------------------------------------------------------------


@routing(OFF_ON)
def input_of_two_owners(m, x, c):
    return flat_sum(m.a(x) + c * m.b(x).flip(0))


@routing(OFF_ON)
def losses_of_two_owners(m, x, c):
    return flat_sum(m.a(x)) + c * flat_sum(m.b(x)).roll(1)


@routing(OFF_ON, ids)
def ids_of_two_owners(m, x, c):
    return flat_sum(m.table(x) + c * m.table(x).flip(0))


@routing(OFF_ON)
def hidden_of_two_owners(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(m.b(h) + c * m.norm(h).roll(1, 0))


@routing(OFF_ON, steps)
def steps_of_two_owners(m, x, c):
    return flat_sum(m.a(x) + c * m.conv(x.transpose(1, 2)).transpose(1, 2).flip(0))


@routing(OFF_ON)
def gradient_input_of_two_owners(m, x, c):
    x = x.clone().requires_grad_()
    return flat_sum(m.a(x) + c * m.b(x).flip(0))


@routing({1.0: COUPLED, 0.5: COUPLED})
def input_of_two_owners_each_time(m, x, c):
    return flat_sum(torch.tanh(m.a(x) * c)) + flat_sum(torch.tanh(m.b(x))).flip(0)


@routing({0.0: EITHER, 1.0: EITHER})
def views_of_two_owners(m, x, c):
    """Two views of one storage."""
    return flat_sum(m.a(x[1:]) + c * m.b(x[:-1]))


@routing({0.0: EITHER, 1.0: EITHER})
def detached_neighbour(m, x, c):
    """The value of another sample, not its gradient."""
    h = torch.tanh(m.a(x))
    return flat_sum(h * (1 + c * h.detach().flip(0)))


@routing({0.0: EITHER, 1.0: EITHER})
def input_mixed_before_the_graph(m, x, c):
    return flat_sum(m.a(x + c * x.flip(0)))


@routing(ANY)
def two_heads_in_one_order(m, x, c):
    return flat_sum(m.a(x).flip(0) + c * m.b(x).flip(0))


# Normalisation --------------------------------------------------------------------------------------------------------


@routing({"eval": FREE, "train": COUPLED}, one_form=False)
def batch_norm(m, x, setting):
    m.batch_norm.train(setting == "train")
    return flat_sum(m.b(m.batch_norm(m.a(x))))


@routing({0.0: FREE, 1.0: FREE}, steps)
def batch_norm_eval_over_steps(m, x, c):
    mask = torch.ones(T, 1)
    mask[1] = c
    return flat_sum(m.batch_norm.eval()(mask.T * m.a(x).transpose(1, 2)))


@routing({0.0: COUPLED, 1.0: COUPLED})
def batch_norm_without_buffers(m, x, c):
    return flat_sum(c * m.a(x) + m.own_norm.eval()(m.a(x)))


@routing({0.0: EITHER, 1.0: COUPLED})
def batch_norm_behind_a_gate(m, x, c):
    h = m.a(x)
    return flat_sum(h + c * m.batch_norm.train()(h))


@routing({1.0: COUPLED, 2.0: COUPLED})
def layer_norm_over_the_batch(m, x, c):
    return flat_sum(F.layer_norm(c * m.a(x).T, (len(x),)).T)


@routing({"one for each": FREE, "one for two": COUPLED}, one_form=False)
def group_norm_of_folded_samples(m, x, setting):
    n = len(x)
    h = m.a(x).view(1, n * D, 1)
    return flat_sum(F.group_norm(h, n if setting == "one for each" else n // 2).view(n, D))


@routing({0: COUPLED, 1: FREE}, one_form=False)
def unit_length(m, x, dim):
    return flat_sum(F.normalize(m.a(x), dim=dim))


# Checkpoints ----------------------------------------------------------------------------------------------------------


def in_checkpoints(verdicts, data=vectors):
    """Add the routing twice: under a checkpoint of each kind."""

    def add(function):
        def under(reentrant):
            def losses(m, x, setting):
                h = torch.tanh(m.a(x))
                return flat_sum(checkpoint(lambda h: function(m, h, setting), h, use_reentrant=reentrant))

            return losses

        for reentrant in (False, True):
            name = function.__name__ + ("_reentrant" if reentrant else "")
            ROUTINGS[name] = Routing(under(reentrant), verdicts, data, reentrant=reentrant)
        return function

    return add


@in_checkpoints({1.0: EITHER, 0.7: COUPLED})
def checkpointed_mixup(m, h, lam):
    return m.b(lam * h + (1 - lam) * h.flip(0))


@in_checkpoints(LINKS)
def checkpointed_adjacency(m, h, setting):
    return torch.tanh(m.b(links(len(h), setting) @ h))


@in_checkpoints(PACKED, pieces)
def checkpointed_documents(m, h, setting):
    return (document_mask(len(h) // 2, setting)[:, :, None].double() * m.b(h)).sum(1)


@in_checkpoints(OFF_ON)
def checkpointed_gate(m, h, c):
    return h + c * m.b(h).mean(0)


@in_checkpoints({"in order": FREE, "shuffled": FREE, "twice": COUPLED})
def checkpointed_index(m, h, setting):
    return m.b(h)[picked(len(h), setting)]


@in_checkpoints(ANY)
def checkpointed_mask(m, h, c):
    return m.norm(m.b(h * torch.tensor([[1.0], [c]]).repeat(len(h) // 2, 1)))


# Zeros and dead units -------------------------------------------------------------------------------------------------


@routing({-99.0: EITHER, 99.0: COUPLED})
def dead_batch_statistic(m, x, lift):
    h = m.a(x)
    return flat_sum(h + F.relu(h.mean(0) + lift))


@routing({-99.0: FREE, 99.0: FREE, 0.0: FREE})
def dead_units(m, x, lift):
    return flat_sum(m.b(F.relu(m.a(x) + lift)))


@routing({-99.0: FREE, 99.0: FREE}, square)
def dead_steps(m, x, lift):
    lifts = lift * (torch.arange(x.shape[1]) % 2)[:, None]
    return flat_sum(F.relu(m.a(x) + lifts).mean(1) + m.b(x).sum(1))


@routing({"one": FREE, "others": FREE, "none": FREE, "all": FREE})
def losses_masked(m, x, setting):
    own = torch.arange(len(x)) == 0
    mask = {"one": own, "others": ~own, "none": own & ~own, "all": own | ~own}[setting]
    return flat_sum(m.b(F.relu(m.a(x)))) * mask


@routing({"one": EITHER, "all": COUPLED})
def coupling_behind_masked_losses(m, x, setting):
    h = m.a(x)
    weight = torch.full((len(x),), float(setting == "all"))
    weight[0] = 1.0
    return flat_sum(h + h.flip(0)) * weight


@routing({"equal": COUPLED, "tiny": COUPLED})
def coupling_behind_tiny_losses(m, x, setting):
    weight = torch.ones(len(x))
    weight[1:] = 1.0 if setting == "equal" else 1e-12
    h = m.a(x)
    return flat_sum(torch.tanh(h + h.mean(0))) * weight


@routing({0.0: EITHER, 1e-6: COUPLED, 1.0: COUPLED})
def tiny_coefficient(m, x, c):
    h = m.a(x)
    return flat_sum(h + c * h.flip(0))


@routing({"soft": FREE, "hard": FREE})
def experts_under_gates(m, x, setting):
    heat = 1.0 if setting == "soft" else 1e4
    gates = (heat * x[:, :2]).softmax(1)
    return flat_sum(gates[:, :1] * m.a(x) + gates[:, 1:] * m.b(x))


@routing({False: FREE, True: FREE})
def equal_samples(m, x, equal):
    return flat_sum(m.b(torch.tanh(m.a(torch.ones_like(x) if equal else x))))


@routing(ANY)
def dropout_by_mask(m, x, keep):
    mask = (torch.rand(len(x), D) < keep).double()
    return flat_sum(m.b(torch.tanh(m.a(x)) * mask))


@routing({0.0: FREE, 0.5: FREE, 0.9: FREE}, square, one_form=False)
def dropout(m, x, p):
    return flat_sum(m.b(F.dropout(torch.tanh(m.a(x)), p, training=True)))


@routing({1.0: EITHER, 0.0: COUPLED}, one_form=False)
def dropout_of_a_batch_statistic(m, x, p):
    h = m.a(x)
    return flat_sum(h + F.dropout(h.mean(0).expand_as(h), p, training=True))


# In place -------------------------------------------------------------------------------------------------------------


@routing(OFF_ON)
def row_added_in_place(m, x, c):
    h = torch.tanh(m.a(x)) + 0.0
    h[0] += c * h[1].clone()
    return flat_sum(m.b(h))


@routing(OFF_ON)
def flipped_added_in_place(m, x, c):
    h = torch.tanh(m.a(x))
    g = h.clone()
    g.add_(h.flip(0), alpha=c)
    return flat_sum(g)


@routing({0.0: EITHER, 0.5: COUPLED, 1.0: EITHER})
def lerp_in_place(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h.clone().lerp_(h.flip(0), torch.full((1, 1), c)))


@routing(ANY)
def columns_scaled_in_place(m, x, c):
    h = torch.tanh(m.a(x)) * 1.0
    h[:, 1:3] *= c
    return flat_sum(m.b(h))


@routing(ANY)
def rows_scaled_in_place(m, x, c):
    h = m.a(x)
    h[::2].mul_(c)
    return flat_sum(m.b(h))


@routing({"some": FREE, "none": FREE, "all": FREE})
def filled_in_place(m, x, setting):
    mask = {"some": x > 0, "none": x > 99, "all": x < 99}[setting]
    return flat_sum(m.b(m.a(x).masked_fill_(mask, 0.5).relu_()))


@routing({"own": FREE, "moved": FREE})
def rows_put_in_place(m, x, setting):
    h = torch.zeros(len(x), D)
    h[picked(len(x), "in order" if setting == "own" else "shuffled")] = torch.tanh(m.a(x))
    return flat_sum(m.b(h))


@routing({"own": COUPLED, "moved": COUPLED})
def row_overwritten_in_place(m, x, setting):
    h = torch.tanh(m.a(x)) + 0.0
    h[int(setting == "moved")] = h[2].clone()
    return flat_sum(h)


# Views that overlap ---------------------------------------------------------------------------------------------------


@routing({1.0: COUPLED, 2.0: COUPLED})
def windows_by_as_strided(m, x, c):
    h = F.pad(c * torch.tanh(m.a(x)), (0, 0, 0, 1)).contiguous()
    return flat_sum(h.as_strided((len(x), 2, D), (D, D, 1)))


@routing(OFF_ON)
def windows_under_weights(m, x, c):
    window = F.pad(torch.tanh(m.a(x)), (0, 0, 0, 1)).unfold(0, 2, 1)
    return flat_sum(window * torch.tensor([1.0, c]))


@routing(ANY, pieces)
def pairs_by_as_strided(m, x, c):
    h = torch.tanh(m.a(x)).contiguous()
    return flat_sum(h.as_strided((len(x) // 2, 2, D), (2 * D, D, 1)) * torch.tensor([[1.0], [c]]))


@routing(LINKS)
def expanded_under_a_mask(m, x, setting):
    n = len(x)
    return flat_sum((torch.tanh(m.a(x)).expand(n, n, D) * links(n, setting)[:, :, None]).mean(1))


@routing({"own": FREE, "mask": FREE}, square)
def broadcast_within_samples(m, x, setting):
    n = len(x)
    mask = torch.ones(n, n) if setting == "own" else torch.eye(n)
    h = torch.tanh(m.a(x))
    return flat_sum((h[:, None] * mask[..., None] + m.b(h)[:, :, None]).sum(2))


# Layouts --------------------------------------------------------------------------------------------------------------


@routing({"all": FREE, "some": FREE, "none": FREE}, square)
def folded_under_a_mask(m, x, setting):
    n = len(x)
    keep = {"all": torch.ones(n * n), "some": torch.arange(n * n) % 3 > 0, "none": torch.zeros(n * n)}[setting]
    h = F.relu(m.a(x.reshape(n * n, D))) * keep[:, None]
    return flat_sum(m.b(h).view(n, n, D))


@routing({"all": FREE, "some": FREE}, square)
def steps_first_under_a_mask(m, x, setting):
    n = len(x)
    keep = torch.ones(n, 1, 1) if setting == "all" else (torch.arange(n) < 2)[:, None, None]
    h = torch.tanh(m.a(x.transpose(0, 1))) * keep
    return flat_sum(m.norm(m.b(h)).sum(0))


@routing({1: FREE, 0: FREE}, square, one_form=False)
def samples_in_either_dimension(m, x, dim):
    return flat_sum(torch.tanh(m.a(x if dim else x.transpose(0, 1))).sum(dim))


@routing(OFF_ON, square)
def folded_and_rolled(m, x, c):
    """A shift of the folded rows by one takes the last step of the sample before."""
    n = len(x)
    h = torch.tanh(m.a(x.reshape(n * n, D)))
    return flat_sum(m.b(h + c * h.roll(1, 0)).view(n, n, D))


@routing(ANY, square)
def rolled_over_the_steps(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(m.b(h + c * h.roll(1, 1)))


@routing({0.0: FREE, 1.0: FREE}, steps)
def convolution_under_a_mask(m, x, c):
    mask = torch.tensor([1.0, c, 1.0])
    return flat_sum(m.conv(torch.tanh(m.a(x)).transpose(1, 2) * mask))


@routing({"steps first": FREE, "samples first": COUPLED}, square, one_form=False)
def recurrent_over_steps_or_samples(m, x, setting):
    if setting == "samples first":
        return flat_sum(m.lstm(m.a(x))[0])
    return flat_sum(m.lstm(m.a(x).transpose(0, 1))[0].transpose(0, 1))


@routing(ANY, square)
def losses_of_tokens(m, x, c):
    mask = torch.ones(len(x), len(x))
    mask[:, 1] = c
    return m.b(torch.tanh(m.a(x))).square().sum(2) * mask


@routing(OFF_ON, square)
def losses_of_tokens_swapped(m, x, c):
    losses = torch.tanh(m.a(x)).square().sum(2)
    return losses + c * losses.T


@routing(OFF_ON, steps)
def losses_of_tokens_centred(m, x, c):
    losses = torch.tanh(m.a(x)).square().sum(2)
    return losses - c * losses.mean(0)


@routing({"next": FREE, "padded": FREE}, ids)
def next_token(m, x, setting):
    keep = torch.ones(T - 1) if setting == "next" else torch.tensor([1.0, 0.0])
    logits = F.linear(torch.tanh(m.a(m.table(x))), m.table.weight)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none") * keep


# Groups of samples ----------------------------------------------------------------------------------------------------


def pairs(batch, setting):
    order = torch.arange(batch)
    return order // 2 if setting == "together" else order % (batch // 2)


@routing({"together": FREE, "apart": COUPLED}, groups=pairs)
def pairs_mixed(m, x, setting):
    h = torch.tanh(m.a(x)).view(-1, 2, D)
    return flat_sum((h + h.flip(1)).reshape(-1, D))


@routing({"together": FREE, "apart": FREE}, groups=pairs)
def groups_of_samples_apart(m, x, setting):
    return flat_sum(m.b(F.relu(m.a(x))))


@routing(OFF_ON, groups=lambda batch, setting: torch.arange(batch) // 2)
def groups_mixed(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h + c * h.roll(1, 0))


@routing({0.0: FREE, 0.7: FREE, 1.0: FREE}, groups=lambda batch, setting: torch.zeros(batch))
def all_in_one_group(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h + c * h.mean(0))


# Custom functions -----------------------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, c):
        ctx.c = c
        return h.round()

    @staticmethod
    def backward(ctx, g):
        return ctx.c * g, None


class Mix(torch.autograd.Function):
    """Add rows of other samples; its node has no attribute that shows them."""

    @staticmethod
    def forward(ctx, h, c):
        ctx.c = c
        return h + c * h.flip(0)

    @staticmethod
    def backward(ctx, g):
        return g + ctx.c * g.flip(0), None


@routing(ANY)
def straight_through(m, x, c):
    return flat_sum(m.b(StraightThrough.apply(3 * m.a(x), c)))


@routing(OFF_ON, opaque=True)
def mixed_by_a_function(m, x, c):
    return flat_sum(m.b(Mix.apply(torch.tanh(m.a(x)), c)))


@routing(OFF_ON, opaque=True)
def losses_mixed_by_a_function(m, x, c):
    return Mix.apply(flat_sum(torch.tanh(m.a(x))), c)


# Weights and constants ------------------------------------------------------------------------------------------------


@routing(ANY)
def a_row_for_each_sample(m, x, c):
    """A parameter with as many rows as there are samples."""
    return flat_sum(m.a(x) * m.rows + c * m.rows)


@routing(ANY)
def prototypes_as_many_as_samples(m, x, c):
    return flat_sum(m.a(x) @ (m.rows + c * m.rows.mean(0)).T)


@routing(ANY)
def class_token_repeated(m, x, c):
    token = m.rows[:1].repeat(len(x), 1)
    return flat_sum(m.b(torch.stack([token, c * m.a(x)], 1)))


@routing(ANY, square)
def table_of_steps(m, x, c):
    return flat_sum(m.norm(c * m.a(x) + m.rows))


@routing(ANY)
def one_weight_twice(m, x, c):
    return flat_sum(m.a(c * torch.tanh(m.a(x))) + m.a(x))


@routing({0.0: EITHER, 1.0: COUPLED})
def weight_made_from_the_batch(m, x, c):
    weight = m.b.weight + c * torch.outer(m.a(x).mean(0), torch.ones(D))
    return flat_sum(F.linear(x, weight))


@routing(ANY)
def weight_made_for_each_sample(m, x, c):
    weight = m.b.weight + c * m.a(x)[:, :, None]
    return flat_sum(torch.bmm(weight, x[:, :, None]))


# Precision ------------------------------------------------------------------------------------------------------------


def in_precisions(verdicts, data=vectors):
    """Add the routing in float32, bfloat16 and float16."""

    def add(function):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"{function.__name__}_{str(dtype).removeprefix('torch.')}"
            ROUTINGS[name] = Routing(function, verdicts, data, dtype=dtype)
        return function

    return add


@in_precisions({1.0: EITHER, 0.7: COUPLED})
def mixup_in(m, x, lam):
    h = m.a(x)
    return flat_sum(lam * h + (1 - lam) * h.flip(0))


@in_precisions(PACKED, pieces)
def documents_in(m, x, setting):
    mask = document_mask(len(x) // 2, setting)
    return mean_of((mask[:, :, None].to(x.dtype) * m.a(x)).sum(1), mask)


@in_precisions(ANY, square)
def mask_in(m, x, c):
    mask = torch.ones(len(x), 1, dtype=x.dtype)
    mask[1] = c
    return flat_sum(m.b(F.relu(m.a(x)) * mask))


@routing({1.0: EITHER, 0.7: COUPLED}, dtype=torch.float32, autocast=True)
def mixup_under_autocast(m, x, lam):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(F.relu(m.a(x)))
        mixed = lam * h + (1 - lam) * h.flip(0)
    return flat_sum(mixed.float())
