"""`Monitor(norms=...)`: gradient, weight and update of chosen parameters, for trackers."""

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError, ArgumentTypeError


def train(norms, steps=3, clip=None, model=None, dtype=torch.float32):
    model = model or torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    received, expected = [], []
    with gradrein.Monitor(model, optimizer, norms=norms, on_step=received.append):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 3, dtype=dtype)).square().sum().backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            if clip is not None:
                gradrein.clip_grad_norm_(model.parameters(), clip)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
            after = {name: p.detach().clone() for name, p in model.named_parameters()}
            expected.append((gradients, before, after))
    return received, expected


def joined(tensors, names):
    return torch.cat([tensors[name].flatten() for name in names]).double().norm().item()


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("norms", "chosen"),
    [
        ("*", {name: [name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")}),
        ("2.*", {name: [name] for name in ("2.weight", "2.bias")}),
        ({"first": "0.*", "biases": "*.bias"}, {"first": ["0.weight", "0.bias"], "biases": ["0.bias", "2.bias"]}),
    ],
)
def test_numbers_are_those_before_clipping_and_of_the_step(norms, chosen, clip, dtype):
    for latest, (gradients, before, after) in zip(*train(norms, clip=clip, dtype=dtype), strict=True):
        assert {key.partition("/")[2] for key in latest if "/" in key} == set(chosen)
        moves = {name: after[name] - before[name] for name in after}
        for label, names in chosen.items():
            assert latest[f"norm/{label}"] == pytest.approx(joined(gradients, names), rel=1e-5)
            assert latest[f"weight/{label}"] == pytest.approx(joined(after, names), rel=1e-5)
            update = joined(moves, names) / joined(after, names)
            assert latest[f"update/{label}"] == pytest.approx(update, rel=1e-3)


def test_without_them_nothing_is_measured_by_layer():
    received, _ = train(None)
    assert not any("/" in key for latest in received for key in latest)


def test_a_parameter_without_a_gradient_has_none():
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(3, 1))
    model.forward = model[0].forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    received = []
    with gradrein.Monitor(model, optimizer, norms="*.weight", on_step=received.append):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert received[0]["norm/1.weight"] == received[0]["update/1.weight"] == 0
    assert received[0]["weight/1.weight"] > 0 < received[0]["norm/0.weight"]


@pytest.mark.parametrize(
    ("norms", "error", "text"),
    [
        ("layers.*", ArgumentError, "no parameter of the model matches the pattern 'layers.\\*' of `norms`"),
        ({"a": "0.*", "b": "x"}, ArgumentError, "matches the pattern 'x'"),
        (3, ArgumentTypeError, "`norms` is a name pattern"),
        ({}, ArgumentTypeError, "patterns by label"),
        ({"a": 2}, ArgumentTypeError, "found dict"),
    ],
)
def test_what_chooses_nothing_is_refused(norms, error, text):
    with pytest.raises(error, match=text):
        gradrein.Monitor(torch.nn.Sequential(torch.nn.Linear(1, 1)), norms=norms)


def test_layers_that_are_not_trained_are_named_once(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 1).requires_grad_(False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with gradrein.Monitor(model, optimizer, norms={"first": "0.*", "second": "1.*"}):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert capsys.readouterr().err.count("norms=['second'] matches none of the optimizer's parameters: 0.weight") == 1
