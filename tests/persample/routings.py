"""Graphs of one form that get other data: who owns what may not be remembered from a harmless batch.

A routing is a function of a model, the data and a *setting* (a mask, a gate, a coefficient, an index, a margin) that
returns an output for each sample, or one loss per sample. Each setting has a verdict:

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
        self.conv, self.table = nn.Conv1d(D, D, 3, padding=1), nn.Embedding(7, D)
        self.attention, self.lstm = nn.MultiheadAttention(D, 1), nn.LSTM(D, D)
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
    groups: Callable[[int, Any], torch.Tensor] | None = None
    autocast: bool = False
    opaque: bool = False

    def model(self, batch):
        return Parts(batch).float() if self.autocast else Parts(batch)

    def draw(self, batch):
        x = self.data(batch)
        return x.float() if self.autocast else x

    def rounding(self):
        """Return the dtype whose rounding errors the gradients have."""
        return torch.bfloat16 if self.autocast else torch.float64


ROUTINGS: dict[str, Routing] = {}


def vectors(batch):
    return torch.randn(batch, D)


def steps(batch):
    return torch.randn(batch, T, D)


def square(batch):
    """As many steps as samples."""
    return torch.randn(batch, batch, D)


def packed_rows(batch):
    """Two rows of data for each sample, packed."""
    return torch.randn(2 * batch, D)


def ids(batch):
    return torch.randint(7, (batch, T))


def on_data(verdicts, functions, data=vectors, tokens=False, **options):
    """Add functions of model, data and setting; with `tokens` what they return are losses already."""
    for name, function in functions.items():

        def losses(m, x, setting, function=function):
            out = function(m, x, setting)
            return out if tokens or out.dim() == 1 else flat_sum(out)

        assert name not in ROUTINGS
        ROUTINGS[name] = Routing(losses, verdicts, data, **options)


def on_hidden(verdicts, functions, data=vectors, **options):
    """Add functions of model, hidden rows and setting."""
    wrapped = {
        name: lambda m, x, setting, function=function: function(m, torch.tanh(m.a(x)), setting)
        for name, function in functions.items()
    }
    on_data(verdicts, wrapped, data, **options)


OFF_ON = {0.0: EITHER, 0.7: COUPLED, 1.0: COUPLED}
ANY = {1.0: FREE, 0.0: FREE, 0.4: FREE}
BOTH = {1.0: COUPLED, 2.0: COUPLED}
DIMS = {0: COUPLED, 1: FREE}

# A coefficient decides whether samples mix ----------------------------------------------------------------------------


on_hidden({1.0: EITHER, 0.7: COUPLED, 0.0: EITHER}, {"mixup": lambda m, h, c: c * h + (1 - c) * h.flip(0)})
on_hidden(
    {0.0: EITHER, 0.7: COUPLED, 1.0: EITHER},
    {"lerp_with_weight": lambda m, h, c: torch.lerp(h, h.flip(0), torch.full((len(h), 1), c))},
)
on_hidden(
    OFF_ON,
    {
        "addcmul_of_rolled": lambda m, h, c: torch.addcmul(h, torch.full((1, D), c), h.roll(1, 0)),
        "loss_less_the_mean": lambda m, h, c: (flat_sum(h) - c * flat_sum(h).mean()).square(),
        "first_sample_for_all": lambda m, h, c: h + c * h[:1].expand(len(h), -1),
    },
)
on_hidden(
    OFF_ON,
    {
        "steps_and_samples_swapped": lambda m, h, c: h + c * h.transpose(0, 1),
        "folded_and_rolled": lambda m, h, c: m.b(h + c * h.reshape(-1, D).roll(1, 0).view(h.shape)),
    },
    square,
)

# Zeros and dead units -------------------------------------------------------------------------------------------------


def losses_masked(m, h, setting):
    own = torch.arange(len(h)) == 0
    return flat_sum(m.b(h)) * {"one": own, "others": ~own, "none": own & ~own, "all": own | ~own}[setting]


def coupling_behind_tiny_losses(m, h, setting):
    weight = torch.ones(len(h))
    weight[1:] = 1.0 if setting == "equal" else 1e-12
    return flat_sum(torch.tanh(h + h.mean(0))) * weight


on_hidden({-99.0: EITHER, 99.0: COUPLED}, {"dead_batch_statistic": lambda m, h, lift: h + F.relu(h.mean(0) + lift)})
on_hidden({-99.0: FREE, 99.0: FREE, 0.0: FREE}, {"dead_units": lambda m, h, lift: m.b(F.relu(h + lift))})
on_hidden(dict.fromkeys(("one", "others", "none", "all"), FREE), {"losses_masked": losses_masked})
on_hidden({"equal": COUPLED, "tiny": COUPLED}, {"coupling_behind_tiny_losses": coupling_behind_tiny_losses})
on_data(
    {False: FREE, True: FREE},
    {"equal_samples": lambda m, x, equal: m.b(torch.tanh(m.a(torch.ones_like(x) if equal else x)))},
)

# Attention and graphs over the batch ----------------------------------------------------------------------------------

LINKS = {"self": EITHER, "one other": EITHER, "ring": COUPLED, "all": COUPLED}


def links(batch, setting):
    own = torch.eye(batch)
    ring = own + own.roll(1, 0)
    return {"self": own, "one other": own.roll(1, 0), "ring": ring, "all": torch.ones_like(own)}[setting]


def attention_under_a_bool_mask(m, h, setting):
    return F.scaled_dot_product_attention(*[h[None]] * 3, attn_mask=links(len(h), setting).bool())[0]


def attention_with_the_batch_first_by_mistake(m, h, setting):
    """`nn.MultiheadAttention` takes the steps first: here it attends over the samples."""
    return m.attention(h, h, h, attn_mask=links(len(h), setting) == 0, need_weights=False)[0]


def attention_within_samples(m, h, setting):
    n = h.shape[1]
    mask = {"full": torch.ones(n, n), "causal": torch.ones(n, n).tril(), "padded": torch.eye(n)}[setting].bool()
    return m.b(F.scaled_dot_product_attention(h, h, h, attn_mask=mask))


on_hidden(
    LINKS,
    {
        "adjacency_by_matmul": lambda m, h, setting: m.b(links(len(h), setting) @ h),
        "attention_under_a_bool_mask": attention_under_a_bool_mask,
        "distances_under_a_mask": lambda m, h, s: flat_sum(h) + (torch.cdist(h, m.b(h)) * links(len(h), s)).sum(1),
    },
)
on_hidden(LINKS, {"attention_with_the_batch_first_by_mistake": attention_with_the_batch_first_by_mistake}, steps)
on_hidden(
    {"self": EITHER, "one other": EITHER},
    {"adjacency_sparse": lambda m, h, setting: torch.sparse.mm(links(len(h), setting).to_sparse(), h)},
)
on_hidden(
    {"full": FREE, "causal": FREE, "padded": FREE}, {"attention_within_samples": attention_within_samples}, square
)

# Margins and rankings -------------------------------------------------------------------------------------------------


def triplet(m, h, margin):
    return F.relu((h - h.roll(1, 0)).square().sum(1) - (h - h.roll(2, 0)).square().sum(1) + margin)


def ranking_beside_a_task(m, h, margin):
    """The usual shape of it: a task of one's own, and a ranking that is inactive at first."""
    score = m.b(h)[:, 0]
    return flat_sum(m.b(h)) + F.margin_ranking_loss(score, score.roll(1), torch.ones(len(h)), margin, reduction="none")


def contrastive_with_masked_negatives(m, h, setting):
    logits = F.normalize(h, dim=1) @ F.normalize(m.b(h), dim=1).T
    logits = logits.masked_fill(links(len(h), setting) == 0, float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(h)), reduction="none") + logits.diagonal()


on_hidden(
    {-99.0: EITHER, 99.0: COUPLED},
    {"triplet": triplet, "ranking_beside_a_task": ranking_beside_a_task},
)
on_hidden({"self": EITHER, "all": COUPLED}, {"contrastive_with_masked_negatives": contrastive_with_masked_negatives})
on_data({1.0: FREE, -1.0: FREE}, {"hardest_samples": lambda m, x, c: (c * flat_sum(m.a(x))).topk(len(x) // 2).values})

# Normalisation --------------------------------------------------------------------------------------------------------


def group_norm_of_folded_samples(m, h, setting):
    n = len(h)
    return F.group_norm(h.view(1, n * D, 1), n if setting == "one for each" else n // 2).view(n, D)


on_hidden(
    {"eval": FREE, "train": COUPLED}, {"batch_norm": lambda m, h, mode: m.b(m.batch_norm.train(mode == "train")(h))}
)
on_hidden({0.0: EITHER, 1.0: COUPLED}, {"batch_norm_behind_a_gate": lambda m, h, c: h + c * m.batch_norm.train()(h)})
on_hidden(BOTH, {"layer_norm_over_the_batch": lambda m, h, c: F.layer_norm(c * h.T, (len(h),)).T})
on_hidden(
    {"one for each": FREE, "one for two": COUPLED}, {"group_norm_of_folded_samples": group_norm_of_folded_samples}
)
on_hidden(
    DIMS,
    {
        "unit_length": lambda m, h, dim: F.normalize(h, dim=dim),
        "less_the_largest": lambda m, h, dim: h - 0.5 * h.amax(dim, keepdim=True),
    },
)

# Rows moved within the batch ------------------------------------------------------------------------------------------

PICKED = {"in order": FREE, "shuffled": FREE, "twice": COUPLED}
MOVED = {"in order": FREE, "shuffled": FREE}


def picked(batch, setting):
    order = torch.arange(batch)
    return {"in order": order, "shuffled": order.roll(1).flip(0), "twice": order // 2 * 2}[setting]


def places(h, setting):
    return picked(len(h), setting)[:, None].expand(-1, D)


def columns_gathered_apart(m, h, setting):
    order = torch.arange(len(h))[:, None].expand(-1, D)
    return h.gather(0, (order + torch.arange(D)) % len(h) if setting == "apart" else order)


def columns_sorted_over_the_batch(m, h, setting):
    lift = 99.0 * torch.arange(len(h))[:, None].expand(-1, D)
    return torch.sort(h + (lift * (-1.0) ** torch.arange(D) if setting == "apart" else lift), 0).values


def rows_by_masked_scatter(m, h, setting):
    """Only the rows of the mask are filled, from the first rows of the source."""
    row = torch.arange(len(h))
    mask = (row < 2 if setting == "own" else row >= len(h) - 2)[:, None]
    return h.masked_scatter(mask.expand(-1, D), m.b(h))


def rows_put_in_place(m, h, setting):
    out = torch.zeros_like(h)
    out[picked(len(h), setting)] = h
    return m.b(out)


on_hidden(
    PICKED,
    {
        "rows_by_index": lambda m, h, setting: m.b(h[picked(len(h), setting)]),
        "rows_by_gather": lambda m, h, setting: h.gather(0, places(h, setting)),
    },
)
on_hidden(
    MOVED,
    {
        "rows_by_scatter": lambda m, h, setting: torch.zeros_like(h).scatter(0, places(h, setting), h),
        "rows_put_in_place": rows_put_in_place,
    },
)
on_data(
    MOVED, {"losses_by_list": lambda m, x, s: torch.stack([flat_sum(m.a(x[i : i + 1]))[0] for i in picked(len(x), s)])}
)
on_hidden(
    {"in order": EITHER, "apart": COUPLED},
    {"columns_gathered_apart": columns_gathered_apart, "columns_sorted_over_the_batch": columns_sorted_over_the_batch},
)
on_hidden({"own": EITHER, "others": COUPLED}, {"rows_by_masked_scatter": rows_by_masked_scatter})
on_hidden({1.0: FREE, 0.0: FREE}, {"all_rows_flipped": lambda m, h, c: c * h.flip(0)})
on_hidden(
    BOTH,
    {
        "maximum_so_far": lambda m, h, c: c * h.cummax(0).values + h,
        "pooled_over_the_batch": lambda m, h, c: F.avg_pool1d((c * h).T[None], 3, 1, 1)[0].T,
    },
)
# Two losses for each row: it has as many rows as a constant table might.
on_hidden({1.0: EITHER, 2.0: EITHER}, {"rows_repeated": lambda m, h, c: c * m.b(h.repeat(2, 1))})
on_hidden(
    {0: FREE, 1: FREE},
    {"rows_repeated_within_groups": lambda m, h, _: m.b(h.repeat(2, 1))},
    packed_rows,
    groups=lambda batch, _: torch.arange(4 * batch) % (2 * batch),
)

# One row, seen by two owners ------------------------------------------------------------------------------------------


def gradient_input_of_two_owners(m, x, c):
    x = x.clone().requires_grad_()
    return m.a(x) + c * m.b(x).flip(0)


def state_carried_over(m, x, c):
    """A recurrence over the samples. A single row has no batch dimension that shows whose it is."""
    state, states = torch.zeros(D), []
    for row in x:
        state = torch.tanh(m.a(row) + c * state)
        states.append(state)
    return torch.stack(states)


on_data(
    OFF_ON,
    {
        "input_of_two_owners": lambda m, x, c: m.a(x) + c * m.b(x).flip(0),
        "gradient_input_of_two_owners": gradient_input_of_two_owners,
    },
)
on_data(OFF_ON, {"ids_of_two_owners": lambda m, x, c: m.table(x) + c * m.table(x).flip(0)}, ids)
on_hidden(OFF_ON, {"hidden_of_two_owners": lambda m, h, c: m.b(h) + c * m.norm(h).roll(1, 0)})
on_data(
    {0.0: EITHER, 1.0: EITHER},
    {
        "views_of_two_owners": lambda m, x, c: m.a(x[1:]) + c * m.b(x[:-1]),
        "input_mixed_before_the_graph": lambda m, x, c: m.a(x + c * x.flip(0)),
        "state_carried_over": state_carried_over,
    },
)
on_data(
    ANY,
    {
        "two_heads_in_one_order": lambda m, x, c: m.a(x).flip(0) + c * m.b(x).flip(0),
        "rows_under_vmap": lambda m, x, c: torch.vmap(lambda row: (m.a(row) * c + m.b(row)).square().sum())(x),
    },
)

# Rows pooled by a mask or an index: packed documents, or samples that see each other ----------------------------------


def document_mask(batch, setting):
    """Which of the 2 * batch rows each document pools."""
    row = torch.arange(2 * batch)
    owner = row // 2
    if setting == "unequal":
        owner = torch.cat([torch.zeros(3, dtype=torch.long), (row[3:] - 1) // 2])
    mask = owner == torch.arange(batch)[:, None]
    return mask | (row % 2 == 0) if setting == "overlapping" else mask


def by_bias_to_attention(h, mask):
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None]
    return F.scaled_dot_product_attention(torch.ones(1, len(mask), D), h[None], h[None], attn_mask=bias)[0]


POOLED = {
    "by_mul": lambda h, mask: (mask[:, :, None].double() * h).sum(1),
    "by_where": lambda h, mask: torch.where(mask[:, :, None], h, 0.0).sum(1),
    "by_matmul": lambda h, mask: mask.double() @ h,
    "by_max": lambda h, mask: torch.where(mask[:, :, None], h, -1e9).amax(1),
    "by_softmax": lambda h, mask: h[:, 0].expand(len(mask), -1).masked_fill(~mask, float("-inf")).softmax(1) @ h,
    "by_relu": lambda h, mask: F.relu(h + torch.where(mask, 9.0, -99.0)[:, :, None]).mean(1),
    "by_bias_to_attention": by_bias_to_attention,
}


def of_documents(pool):
    return lambda m, h, setting: pool(h, document_mask(len(h) // 2, setting))


def of_samples(pool):
    return lambda m, h, setting: h + m.b(pool(h, links(len(h), setting).bool()))


def documents_by_cumsum(m, h, setting):
    """Differences of running sums: what is between them cancels, up to rounding."""
    ends = document_mask(len(h) // 2, setting).sum(1).cumsum(0) - 1
    sums = h.cumsum(0)[ends]
    return sums - F.pad(sums, (0, 0, 1, 0))[:-1]


def document_ids(h, setting):
    return document_mask(len(h) // 2, setting).double().argmax(0)


def documents_by_scatter_reduce(m, h, setting):
    place = document_ids(h, setting)[:, None].expand(-1, D)
    return torch.zeros(len(h) // 2, D).scatter_reduce(0, place, h, "amax", include_self=False)


def documents_by_embedding_bag(m, h, setting):
    """The hidden rows are the table."""
    lengths = document_mask(len(h) // 2, setting).sum(1)
    return F.embedding_bag(torch.arange(len(h)), h, lengths.cumsum(0) - lengths, mode="sum")


# Nothing in the graph tells packed rows that several documents pool from rows of a constant table.
PACKED = {"equal": EITHER, "unequal": EITHER, "overlapping": EITHER}
on_hidden(PACKED, {f"documents_{name}": of_documents(pool) for name, pool in POOLED.items()}, packed_rows)
on_hidden({**LINKS, "one other": COUPLED}, {f"samples_{name}": of_samples(pool) for name, pool in POOLED.items()})
on_hidden({"equal": EITHER, "unequal": EITHER}, {"documents_by_cumsum": documents_by_cumsum}, packed_rows)
on_hidden(
    {"equal": FREE, "unequal": FREE},
    {
        "documents_by_index_add": lambda m, h, s: torch.zeros(len(h) // 2, D).index_add(0, document_ids(h, s), h),
        "documents_by_scatter_reduce": documents_by_scatter_reduce,
        "documents_by_embedding_bag": documents_by_embedding_bag,
    },
    packed_rows,
)

# In place, and views that overlap -------------------------------------------------------------------------------------


def row_added_in_place(m, h, c):
    h = h + 0.0
    h[0] += c * h[1].clone()
    return m.b(h)


def rows_scaled_in_place(m, x, c):
    h = m.a(x)
    h[::2].mul_(c)
    return m.b(h)


def filled_in_place(m, x, setting):
    mask = {"some": x > 0, "none": x > 99, "all": x < 99}[setting]
    return m.b(m.a(x).masked_fill_(mask, 0.5).relu_())


def row_overwritten_in_place(m, h, setting):
    h = h + 0.0
    h[int(setting == "moved")] = h[2].clone()
    return h


def windows_by_as_strided(m, h, c):
    return F.pad(c * h, (0, 0, 0, 1)).contiguous().as_strided((len(h), 2, D), (D, D, 1))


def pairs_by_as_strided(m, h, c):
    return h.contiguous().as_strided((len(h) // 2, 2, D), (2 * D, D, 1)) * torch.tensor([[1.0], [c]])


on_hidden(OFF_ON, {"row_added_in_place": row_added_in_place})
on_data(ANY, {"rows_scaled_in_place": rows_scaled_in_place})
on_data({"some": FREE, "none": FREE, "all": FREE}, {"filled_in_place": filled_in_place})
on_hidden({"own": COUPLED, "moved": COUPLED}, {"row_overwritten_in_place": row_overwritten_in_place})
on_hidden(BOTH, {"windows_by_as_strided": windows_by_as_strided})
on_hidden(ANY, {"pairs_by_as_strided": pairs_by_as_strided}, packed_rows)

# Layouts --------------------------------------------------------------------------------------------------------------


def folded_under_a_mask(m, h, setting):
    n = len(h)
    keep = {"all": torch.ones(n * n), "some": torch.arange(n * n) % 3 > 0, "none": torch.zeros(n * n)}[setting]
    return m.b(F.relu(h.reshape(n * n, D)) * keep[:, None]).view(n, n, D)


def recurrent_over_steps_or_samples(m, h, setting):
    return m.lstm(h)[0] if setting == "samples first" else m.lstm(h.transpose(0, 1))[0].transpose(0, 1)


def losses_of_tokens(m, h, c):
    mask = torch.ones(len(h), len(h))
    mask[:, 1] = c
    return m.b(h).square().sum(2) * mask


def next_token(m, x, setting):
    keep = torch.ones(T - 1) if setting == "next" else torch.tensor([1.0, 0.0])
    logits = F.linear(torch.tanh(m.a(m.table(x))), m.table.weight)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none") * keep


def packed_sequences(m, h, setting):
    n = len(h)
    lengths = [n - 1] * n if setting == "equal" else [n] + [n - 1] * (n - 2) + [n - 2]
    packed = nn.utils.rnn.pack_padded_sequence(h.transpose(0, 1), lengths)
    return nn.utils.rnn.pad_packed_sequence(m.lstm(packed)[0], total_length=n)[0].transpose(0, 1)


def samples_folded_into_channels(m, h, c):
    """One grouped convolution with the weight repeated for each sample."""
    n = len(h)
    folded = (h * torch.tensor([[1.0], [c], [1.0]])).transpose(1, 2).reshape(1, n * D, T)
    return F.conv1d(folded, m.conv.weight.repeat(n, 1, 1), padding=1, groups=n).view(n, D, T)


on_hidden({"all": FREE, "some": FREE, "none": FREE}, {"folded_under_a_mask": folded_under_a_mask}, square)
on_data(
    {1: FREE, 0: FREE},
    {"samples_in_either_dimension": lambda m, x, d: torch.tanh(m.a(x if d else x.transpose(0, 1))).sum(d)},
    square,
)
on_hidden(
    {"steps first": FREE, "samples first": COUPLED},
    {"recurrent_over_steps_or_samples": recurrent_over_steps_or_samples},
    square,
)
on_hidden(ANY, {"losses_of_tokens": losses_of_tokens}, square, tokens=True)
on_hidden(
    OFF_ON,
    {"losses_of_tokens_swapped": lambda m, h, c: h.square().sum(2) + c * h.square().sum(2).T},
    square,
    tokens=True,
)
on_data({"next": FREE, "padded": FREE}, {"next_token": next_token}, ids, tokens=True)
on_hidden({"equal": FREE, "unequal": FREE}, {"packed_sequences": packed_sequences}, square)
on_hidden({1.0: FREE, 0.0: FREE}, {"samples_folded_into_channels": samples_folded_into_channels}, steps)

# Groups of samples ----------------------------------------------------------------------------------------------------


def pairs(batch, setting):
    order = torch.arange(batch)
    return order // 2 if setting == "together" else order % (batch // 2)


def pairs_mixed(m, h, setting):
    h = h.view(-1, 2, D)
    return (h + h.flip(1)).reshape(-1, D)


on_hidden({"together": FREE, "apart": COUPLED}, {"pairs_mixed": pairs_mixed}, groups=pairs)
on_hidden({"together": FREE, "apart": FREE}, {"groups_of_samples_apart": lambda m, h, _: m.b(F.relu(h))}, groups=pairs)
on_hidden(ANY, {"all_in_one_group": lambda m, h, c: h + c * h.mean(0)}, groups=lambda batch, _: torch.zeros(batch))

# Weights and constants ------------------------------------------------------------------------------------------------


def constants(rows):
    return torch.linspace(-1, 1, rows * D).sin().view(rows, D)


def weight_made_from_the_batch(m, x, c):
    return F.linear(x, m.b.weight + c * torch.outer(m.a(x).mean(0), torch.ones(D)))


def weight_made_for_each_sample(m, x, c):
    return torch.bmm(m.b.weight + c * m.a(x)[:, :, None], x[:, :, None])


on_hidden(
    ANY,
    {
        "a_row_for_each_sample": lambda m, h, c: h * m.rows + c * m.rows,
        "class_token_repeated": lambda m, h, c: m.b(torch.stack([m.rows[:1].repeat(len(h), 1), c * h], 1)),
        "scores_of_items": lambda m, h, c: h @ (c * m.b(constants(7))).T,
    },
)
# A table of constants with as many rows as samples cannot be told from their data.
on_hidden(
    {1.0: EITHER, 0.5: EITHER}, {"as_many_features_as_samples": lambda m, h, c: h + c * m.b(constants(len(h)))}, square
)
on_data({0.0: EITHER, 1.0: COUPLED}, {"weight_made_from_the_batch": weight_made_from_the_batch})
on_data(ANY, {"weight_made_for_each_sample": weight_made_for_each_sample})

# What stands around the ops: checkpoints, custom functions, precision -------------------------------------------------


def under_checkpoint(function):
    return lambda m, h, c: checkpoint(lambda h: function(m, h, c), h, use_reentrant=False)


class Mix(torch.autograd.Function):
    """Add rows of other samples; its node has no attribute that shows them."""

    @staticmethod
    def forward(ctx, h, c):
        ctx.c = c
        return h + c * h.flip(0)

    @staticmethod
    def backward(ctx, g):
        return g + ctx.c * g.flip(0), None


def kept_gradient(m, h, c):
    h = c * h
    h.retain_grad()
    return m.b(h)


def mixup_under_autocast(m, x, lam):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(F.relu(m.a(x)))
        mixed = lam * h + (1 - lam) * h.flip(0)
    return mixed.float()


on_hidden(OFF_ON, {"checkpointed_gate": under_checkpoint(lambda m, h, c: h + c * m.b(h).mean(0))})
on_hidden(PICKED, {"checkpointed_index": under_checkpoint(lambda m, h, s: m.b(h)[picked(len(h), s)])})
on_hidden(ANY, {"checkpointed_scale": under_checkpoint(lambda m, h, c: m.norm(m.b(c * h)))})
on_hidden(OFF_ON, {"mixed_by_a_function": lambda m, h, c: m.b(Mix.apply(h, c))}, opaque=True)
on_hidden({1.0: FREE, 2.0: FREE}, {"kept_gradient": kept_gradient})
on_data({1.0: EITHER, 0.7: COUPLED}, {"mixup_under_autocast": mixup_under_autocast}, autocast=True)
