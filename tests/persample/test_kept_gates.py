"""Gates that the fused LSTM layer keeps are read where they are known to lie, and computed again elsewhere."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein._torch import rnn as kept
from gradrein.persample.rules import rnn

from .oracle import flat, loop

SIZES = [(3, 4, 5, 4), (10, 20, 6, 7), (100, 300, 4, 5), (7, 64, 1, 2), (1, 1, 3, 3), (6, 256, 2, 3)]
KINDS = [{}, {"bias": False}, {"bidirectional": True}, {"num_layers": 2}]


def losses_of(layer, x):
    return layer(x)[0].square().sum((1, 2))


def case(sizes=SIZES[0], kind=None):
    d, width, steps, samples = sizes
    layer = nn.LSTM(d, width, batch_first=True, **(kind or {})).float()
    return layer, torch.randn(samples, steps, d, dtype=torch.float32)


@pytest.fixture
def seen(monkeypatch):
    """Collect for each layer the gates that were found, and those computed from its data."""
    found = []

    def noted(block, given, *rest):
        found.append((rnn_steps(block, given, *rest), rnn._gates(*given)))
        return found[-1][0]

    rnn_steps = rnn._kept_steps
    monkeypatch.setattr(rnn, "_kept_steps", noted)
    return found


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_are_the_gates(seen, sizes, kind):
    layer, x = case(sizes, kind)
    gradrein.per_sample(losses_of(layer, x), layer)
    assert len(seen) == (1 + ("bidirectional" in kind)) * kind.get("num_layers", 1)
    for steps, gates in seen:
        if steps is not None:  # where they lie is oneDNN's affair
            torch.testing.assert_close(steps.gates, gates, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain_graph", [True, False])
def test_answers_are_those_of_gates_computed_again(monkeypatch, kind, retain_graph):
    layer, x = case(kind=kind)
    found = flat(gradrein.per_sample(losses_of(layer, x), layer, retain_graph=retain_graph).grads())
    monkeypatch.setattr(rnn, "kept_gates", lambda *_: None)
    again = flat(gradrein.per_sample(losses_of(layer, x), layer, retain_graph=retain_graph).grads())
    torch.testing.assert_close(found, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [lambda g: g + 0.01, lambda g: g.flip(0), lambda g: g * torch.nan])
def test_gates_that_do_not_give_the_outputs_are_not_used(monkeypatch, wrong):
    layer, x = case()
    read = kept.kept_gates
    changed = []

    def spoiled(*given):
        found = read(*given)
        changed.append(None if found is None else wrong(found))
        return changed[-1]

    monkeypatch.setattr(rnn, "kept_gates", spoiled)
    losses = losses_of(layer, x)
    expected = loop(losses, dict(layer.named_parameters()))
    torch.testing.assert_close(flat(gradrein.per_sample(losses, layer).grads()), flat(expected), rtol=1e-4, atol=1e-4)
    assert len(changed) == 1


def test_a_block_laid_out_otherwise_is_not_read(monkeypatch):
    layer, x = case()
    node = layer(x)[0].grad_fn
    while "Mkldnn" not in node.name():
        node = node.next_functions[0][0]
    names = "input", "weight0", "weight1", "weight2", "weight3"
    shapes = tuple(getattr(node, f"_saved_{name}").shape for name in names)
    settings = tuple(getattr(node, f"_saved_{name}") for name in kept.SETTINGS)
    block = node._saved_result3
    wrong_gates = lambda *given: rnn._gates(*given).flip(2)  # noqa: E731
    assert kept.kept_gates(block, shapes, settings, wrong_gates) is None
    assert kept.kept_gates(block[:-4096], shapes, settings, rnn._gates) is None
    assert kept.kept_gates(block.repeat_interleave(2)[::2], shapes, settings, rnn._gates) is None
    assert kept.kept_gates(block.float(), shapes, settings, rnn._gates) is None


def test_a_large_block_is_not_read(seen, monkeypatch):
    monkeypatch.setattr(kept, "_LARGEST_BLOCK", 1)
    layer, x = case()
    losses = losses_of(layer, x)
    expected = loop(losses, dict(layer.named_parameters()))
    torch.testing.assert_close(flat(gradrein.per_sample(losses, layer).grads()), flat(expected), rtol=1e-4, atol=1e-4)
    assert seen[0][0] is None


def test_finding_them_draws_nothing_and_leaves_no_gradient():
    layer, x = case((5, 9, 3, 2))
    losses = losses_of(layer, x)
    state = torch.get_rng_state()
    gradrein.per_sample(losses, layer).norms()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in layer.parameters())


def test_a_sample_that_is_not_finite_spoils_no_other():
    layer, x = case()
    x[1] = torch.inf
    norms = gradrein.per_sample(losses_of(layer, x), layer).norms()
    expected = gradrein.per_sample(losses_of(layer, x[[0, 2, 3]]), layer).norms()
    torch.testing.assert_close(norms[[0, 2, 3]], expected)
    assert not norms[1].isfinite()
