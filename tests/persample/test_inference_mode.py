"""In `torch.inference_mode` answers are those of outside; the call itself is refused."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import NoGraphError

ANSWERS = {
    **{name: getattr(gradrein.persample.PerSample, name) for name in ("norms", "grads", "gram", "dot", "cosine")},
    "stats": lambda ps: vars(ps.stats()),
    "audit": lambda ps: ps.audit().parameters,
    "stream": lambda ps: [block for _, _, block in ps.stream(samples=2)],
    "clip_": lambda ps: ps.clip_(1.0),
    "weighted_": lambda ps: ps.weighted_(torch.arange(4.0)),
}


def asked(model):
    return gradrein.per_sample(model(torch.arange(12.0).reshape(4, 3)).square().sum(1), model)


def test_the_call_is_refused():
    model = nn.Linear(3, 2)
    losses = model(torch.ones(4, 3)).sum(1)
    with torch.inference_mode(), pytest.raises(NoGraphError, match="inference_mode"):
        gradrein.per_sample(losses, model)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_answers(answer):
    model, found = nn.Linear(3, 2), []
    for inside in (False, True):
        model.zero_grad()
        ps = asked(model)
        with torch.inference_mode(inside):
            found.append((answer(ps), model.weight.grad))
        assert model.weight.grad is None or not model.weight.grad.is_inference()
    assert (found[0][0] is None) == (found[1][0] is None)
    if found[0][0] is not None:
        torch.testing.assert_close(found[1][0], found[0][0])
    if found[0][1] is not None:
        assert torch.equal(found[1][1], found[0][1])
