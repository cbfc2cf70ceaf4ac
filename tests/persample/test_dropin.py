"""The drop-in for torch's own entry point."""

import pytest
import torch
from torch import nn

import bridle
from bridle import call_for_per_sample_grads, errors

from .oracle import loop


def check(model, call, losses):
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = loop(losses(model), parameters)
    losses(call(model)).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None
        if name in expected:
            torch.testing.assert_close(p.grad_sample, expected[name])
        else:
            assert not hasattr(p, "grad_sample")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_are_not_refused(kind, batch_first):
    model = kind(3, 4, 2, batch_first=batch_first, bidirectional=True)
    x = torch.randn(5, 6, 3)

    def losses(call):
        out = call(x)[0]
        return (out if batch_first else out.transpose(0, 1)).square().flatten(1).sum(1)

    check(model, lambda m: call_for_per_sample_grads(m, batch_first=batch_first), losses)


def test_the_state_of_a_deep_layer_has_its_batch_second_even_when_depth_equals_batch():
    model = nn.GRU(3, 4, 5, batch_first=True)
    x = torch.randn(5, 6, 3)

    def losses(call):
        return call(x)[1].transpose(0, 1).square().flatten(1).sum(1)

    check(model, call_for_per_sample_grads, losses)


def test_a_batch_of_one():
    x = torch.randn(1, 3)
    check(nn.Linear(3, 2), call_for_per_sample_grads, lambda call: call(x).square().sum(1))


def test_frozen_and_unused_parameters_have_neither():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    model["used"].bias.requires_grad_(False)
    x = torch.randn(4, 3)
    check(model, call_for_per_sample_grads, lambda call: call(x).square().sum(1))


def test_mean_undoes_the_division():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    call_for_per_sample_grads(model, batch_size=4, loss_reduction="mean")(x).square().mean().backward()
    expected = loop(model(x).square().mean(1), dict(model.named_parameters()))
    torch.testing.assert_close(model.weight.grad_sample, expected["weight"])


def test_the_gradient_goes_on_into_the_input():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    call_for_per_sample_grads(model)(x * 2).sum().backward()
    torch.testing.assert_close(x.grad, (2 * model.weight.sum(0)).expand(4, 3))


def test_nested_inputs_and_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch, *, extra):
            return {"a": self.layer(batch["x"]), "b": [self.layer(extra)], "c": "text"}

    model = Model()
    x, y = torch.randn(4, 3), torch.randn(4, 3)

    def losses(call):
        out = call({"x": x}, extra=y)
        return out["a"].sum(1) + out["b"][0].square().sum(1)

    check(model, call_for_per_sample_grads, losses)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"module": 3}, "expected an nn.Module, found int"),
        ({"batch_size": 1.0}, "batch_size must be None or an integer, found float"),
        ({"batch_size": 0}, "batch_size must be positive, found 0"),
        ({"loss_reduction": "none"}, "loss_reduction must be 'sum' or 'mean', found 'none'"),
    ],
)
def test_bad_arguments(arguments, text):
    arguments = {"module": nn.Linear(2, 2), **arguments}
    with pytest.raises(RuntimeError, match=text):
        call_for_per_sample_grads(arguments.pop("module"), **arguments)


def test_the_batch_size_must_be_told_apart():
    call = call_for_per_sample_grads(nn.Bilinear(2, 2, 2))
    with pytest.raises(RuntimeError, match=r"sizes \[3, 4\].*Pass batch_size"):
        call(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(errors.CallArgumentError, match="no tensor that has one"):
        call_for_per_sample_grads(nn.Linear(2, 2))(3)


def test_a_leftover_grad_sample_is_named():
    model = nn.Linear(2, 2)
    model.bias.grad_sample = torch.ones(1)
    with pytest.raises(RuntimeError, match="`bias` still holds a grad_sample"):
        call_for_per_sample_grads(model)


def test_an_output_without_a_batch_dimension():
    class Total(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    with pytest.raises(RuntimeError, match="no dimension of the batch size 4"):
        call_for_per_sample_grads(Total(2, 3))(torch.ones(4, 2)).backward()


def test_it_is_exported():
    assert bridle.call_for_per_sample_grads is call_for_per_sample_grads
