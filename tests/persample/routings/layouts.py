"""In place, overlapping views, layouts, groups of samples, weights."""

import torch
import torch.nn.functional as F

from ..cases import flat_sum
from .base import ANY, COUPLED, EITHER, FREE, OFF_ON, D, T, ids, packed_rows, picked, routing, square

# In place -------------------------------------------------------------------------------------------------------------


@routing(OFF_ON)
def row_added_in_place(m, x, c):
    h = torch.tanh(m.a(x)) + 0.0
    h[0] += c * h[1].clone()
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


@routing(ANY, packed_rows)
def pairs_by_as_strided(m, x, c):
    h = torch.tanh(m.a(x)).contiguous()
    return flat_sum(h.as_strided((len(x) // 2, 2, D), (2 * D, D, 1)) * torch.tensor([[1.0], [c]]))


# Layouts --------------------------------------------------------------------------------------------------------------


@routing({"all": FREE, "some": FREE, "none": FREE}, square)
def folded_under_a_mask(m, x, setting):
    n = len(x)
    keep = {"all": torch.ones(n * n), "some": torch.arange(n * n) % 3 > 0, "none": torch.zeros(n * n)}[setting]
    h = F.relu(m.a(x.reshape(n * n, D))) * keep[:, None]
    return flat_sum(m.b(h).view(n, n, D))


@routing({1: FREE, 0: FREE}, square, one_form=False)
def samples_in_either_dimension(m, x, dim):
    return flat_sum(torch.tanh(m.a(x if dim else x.transpose(0, 1))).sum(dim))


@routing(OFF_ON, square)
def folded_and_rolled(m, x, c):
    """A shift of the folded rows by one takes the last step of the sample before."""
    n = len(x)
    h = torch.tanh(m.a(x.reshape(n * n, D)))
    return flat_sum(m.b(h + c * h.roll(1, 0)).view(n, n, D))


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


@routing({0.0: FREE, 0.7: FREE, 1.0: FREE}, groups=lambda batch, setting: torch.zeros(batch))
def all_in_one_group(m, x, c):
    h = torch.tanh(m.a(x))
    return flat_sum(h + c * h.mean(0))


# Weights and constants ------------------------------------------------------------------------------------------------


@routing(ANY)
def a_row_for_each_sample(m, x, c):
    """A parameter with as many rows as there are samples."""
    return flat_sum(m.a(x) * m.rows + c * m.rows)


@routing(ANY)
def class_token_repeated(m, x, c):
    token = m.rows[:1].repeat(len(x), 1)
    return flat_sum(m.b(torch.stack([token, c * m.a(x)], 1)))


def constants(rows):
    return torch.linspace(-1, 1, rows * D).sin().view(rows, D)


@routing({1.0: EITHER, 0.5: EITHER}, square)
def as_many_features_as_samples(m, x, c):
    """A table of constants with as many rows as samples cannot be told from their data."""
    return flat_sum(torch.tanh(m.a(x)) + c * m.b(constants(len(x))))


@routing(ANY)
def scores_of_items(m, x, c):
    return flat_sum(m.a(x) @ (c * m.b(constants(7))).T)


@routing({"apart": FREE, "shared": FREE})
def items_by_index(m, x, setting):
    choice = torch.arange(len(x)) if setting == "apart" else torch.zeros(len(x), dtype=torch.long)
    return flat_sum(m.a(x) * m.b(constants(11))[choice])


@routing({0.0: EITHER, 1.0: COUPLED})
def weight_made_from_the_batch(m, x, c):
    weight = m.b.weight + c * torch.outer(m.a(x).mean(0), torch.ones(D))
    return flat_sum(F.linear(x, weight))


@routing(ANY)
def weight_made_for_each_sample(m, x, c):
    weight = m.b.weight + c * m.a(x)[:, :, None]
    return flat_sum(torch.bmm(weight, x[:, :, None]))
