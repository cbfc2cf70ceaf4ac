"""Rows moved within the batch, and rows that two owners see."""

import torch
import torch.nn.functional as F
from torch import nn

from ..cases import flat_sum
from .base import (
    ANY,
    COUPLED,
    EITHER,
    FREE,
    LINKS,
    OFF_ON,
    PICKED,
    D,
    T,
    ids,
    links,
    packed_rows,
    picked,
    routing,
    square,
    steps,
)

# Rows moved within the batch ------------------------------------------------------------------------------------------


@routing(PICKED)
def rows_by_index(m, x, setting):
    return flat_sum(m.b(torch.tanh(m.a(x))[picked(len(x), setting)]))


@routing(PICKED)
def rows_by_gather(m, x, setting):
    return flat_sum(torch.tanh(m.a(x)).gather(0, picked(len(x), setting)[:, None].expand(-1, D)))


@routing({"in order": FREE, "shuffled": FREE})
def rows_by_scatter(m, x, setting):
    place = picked(len(x), setting)[:, None].expand(-1, D)
    return flat_sum(torch.zeros(len(x), D).scatter(0, place, torch.tanh(m.a(x))))


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


@routing({1.0: FREE, 0.0: FREE})
def all_rows_flipped(m, x, c):
    return flat_sum(c * torch.tanh(m.a(x)).flip(0))


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


@routing({0: FREE, 1: FREE}, packed_rows, groups=lambda batch, setting: torch.arange(4 * batch) % (2 * batch))
def rows_repeated_within_groups(m, x, setting):
    return flat_sum(m.b(torch.tanh(m.a(x)).repeat(2, 1)))


@routing({1.0: COUPLED, 2.0: COUPLED})
def pooled_over_the_batch(m, x, c):
    return flat_sum(F.avg_pool1d((c * m.a(x)).T[None], 3, 1, 1)[0].T)


# One row, seen by two owners ------------------------------------------------------------------------------------------


@routing(OFF_ON)
def input_of_two_owners(m, x, c):
    return flat_sum(m.a(x) + c * m.b(x).flip(0))


@routing(OFF_ON, ids)
def ids_of_two_owners(m, x, c):
    return flat_sum(m.table(x) + c * m.table(x).flip(0))


@routing(OFF_ON)
def hidden_of_two_owners(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(m.b(h) + c * m.norm(h).roll(1, 0))


@routing(OFF_ON)
def gradient_input_of_two_owners(m, x, c):
    x = x.clone().requires_grad_()
    return flat_sum(m.a(x) + c * m.b(x).flip(0))


@routing({0.0: EITHER, 1.0: EITHER})
def views_of_two_owners(m, x, c):
    """Two views of one storage."""
    return flat_sum(m.a(x[1:]) + c * m.b(x[:-1]))


@routing({0.0: EITHER, 1.0: EITHER})
def input_mixed_before_the_graph(m, x, c):
    return flat_sum(m.a(x + c * x.flip(0)))


@routing(ANY)
def two_heads_in_one_order(m, x, c):
    return flat_sum(m.a(x).flip(0) + c * m.b(x).flip(0))


# The hidden rows as a table, and other ways to take them ----------------------------------------------------------------


@routing({"in order": FREE, "shuffled": FREE})
def losses_by_list(m, x, setting):
    return torch.stack([flat_sum(m.a(x[i : i + 1]))[0] for i in picked(len(x), setting)])


@routing({0.0: EITHER, 0.7: EITHER})
def state_carried_over(m, x, c):
    """A recurrence over the samples. A single row has no batch dimension that shows whose it is."""
    state, states = torch.zeros(D), []
    for row in x:
        state = torch.tanh(m.a(row) + c * state)
        states.append(state)
    return flat_sum(torch.stack(states))


@routing({0: COUPLED, 1: FREE}, one_form=False)
def less_the_largest(m, x, dim):
    h = m.a(x)
    return flat_sum(h - 0.5 * h.amax(dim, keepdim=True))


@routing(LINKS)
def distances_under_a_mask(m, x, setting):
    h = torch.tanh(m.a(x))
    return flat_sum(h) + (torch.cdist(h, m.b(x)) * links(len(x), setting)).sum(1)


@routing({"equal": FREE, "unequal": FREE}, square, one_form=False)
def packed_sequences(m, x, setting):
    n = len(x)
    lengths = [n - 1] * n if setting == "equal" else [n] + [n - 1] * (n - 2) + [n - 2]
    packed = nn.utils.rnn.pack_padded_sequence(m.a(x).transpose(0, 1), lengths)
    out = nn.utils.rnn.pad_packed_sequence(m.lstm(packed)[0], total_length=n)[0]
    return flat_sum(out.transpose(0, 1))


@routing(ANY)
def rows_under_vmap(m, x, c):
    return torch.vmap(lambda row: (m.a(row) * c + m.b(row)).square().sum())(x)


@routing({1.0: FREE, 0.0: FREE}, steps)
def samples_folded_into_channels(m, x, c):
    """One grouped convolution with the weight repeated for each sample."""
    n = len(x)
    h = (m.a(x) * torch.tensor([[1.0], [c], [1.0]])).transpose(1, 2).reshape(1, n * D, T)
    return flat_sum(F.conv1d(h, m.conv.weight.repeat(n, 1, 1), padding=1, groups=n).view(n, D, T))
