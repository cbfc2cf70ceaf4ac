"""Attention, graphs, margins and normalisation between samples."""

import torch
import torch.nn.functional as F

from ..cases import flat_sum
from .base import COUPLED, EITHER, FREE, LINKS, D, links, routing, square, steps

# Attention and graphs over the batch ----------------------------------------------------------------------------------


@routing(LINKS)
def adjacency_by_matmul(m, x, setting):
    return flat_sum(m.b(torch.tanh(links(len(x), setting) @ m.a(x))))


@routing({"self": EITHER, "one other": EITHER})
def adjacency_sparse(m, x, setting):
    link = links(len(x), setting).to_sparse()
    return flat_sum(torch.sparse.mm(link, m.a(x)))


@routing(LINKS)
def attention_under_a_bool_mask(m, x, setting):
    h = torch.tanh(m.a(x))[None]
    return flat_sum(F.scaled_dot_product_attention(h, h, h, attn_mask=links(len(x), setting).bool())[0])


@routing(LINKS, steps)
def attention_with_the_batch_first_by_mistake(m, x, setting):
    """`nn.MultiheadAttention` takes the steps first: here it attends over the samples."""
    h = m.a(x)
    return flat_sum(m.attention(h, h, h, attn_mask=links(len(x), setting) == 0, need_weights=False)[0])


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


# Margins and rankings -------------------------------------------------------------------------------------------------


MARGIN = {-99.0: EITHER, 99.0: COUPLED}


@routing(MARGIN)
def triplet(m, x, margin):
    h = m.a(x)
    return F.relu((h - h.roll(1, 0)).square().sum(1) - (h - h.roll(2, 0)).square().sum(1) + margin)


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


@routing({"self": EITHER, "all": COUPLED})
def contrastive_with_masked_negatives(m, x, setting):
    h = F.normalize(m.a(x), dim=1)
    logits = (h @ F.normalize(m.b(x), dim=1).T).masked_fill(links(len(x), setting) == 0, float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(x)), reduction="none") + logits.diagonal()


@routing({1.0: FREE, -1.0: FREE})
def hardest_samples(m, x, sign):
    return (sign * flat_sum(m.a(x))).topk(len(x) // 2).values


# Normalisation --------------------------------------------------------------------------------------------------------


@routing({"eval": FREE, "train": COUPLED}, one_form=False)
def batch_norm(m, x, setting):
    m.batch_norm.train(setting == "train")
    return flat_sum(m.b(m.batch_norm(m.a(x))))


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
