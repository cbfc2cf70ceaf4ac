"""Every error of `backward` and `grad`: its type, torch's first line, and the diagnosis."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein import errors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.idle = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def text_after(kind, call, first_line):
    """Return the text after torch's own first line, which must be there."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    first, _, rest = str(caught.value).partition("\n")
    assert first_line in first
    return rest


# 1. Unused inputs


UNUSED = "appears to not have been used in the graph"


def test_every_unused_input_is_named(net):
    loss = net(torch.ones(2, 3)).sum()
    with pytest.raises(errors.UnusedInputError) as caught:
        gradrein.grad(loss, net)
    assert caught.value.names == ("idle.weight", "idle.bias")
    assert "idle.bias: no recorded graph uses it: it was never used, or" in str(caught.value)
    assert "a value without gradient enters the output's graph at AddmmBackward0 in Net.body" in str(caught.value)
    assert str(caught.value).endswith("or materialize_grads=True to get zeros.")


def test_a_plain_tensor_goes_by_its_variable(net):
    temperature = torch.ones(1, requires_grad=True)
    loss = net(torch.ones(2, 3)).sum()
    text = text_after(errors.UnusedInputError, lambda: gradrein.grad(loss, temperature), UNUSED)
    assert "input 0 (`temperature`)" in text


def test_detached_on_the_way(net):
    hidden = net.body(torch.ones(2, 3)).tanh()
    loss = net.head(hidden.detach()).sum()
    text = text_after(errors.UnusedInputError, lambda: gradrein.grad(loss, {"w": net.body.weight}), UNUSED)
    assert (
        "w: `hidden` (shape (2, 4), made by TanhBackward0 after Net.body) depends on it, "
        "but enters AddmmBackward0 in Net.head (as `mat1`) detached"
    ) in text


def test_used_but_not_for_this(net):
    auxiliary = net.idle(torch.ones(2, 3)).square().mean()  # noqa: F841
    loss = net(torch.ones(2, 3)).sum()
    text = text_after(errors.UnusedInputError, lambda: gradrein.grad(loss, {"w": net.idle.weight}), UNUSED)
    assert "w: used for `auxiliary` (shape (), made by MeanBackward0 after Net.idle), which is" in text


def test_frozen(net):
    net.idle.weight.requires_grad_(False)
    loss = net(torch.ones(2, 3)).sum()
    inputs = dict(net.named_parameters())
    text = text_after(
        errors.UnusedInputError,
        lambda: gradrein.grad(loss, inputs, allow_unused=True),
        "One of the differentiated Tensors does not require grad",
    )
    assert "idle.weight: it does not require grad" in text
    assert "allow_unused does not cover it" in text
    text = text_after(
        errors.UnusedInputError, lambda: gradrein.backward(loss, inputs=[net.idle.weight]), "can't retain_grad"
    )
    assert "input 0 (`Net.idle.weight`): it does not require grad" in text


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y, x - y

    @staticmethod
    def backward(ctx, first, second):
        return first, None


def test_a_custom_backward_that_returns_none():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    out, _ = Half.apply(x, y)
    text = text_after(errors.UnusedInputError, lambda: gradrein.grad(out.sum(), [x, y]), UNUSED)
    assert "input 1 (`y`): used, but the backward of HalfBackward returned None for it" in text


def test_another_result_of_the_same_op():
    x = torch.ones(4, requires_grad=True)
    first, second = x.split(2)
    text = text_after(errors.UnusedInputError, lambda: gradrein.grad(first.sum(), second), UNUSED)
    assert "input 0 (`second`): another result of the same op is used, this one is not" in text


# 2. A second backward


FREED = "Trying to backward through the graph a second time"


def test_the_carried_tensor_goes_by_its_variable(net):
    memory = net.body(torch.ones(2, 3)).tanh()
    gradrein.backward(memory.sum())
    loss = net.head(memory).square().sum()
    with pytest.raises(errors.GraphFreedError, match=FREED) as caught:
        gradrein.backward(loss)
    (crossing,) = caught.value.crossings
    assert "`memory` of shape (2, 4), made by TanhBackward0 after Net.body, used by AddmmBackward0 in" in crossing
    assert "`.detach()` it where the new step begins" in str(caught.value)


def test_the_same_graph_twice(net):
    loss = net(torch.ones(2, 3)).sum()
    gradrein.backward(loss)
    text = text_after(errors.GraphFreedError, lambda: gradrein.backward(loss), FREED)
    assert "recorded before the last backward pass, which freed it" in text
    assert "added and differentiated in one pass" in text


def test_a_graph_freed_by_someone_else_is_not_guessed_at(net):
    gradrein.backward(net(torch.ones(2, 3)).sum())
    loss = net(torch.ones(2, 3)).sum()
    loss.backward()
    text = text_after(errors.GraphFreedError, lambda: gradrein.backward(loss), FREED)
    assert "did not go through gradrein in this thread" in text


# 3. Changed in place


STALE = "has been modified by an inplace operation"


@pytest.mark.needs("SavedTensor.data")
def test_every_stale_tensor_with_op_module_versions_and_writer(net):
    hidden = net.body(torch.ones(2, 3)).tanh()
    loss = (net.head(hidden).sum() * hidden.exp()).sum()
    hidden.mul_(2)
    with pytest.raises(errors.InplaceModifiedError, match=STALE) as caught:
        gradrein.backward(loss)
    assert len(caught.value.stale) == 2
    by_head, by_tanh = sorted(caught.value.stale)
    assert by_head.startswith("`mat1` of AddmmBackward0 in Net.head, which is `hidden`, shape (2, 4)")
    assert "saved at version 0, now at 1; most likely written by MulBackward0 after Net.body" in by_head
    assert by_tanh.startswith("`result` of TanhBackward0 after Net.body, shape (2, 4)")
    assert "most likely written by MulBackward0" in by_tanh
    assert "`.clone()` the tensor before the change" in str(caught.value)


@pytest.mark.needs("SavedTensor.data")
def test_a_parameter_stepped_too_early(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first, second = net(torch.ones(2, 3)).sum(), net(torch.ones(2, 3)).sum()
    gradrein.backward(first)
    optimizer.step()
    text = text_after(errors.InplaceModifiedError, lambda: gradrein.backward(second), STALE)
    assert "`mat2` of AddmmBackward0 in Net.head, which is `Net.head.weight`" in text
    assert "most likely written by an optimizer step between forward and backward" in text


@pytest.mark.needs("SavedTensor.data")
def test_written_without_autograd_looking():
    mask = torch.ones(2)
    loss = (torch.ones(2, requires_grad=True) * mask).sum()
    mask.zero_()
    text = text_after(errors.InplaceModifiedError, lambda: gradrein.backward(loss), STALE)
    assert "`other` of MulBackward0, which is `mask`" in text
    assert "written under no_grad, or by an op that autograd does not record" in text


# 4. No graph


NO_GRAPH = "does not require grad and does not have a grad_fn"


def test_no_grad_is_seen_while_it_lasts(net):
    with torch.no_grad():
        loss = net(torch.ones(2, 3)).sum()
        text = text_after(errors.NoGraphError, lambda: gradrein.backward(loss), NO_GRAPH)
    assert "`loss` (shape ()) has no recorded graph" in text
    assert "gradients are disabled here" in text
    assert "train nothing" in text


def test_inference_mode(net):
    with torch.inference_mode():
        loss = net(torch.ones(2, 3)).sum()
    text = text_after(errors.NoGraphError, lambda: gradrein.backward(loss), NO_GRAPH)
    assert "made under torch.inference_mode()" in text


def test_integers(net):
    loss = net(torch.ones(2, 3)).argmax()
    text = text_after(errors.NoGraphError, lambda: gradrein.backward(loss), NO_GRAPH)
    assert "its dtype is torch.int64, and only floating point" in text


def test_detached(net):
    full = net(torch.ones(2, 3)).sum()
    loss = full.detach()
    text = text_after(errors.NoGraphError, lambda: gradrein.backward(loss), NO_GRAPH)
    assert "it was detached from `full` (shape (), made by SumBackward0 after Net.head)" in text


def test_frozen_model(net):
    net.requires_grad_(False)
    loss = net(torch.ones(2, 3)).sum()
    text = text_after(errors.NoGraphError, lambda: gradrein.backward(loss), NO_GRAPH)
    assert "every parameter of Net is frozen: if Net computed it, this is why" in text


def test_nothing_left_to_see():
    loss = torch.tensor(3.0)
    with pytest.raises(errors.NoGraphError) as caught:
        gradrein.backward([torch.ones(1, requires_grad=True) * 2, loss])
    assert str(caught.value).startswith("element 1 of tensors")
    assert "no live object shows why" in caught.value.causes[-1]


# 5. Not a scalar


def test_not_a_scalar(net):
    losses = net(torch.ones(2, 3)).mean(1)
    text = text_after(errors.GradientMismatchError, lambda: gradrein.backward(losses), "only for scalar outputs")
    assert "output 0 (`losses`) has shape (2,), made by MeanBackward1 after Net.head" in text
    assert "A data-parallel wrapper returns one loss per device: `.mean()` is the fix." in text
    edge = torch.autograd.graph.get_gradient_edge(net(torch.ones(2, 3)))
    text = text_after(errors.GradientMismatchError, lambda: gradrein.backward(edge), "only for scalar outputs")
    assert "output 0 has shape (2, 2), made by AddmmBackward0 in Net.head" in text


def test_not_real():
    value = torch.ones((), dtype=torch.complex64, requires_grad=True) * 2
    text = text_after(errors.GradientMismatchError, lambda: gradrein.backward(value), "but got torch.complex64")
    assert "output 0 (`value`), made by MulBackward0, is not real" in text


# 6. Gradients that do not fit


def test_shape_says_which(net):
    first, second = net(torch.ones(2, 3)), net.body(torch.ones(2, 3))
    text = text_after(
        errors.GradientMismatchError,
        lambda: gradrein.backward([first, second], [torch.ones(2, 2), torch.ones(4, 2)]),
        "Mismatch in shape: grad_output[1] has a shape of torch.Size([4, 2]) and output[1] has a shape of",
    )
    assert "output 1 (`second`) is made by AddmmBackward0 in Net.body" in text


def test_dtype_says_which(net):
    out = net(torch.ones(2, 3))
    text = text_after(
        errors.GradientMismatchError,
        lambda: gradrein.backward(out, torch.ones(2, 2, dtype=torch.complex64)),
        "Mismatch in dtype: grad_output[0] has a dtype of torch.complex64",
    )
    assert "output 0 (`out`)" in text
    assert "Cast the gradient with `.to(torch.float32)`" in text


def test_device_says_which(net):
    out = net(torch.ones(2, 3))
    call = lambda: gradrein.backward(out, torch.ones(2, 2, device="meta"))  # noqa: E731
    text = text_after(errors.GradientMismatchError, call, "expected device cpu but got meta")
    assert "output 0 (`out`) is on cpu, its gradient on meta" in text


def test_number_says_which(net):
    first, second = net(torch.ones(2, 3)).sum(), net(torch.ones(2, 3)).sum()
    call = lambda: gradrein.backward([first, second], [None])  # noqa: E731
    assert "There is no gradient for output 1 (`second`)" in text_after(
        errors.GradientMismatchError, call, "got 2 tensors and 1 gradients"
    )
    call = lambda: gradrein.grad([first], net, [None, None])  # noqa: E731
    assert "There is no output for gradient 1" in text_after(
        errors.GradientMismatchError, call, "got 1 tensors and 2 gradients"
    )


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(7)


def test_an_op_that_returns_the_wrong_shape_is_located(net):
    loss = Wrong.apply(net.body(torch.ones(2, 3))).sum()
    text = text_after(errors.GradientMismatchError, lambda: gradrein.backward(loss), "returned an invalid gradient")
    assert "WrongBackward after Net.body" in text


def test_what_is_no_output():
    with pytest.raises(TypeError, match="output 0 is a int; expected a Tensor or a GradientEdge"):
        gradrein.backward([5])


# 7. Unused parameters


def test_unused_parameters(net):
    assert gradrein.autograd.find_unused_parameters(net(torch.ones(2, 3)).sum(), net) == ["idle.weight", "idle.bias"]
    assert len(gradrein.autograd.find_unused_parameters(torch.ones(1), net)) == 6
    losses = [net(torch.ones(2, 3)).sum(), net.idle(torch.ones(2, 3)).sum()]
    assert gradrein.autograd.find_unused_parameters(losses, net) == []
    net.idle.requires_grad_(False)
    assert gradrein.autograd.find_unused_parameters(net(torch.ones(2, 3)).sum(), net) == []


def test_unused_parameters_does_not_guess_inside_a_reentrant_checkpoint(net):
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(errors.UnsupportedOperationError, match="reentrant checkpoint") as caught:
        gradrein.autograd.find_unused_parameters(checkpoint(net, x, use_reentrant=True).sum(), net)
    assert caught.value.op == "CheckpointFunctionBackward"
    assert gradrein.autograd.find_unused_parameters(checkpoint(net, x, use_reentrant=False).sum(), net) == [
        "idle.weight",
        "idle.bias",
    ]


# What is not ours to explain


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("boom")


def test_other_errors_pass_through_untouched():
    with pytest.raises(RuntimeError, match=r"^boom$") as caught:
        gradrein.backward(Boom.apply(torch.ones(1, requires_grad=True)))
    assert not isinstance(caught.value, errors.GradreinError)


def test_the_original_error_is_the_cause(net):
    with pytest.raises(errors.NoGraphError) as caught:
        gradrein.backward(torch.ones(1))
    assert type(caught.value.__cause__) is RuntimeError


def test_a_failing_diagnosis_does_not_hide_torchs_error(net, monkeypatch):
    def fail():
        raise ValueError("cannot look")

    monkeypatch.setattr("gradrein.graph.find_names", lambda *_: fail())
    with pytest.raises(RuntimeError, match=NO_GRAPH) as caught:
        gradrein.backward(torch.ones(1))
    assert not isinstance(caught.value, errors.GradreinError)
