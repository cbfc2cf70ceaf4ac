"""In `torch.inference_mode` answers are those of outside; the call itself is refused."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import NoGraphError

ANSWERS = ["norms", "grads", "stats", "gram", "dot", "cosine", "audit"]


def losses_of(model):
    return model(torch.arange(12.0).reshape(4, 3)).square().sum(1)


def test_the_call_is_refused():
    model = nn.Linear(3, 2)
    losses = losses_of(model)
    with torch.inference_mode(), pytest.raises(NoGraphError, match="inference_mode"):
        gradrein.per_sample(losses, model)


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_that_read(answer):
    model = nn.Linear(3, 2)
    expected = getattr(gradrein.per_sample(losses_of(model), model), answer)()
    ps = gradrein.per_sample(losses_of(model), model)
    with torch.inference_mode():
        found = getattr(ps, answer)()
    if answer in ("stats", "audit"):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def test_gradients_in_blocks():
    model = nn.Linear(3, 2)
    ps = gradrein.per_sample(losses_of(model), model)
    with torch.inference_mode():
        found = list(ps.stream(samples=2))
    for name, part, block in found:
        torch.testing.assert_close(block, ps.grads()[name][part])


@pytest.mark.parametrize("answer", ["clip_", "weighted_"])
def test_answers_that_write(answer):
    model = nn.Linear(3, 2)
    argument = {"clip_": 1.0, "weighted_": torch.arange(4.0)}[answer]
    getattr(gradrein.per_sample(losses_of(model), model), answer)(argument)
    expected = model.weight.grad
    model.zero_grad()
    ps = gradrein.per_sample(losses_of(model), model)
    with torch.inference_mode():
        getattr(ps, answer)(argument)
    assert torch.equal(model.weight.grad, expected)
    assert not model.weight.grad.is_inference()
