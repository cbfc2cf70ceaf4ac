"""Every awkward model against the loop over samples, in float64."""

import pytest
import torch

import gradrein

from .cases import CASES
from .oracle import flat, loop

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.")


def parameters_of(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name):
    model, losses = CASES[name]()
    for _ in range(2):  # the second time the owners may be known
        out = losses()
        expected = loop(out, parameters_of(model))
        ps = gradrein.per_sample(out, model)
        found = ps.grads()
        assert list(found) == list(expected)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_every_answer(name):
    model, losses = CASES[name]()
    out = losses()
    expected = flat(loop(out, parameters_of(model)))
    ps = gradrein.per_sample(out, model, memory_budget=0)
    norms = expected.norm(dim=1)
    torch.testing.assert_close(ps.norms(), norms)
    torch.testing.assert_close(ps.gram(), expected @ expected.T)
    mean = expected.mean(0)
    torch.testing.assert_close(ps.dot(), expected @ mean)
    torch.testing.assert_close(ps.cosine(), expected @ mean / (norms * mean.norm()).clamp(min=1e-300))
    for budget in (0, 1 << 30):
        model.zero_grad()
        limit = float(norms.median()) or 1.0
        returned = gradrein.per_sample(out, model, memory_budget=budget).clip_(limit)
        torch.testing.assert_close(returned, norms)
        factors = (limit / norms).clamp(max=1) / len(norms)
        written = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(written, (factors.nan_to_num(0)[:, None] * expected).sum(0))


def test_the_page_of_layers_names_cases_that_there_are():
    pytest.importorskip("expecttest")
    from .sweep import OPS

    assert {case for *_, case in OPS} <= {*CASES, "test_experts"}
