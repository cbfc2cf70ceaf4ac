"""Per-sample gradients on a device: few launches, and no wait for a value but the one of `clip_`."""

import pytest
import torch
from calls import BATCH, MODELS, clipped_step, losses_of, made
from simulated import DEVICE, KIND

import gradrein

# Forward, per_sample and clip_ together; a plain step takes 22, 43, 81, 78 and 17.
LIMITS = {"MLP": 45, "CNN": 75, "GPT": 200, "GPT with RMS norm": 200, "LSTM": 70}
modelled = pytest.mark.parametrize(
    "name", [n for n in MODELS if n != "LSTM" or KIND == "cuda"]
)  # others have no such op


@modelled
def test_launches_of_a_clipped_step(name, counted):
    model, x, y = made(name)
    clipped_step(model, x, y)  # finds the owners
    model.zero_grad()
    with counted() as counts:
        clipped_step(model, x, y)
    assert counts.launches.total() <= LIMITS[name], counts.launches
    assert counts.reads.total() == 1, counts.reads  # whether all norms are finite


@modelled
@pytest.mark.parametrize("again", [False, True])
def test_nothing_else_waits_for_the_device(name, again, no_host_reads):
    model, x, y = made(name)
    weights = torch.rand(BATCH, device=DEVICE)
    if again:
        clipped_step(model, x, y)
    losses = losses_of(model, x, y)
    with no_host_reads():
        ps = gradrein.per_sample(losses, model)
        ps.norms(), ps.norms(per_parameter=True), ps.grads()
        ps.weighted_(weights)
        ps.weighted_(lambda norms: 1 / (1 + norms))


def test_large_gradients_are_streamed_and_not_read(no_host_reads):
    """Rows that cancel would spoil a Gram matrix, and to see that is to wait."""
    with DEVICE:
        model, x = torch.nn.Linear(64, 64), torch.randn(BATCH, 3, 64)
    losses = (model(x) * torch.tensor([[1.0], [-1.0], [0.0]]).to(DEVICE)).sum((1, 2))
    with no_host_reads():
        ps = gradrein.per_sample(losses, model, memory_budget=0)
        assert "gram" not in ps.plan()
        norms = ps.norms()
    expected = gradrein.per_sample(losses, model).grads()["weight"].flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, expected)
