"""The drop-in for torch's own entry point."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradrein import call_for_per_sample_grads, errors

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


class Nested(nn.Linear):
    def forward(self, batch, *, extra):
        return {"a": super().forward(batch["x"]), "b": [super().forward(extra)], "c": "text"}


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Transposed(nn.Linear):
    def forward(self, x):
        return super().forward(x).transpose(0, 1)


def frozen_and_unused():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    model["used"].bias.requires_grad_(False)
    return model


def zeros():
    """A layer whose inputs get no gradient, and can say nothing."""
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    return model


def nested_losses(call, x):
    out = call({"x": x}, extra=x.flip(1))
    return out["a"].sum(1) + out["b"][0].square().sum(1)


MODELS = {  # a model, the shape of its data, and losses of what it is called by and the data
    "frozen and unused": (frozen_and_unused, (4, 3), lambda call, x: call(x).square().sum(1)),
    "nested": (lambda: Nested(3, 2), (4, 3), nested_losses),
    "a layer of zeros": (zeros, (5, 3), lambda call, x: call(x).exp().sum(1)),
    "a mask as large as the batch": (
        lambda: Masked(4, 2),
        (3, 3, 4),
        lambda call, x: call(x, torch.ones(3, 2).tril()).square().sum((1, 2)),
    ),
    "samples second": (lambda: Transposed(4, 3), (3, 4, 4), lambda call, x: call(x).square().sum((0, 2))),
    "as many steps, samples second": (
        lambda: Transposed(4, 3),
        (3, 3, 4),
        lambda call, x: call(x).square().sum((0, 2)),
    ),
    "complex": (
        lambda: nn.Linear(3, 2, dtype=torch.complex128),
        (4, 3),
        lambda call, x: call(torch.complex(x, x.flip(0))).abs().pow(3).sum(1),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    build, shape, losses = MODELS[name]
    x = torch.randn(shape)
    check(build(), call_for_per_sample_grads, lambda call: losses(call, x))


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"module": 3}, "expected an nn.Module, found int"),
        ({"batch_size": 1.0}, "batch_size must be None or a positive integer, found 1.0"),
        ({"batch_size": 0}, "batch_size must be None or a positive integer, found 0"),
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

    with pytest.raises(RuntimeError, match=r"no dimension of the outputs, of shapes \[\(\)\], separates 4 samples"):
        call_for_per_sample_grads(Total(2, 3))(torch.ones(4, 2)).backward()


def test_a_batch_size_that_no_input_has():
    call = call_for_per_sample_grads(nn.Linear(4, 10), batch_size=10)
    with pytest.raises(errors.CallArgumentError, match=r"batch_size is 10.*dimension 0 of the inputs has sizes \[3\]"):
        call(torch.randn(3, 4))


class Folded(nn.Linear):
    """Returns all steps of all samples in one dimension."""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


def test_columns_are_no_samples_even_when_there_are_as_many():
    model = Folded(4, 3)
    with pytest.raises(errors.CallArgumentError, match=r"no dimension of the outputs, of shapes \[\(15, 3\)\]"):
        call_for_per_sample_grads(model)(torch.randn(3, 5, 4)).square().sum().backward()
    assert not hasattr(model.weight, "grad_sample")


class FoldedIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.layer(self.table(ids.flatten()))


def test_columns_are_no_samples_where_only_ids_can_be_asked():
    with pytest.raises(errors.CallArgumentError, match="no dimension of the outputs"):
        call_for_per_sample_grads(FoldedIds())(torch.randint(7, (3, 5))).square().sum().backward()


def states(model, batch):
    depth = model.num_layers * (2 if model.bidirectional else 1)
    state = torch.randn(depth, batch, model.hidden_size)
    return (state, torch.randn_like(state)) if isinstance(model, nn.LSTM) else state


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_first_state(kind, layers, batch_first, batch_size):
    model = kind(3, 4, layers, batch_first=batch_first)
    for _ in range(2):
        model.zero_grad()
        for p in model.parameters():
            p.__dict__.pop("grad_sample", None)
        x = torch.randn(5, 6, 3) if batch_first else torch.randn(6, 5, 3)
        state = states(model, 5)

        def losses(call, x=x, state=state):
            out, last = call(x, state)
            last = last[0] if isinstance(last, tuple) else last
            out = out if batch_first else out.transpose(0, 1)
            return out.square().flatten(1).sum(1) + last.transpose(0, 1).pow(3).flatten(1).sum(1)

        check(model, lambda m: call_for_per_sample_grads(m, batch_size=batch_size, batch_first=batch_first), losses)


@pytest.mark.parametrize(("lengths", "with_state"), [([6, 4, 3, 1], False), ([2, 6, 1, 4], True), ([5, 5, 5, 5], True)])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_packed_sequence(kind, lengths, with_state):
    model = kind(3, 4, 2, bidirectional=True)
    for _ in range(2):
        for p in model.parameters():
            p.__dict__.pop("grad_sample", None)
        x, state = torch.randn(max(lengths), 4, 3), states(model, 4)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)

        def losses(call, packed=packed, state=state):
            out, last = call(packed, *([state] if with_state else []))
            last = last[0] if isinstance(last, tuple) else last
            out = nn.utils.rnn.pad_packed_sequence(out)[0].transpose(0, 1)
            return out.square().flatten(1).sum(1) + last.transpose(0, 1).pow(3).flatten(1).sum(1)

        check(model, call_for_per_sample_grads, losses)


def test_the_gradient_goes_on_into_packed_data():
    model = nn.GRU(3, 4)
    x = torch.randn(6, 4, 3, requires_grad=True)
    pack = lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 3, 3, 1]))  # noqa: E731
    (expected,) = torch.autograd.grad(model(pack(x))[0].data.square().sum(), x)
    call_for_per_sample_grads(model)(pack(x))[0].data.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_second_derivative_is_refused():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3, requires_grad=True)
    out = call_for_per_sample_grads(model)(x)
    with pytest.raises(errors.UnsupportedOperationError, match=r"a second time \(create_graph=True"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_module_none_of_whose_parameters_is_asked(frozen):
    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) if frozen else x * 2

    model, x = Other(3, 2).requires_grad_(not frozen), torch.randn(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    call_for_per_sample_grads(model)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert not hasattr(model.weight, "grad_sample")


def test_under_a_checkpoint():
    class Checkpointed(nn.Linear):
        reentrant = False

        def forward(self, x):
            return checkpoint(super().forward, x * 2, use_reentrant=self.reentrant)

    model, x = Checkpointed(3, 4), torch.randn(4, 4, 3, requires_grad=True)
    expected = loop(nn.Linear.forward(model, x * 2).square().sum((1, 2)), dict(model.named_parameters()))
    call_for_per_sample_grads(model)(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name])
        assert p.grad is None
        p.grad_sample = None
    model.reentrant = True
    with pytest.raises(errors.UnsupportedOperationError, match="use_reentrant=False"):
        call_for_per_sample_grads(model)(x).square().sum().backward()
