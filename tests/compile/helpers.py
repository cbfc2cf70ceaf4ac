"""A step, its eager twin, and everything that both may change."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

import gradrein

B, D, C = 4, 5, 3


def batch(*shape, classes=C):
    return torch.randn(*(shape or (B, D))), torch.randint(classes, (shape[0] if shape else B,))


def mlp(*, width=6, activation=nn.Tanh):
    return nn.Sequential(nn.Linear(D, width), activation(), nn.Linear(width, C))


def losses_of(model, x, y):
    out = model(x)
    if out.dim() == 3:
        return F.cross_entropy(out.transpose(1, 2), y, reduction="none").mean(1)
    return F.cross_entropy(out, y, reduction="none")


def clipped(model):
    def step(x, y):
        return gradrein.per_sample(losses_of(model, x, y), model).clip_(0.5)

    return step


class Twins:
    """A compiled step on a model, and the plain step on a copy of it."""

    def __init__(self, model, make=clipped, backend="captured"):
        self.model, self.other = model, copy.deepcopy(model)
        self.step = gradrein.compile(make(model), model, backend=backend)
        self.plain = make(self.other)

    def run(self, *args, exact=True, **kwargs):
        """Run both from the same state and compare results, gradients, buffers and generators."""
        state, drawn = torch.get_rng_state(), random.getstate()
        expected = self.plain(*args, **kwargs)
        after = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(state)
        random.setstate(drawn)
        found = self.step(*args, **kwargs)
        assert random.getstate() == after[1]
        assert torch.equal(torch.get_rng_state(), after[0])
        compare(found, expected, exact)
        compare(state_of(self.model), state_of(self.other), exact)
        return found

    @property
    def ran(self):
        """How the last call was run."""
        entry = self.step._last.entry
        return "eager" if entry is None or entry.ran is None else entry.ran

    def captured(self, *args, **kwargs):
        """Run, and see that the captured graph was used."""
        found = self.run(*args, **kwargs)
        assert self.ran == "captured", self.step.explain()
        return found

    def eager(self, *args, **kwargs):
        """Run, and see that the eager step was used."""
        self.step._last.entry = None
        found = self.run(*args, **kwargs)
        assert self.ran == "eager", self.step.explain()
        return found


def state_of(model):
    grads = {name: p.grad for name, p in model.named_parameters()}
    return grads, dict(model.named_buffers())


def compare(found, expected, exact):
    if isinstance(expected, torch.Tensor):
        assert found.requires_grad == expected.requires_grad
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(found.detach(), expected.detach(), equal_nan=True, **tolerance)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            compare(found[name], expected[name], exact)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other, exact)
    else:
        assert found == expected
