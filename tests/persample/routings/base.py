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
from torch import nn

from ..cases import flat_sum

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


def packed_rows(batch):
    """Two rows of data for each sample, packed."""
    return torch.randn(2 * batch, D)


def ids(batch):
    return torch.randint(7, (batch, T))


ROUTINGS: dict[str, Routing] = {}


def add(name, routing):
    assert name not in ROUTINGS
    ROUTINGS[name] = routing


def routing(verdicts, data=vectors, **options):
    def added(function):
        add(function.__name__, Routing(function, verdicts, data, **options))
        return function

    return added


OFF_ON = {0.0: EITHER, 0.7: COUPLED, 1.0: COUPLED}
ANY = {1.0: FREE, 0.0: FREE, 0.4: FREE}


# Masks and indices that several themes share ----------------------------------------------------------------------------


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


LINKS = {"self": EITHER, "one other": EITHER, "ring": COUPLED, "all": COUPLED}


def links(batch, setting):
    own = torch.eye(batch)
    return {"self": own, "one other": own.roll(1, 0), "ring": own + own.roll(1, 0), "all": torch.ones_like(own)}[
        setting
    ]


PICKED = {"in order": FREE, "shuffled": FREE, "twice": COUPLED}


def picked(batch, setting):
    order = torch.arange(batch)
    return {"in order": order, "shuffled": order.roll(1).flip(0), "twice": order // 2 * 2}[setting]
