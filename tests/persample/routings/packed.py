"""Rows pooled by a mask or an index: packed documents, or samples that see each other."""

import torch
import torch.nn.functional as F

from ..cases import flat_sum
from .base import (
    COUPLED,
    EITHER,
    FREE,
    LINKS,
    PACKED,
    D,
    Routing,
    add,
    document_mask,
    links,
    packed_rows,
    routing,
    vectors,
)

# By a mask (samples, rows) --------------------------------------------------------------------------------------------


def pooled(function):
    """Add the routing twice: over rows of packed documents, and over the samples themselves."""

    def documents(m, x, setting):
        mask = document_mask(len(x) // 2, setting)
        return flat_sum(function(m.a(x), mask) / mask.sum(1, keepdim=True))

    def samples(m, x, setting):
        h = torch.tanh(m.a(x))
        return flat_sum(h + m.b(function(h, links(len(x), setting).bool())))

    add(f"documents_{function.__name__}", Routing(documents, PACKED, packed_rows))
    add(f"samples_{function.__name__}", Routing(samples, {**LINKS, "one other": COUPLED}, vectors))
    return function


@pooled
def by_mul(h, mask):
    return (mask[:, :, None].double() * h).sum(1)


@pooled
def by_where(h, mask):
    return torch.where(mask[:, :, None], h, 0.0).sum(1)


@pooled
def by_matmul(h, mask):
    return mask.double() @ h


@pooled
def by_max(h, mask):
    return torch.where(mask[:, :, None], h, -1e9).amax(1)


@pooled
def by_softmax(h, mask):
    return h[:, 0].expand(len(mask), -1).masked_fill(~mask, float("-inf")).softmax(1) @ h


@pooled
def by_relu(h, mask):
    return F.relu(h + torch.where(mask, 9.0, -99.0)[:, :, None]).mean(1)


@pooled
def by_bias_to_attention(h, mask):
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    query = torch.ones(len(mask), D)
    return F.scaled_dot_product_attention(query[None], h[None], h[None], attn_mask=bias[None])[0]


@routing({"equal": EITHER, "unequal": EITHER}, packed_rows)
def documents_by_cumsum(m, x, setting):
    """Differences of running sums: what is between them cancels, up to rounding."""
    mask = document_mask(len(x) // 2, setting)
    ends = mask.sum(1).cumsum(0) - 1
    sums = m.a(x).cumsum(0)[ends]
    return flat_sum(sums - F.pad(sums, (0, 0, 1, 0))[:-1])


# By an index ----------------------------------------------------------------------------------------------------------


def document_ids(batch, setting):
    return document_mask(batch, setting).double().argmax(0)


DOCUMENTS = {"equal": FREE, "unequal": FREE}


@routing(DOCUMENTS, packed_rows)
def documents_by_index_add(m, x, setting):
    place = document_ids(len(x) // 2, setting)
    return flat_sum(torch.zeros(len(x) // 2, D).index_add(0, place, torch.tanh(m.a(x))))


@routing(DOCUMENTS, packed_rows)
def documents_by_scatter_reduce(m, x, setting):
    place = document_ids(len(x) // 2, setting)[:, None].expand(-1, D)
    return flat_sum(torch.zeros(len(x) // 2, D).scatter_reduce(0, place, m.a(x), "amax", include_self=False))


@routing(DOCUMENTS, packed_rows)
def documents_by_embedding_bag(m, x, setting):
    """The hidden rows are the table."""
    lengths = document_mask(len(x) // 2, setting).sum(1)
    offsets = lengths.cumsum(0) - lengths
    return flat_sum(F.embedding_bag(torch.arange(len(x)), torch.tanh(m.a(x)), offsets, mode="sum"))
