"""Wrong calls of `backward` and `grad`, each with its error, torch's first line, and parts of the diagnosis."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradrein
from functions import function
from gradrein import errors

X = torch.ones(2, 3)
UNUSED = "appears to not have been used in the graph"
FREED = "Trying to backward through the graph a second time"
STALE = "has been modified by an inplace operation"
NO_GRAPH = "does not require grad and does not have a grad_fn"
SCALAR = "only for scalar outputs"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.idle = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


MISTAKES = []


def mistake(kind, first_line, *texts, needs=()):
    def register(run):
        marks = [pytest.mark.needs(feature) for feature in needs]
        MISTAKES.append(pytest.param(run, kind, first_line, texts, id=run.__name__, marks=marks))
        return run

    return register


@mistake(
    errors.UnusedInputError,
    UNUSED,
    "idle.bias: no recorded graph uses it: it was never used, or",
    "a value without gradient enters the output's graph at AddmmBackward0 in Net.body",
    "or materialize_grads=True to get zeros.",
)
def unused(net):
    gradrein.grad(net(X).sum(), net)


@mistake(errors.UnusedInputError, UNUSED, "input 0 (`temperature`)")
def unused_variable(net):
    temperature = torch.ones(1, requires_grad=True)
    gradrein.grad(net(X).sum(), temperature)


@mistake(
    errors.UnusedInputError,
    UNUSED,
    "w: `hidden` (shape (2, 4), made by TanhBackward0 after Net.body) depends on it, "
    "but enters AddmmBackward0 in Net.head (as `mat1`) detached",
)
def detached_on_the_way(net):
    hidden = net.body(X).tanh()
    gradrein.grad(net.head(hidden.detach()).sum(), {"w": net.body.weight})


@mistake(
    errors.UnusedInputError,
    UNUSED,
    "w: used for `auxiliary` (shape (), made by MeanBackward0 after Net.idle), which is",
)
def used_but_not_for_this(net):
    auxiliary = net.idle(X).square().mean()  # noqa: F841
    gradrein.grad(net(X).sum(), {"w": net.idle.weight})


@mistake(
    errors.UnusedInputError,
    "One of the differentiated Tensors does not require grad",
    "idle.weight: it does not require grad",
    "allow_unused does not cover it",
)
def frozen(net):
    net.idle.weight.requires_grad_(False)
    gradrein.grad(net(X).sum(), dict(net.named_parameters()), allow_unused=True)


@mistake(errors.UnusedInputError, "can't retain_grad", "input 0 (`Net.idle.weight`): it does not require grad")
def frozen_for_backward(net):
    net.idle.weight.requires_grad_(False)
    gradrein.backward(net(X).sum(), inputs=[net.idle.weight])


Half = function("Half", lambda x, y: (x + y, x - y), lambda first, second, *_: (first, None))


@mistake(
    errors.UnusedInputError,
    UNUSED,
    "input 1 (`y`): used, but the backward of HalfBackward after Net.body returned None for it",
)
def a_backward_that_returns_none(net):
    x, y = (net.body(X) for _ in range(2))
    gradrein.grad(Half.apply(x, y)[0].sum(), [x, y])


@mistake(errors.UnusedInputError, UNUSED, "input 0 (`second`): another result of the same op is used, this one is not")
def another_result_of_the_same_op(net):
    first, second = net(X).split(1)
    gradrein.grad(first.sum(), second)


@mistake(errors.UnusedInputError, UNUSED)
def unused_in_a_batch(net):
    out = net(X)
    gradrein.grad(out, net, torch.ones(2, *out.shape), is_grads_batched=True)


@mistake(
    errors.GraphFreedError,
    FREED,
    "`memory` of shape (2, 4), made by TanhBackward0 after Net.body, used by AddmmBackward0 in",
    "`.detach()` it where the new step begins",
)
def carried_over(net):
    memory = net.body(X).tanh()
    gradrein.backward(memory.sum())
    gradrein.backward(net.head(memory).square().sum())


@mistake(
    errors.GraphFreedError,
    FREED,
    "recorded before the last backward pass, which freed it",
    "added and differentiated in one pass",
)
def freed(net):
    loss = net(X).sum()
    gradrein.backward(loss)
    gradrein.backward(loss)


@mistake(errors.GraphFreedError, FREED, "Which pass freed it is not known")
def freed_by_torch(net):
    gradrein.backward(net(X).sum())
    loss = net(X).sum()
    loss.backward()
    gradrein.backward(loss)


@mistake(
    errors.InplaceModifiedError,
    STALE,
    "`mat1` of AddmmBackward0 in Net.head, which is `hidden`, shape (2, 4): saved at version 0, now at 1; most likely "
    "written by MulBackward0 after Net.body",
    "`result` of TanhBackward0 after Net.body, shape (2, 4)",
    "`.clone()` the tensor before the change",
    needs=["SavedTensor.data"],
)
def stale(net):
    hidden = net.body(X).tanh()
    loss = (net.head(hidden).sum() * hidden.exp()).sum()
    hidden.mul_(2)
    gradrein.backward(loss)


@mistake(
    errors.InplaceModifiedError,
    STALE,
    "`mat2` of AddmmBackward0 in Net.head, which is `Net.head.weight`",
    "most likely written by an optimizer step between forward and backward",
    needs=["SavedTensor.data"],
)
def stepped_too_early(net):
    loss = net(X).sum()
    gradrein.backward(net(X).sum())
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    gradrein.backward(loss)


@mistake(
    errors.InplaceModifiedError,
    STALE,
    "`other` of MulBackward0 after Net.head, which is `mask`",
    "written under no_grad, or by an op that autograd does not record",
    needs=["SavedTensor.data"],
)
def written_without_autograd(net):
    mask = torch.ones(2, 2)
    loss = (net(X).exp() * mask).sum()
    mask.zero_()
    gradrein.backward(loss)


Saves = function("Saves", lambda x: x * 1, lambda grad, x: grad * x)


@mistake(errors.InplaceModifiedError, STALE, "SavesBackward")
def stale_in_a_custom_function(net):
    hidden = net(X)
    loss = Saves.apply(hidden).sum()
    hidden.add_(1)
    gradrein.backward(loss)


@mistake(
    errors.NoGraphError,
    NO_GRAPH,
    "`loss` (shape ()) has no recorded graph",
    "gradients are disabled here",
    "train nothing",
)
def under_no_grad(net):
    with torch.no_grad():
        loss = net(X).sum()
        gradrein.backward(loss)


@mistake(errors.NoGraphError, NO_GRAPH, "made under torch.inference_mode()")
def under_inference_mode(net):
    with torch.inference_mode():
        loss = net(X).sum()
    gradrein.backward(loss)


@mistake(errors.NoGraphError, NO_GRAPH, "its dtype is torch.int64, and only floating point")
def integers(net):
    gradrein.backward(net(X).argmax())


@mistake(errors.NoGraphError, NO_GRAPH, "it was detached from `full` (shape (), made by SumBackward0 after Net.head)")
def detached(net):
    full = net(X).sum()
    gradrein.backward(full.detach())


@mistake(errors.NoGraphError, NO_GRAPH, "every parameter of Net is frozen: if Net computed it, this is why")
def frozen_model(net):
    net.requires_grad_(False)
    gradrein.backward(net(X).sum())


@mistake(errors.NoGraphError, "element 1 of tensors", "no live object shows why")
def nothing_left_to_see(net):
    gradrein.backward([net(X).sum(), torch.tensor(3.0)])


@mistake(
    errors.GradientMismatchError,
    SCALAR,
    "output 0 (`losses`) has shape (2,), made by MeanBackward1 after Net.head",
    "A data-parallel wrapper returns one loss per device: `.mean()` is the fix.",
)
def no_scalar(net):
    losses = net(X).mean(1)
    gradrein.backward(losses)


@mistake(errors.GradientMismatchError, SCALAR, "output 0 has shape (2, 2), made by AddmmBackward0 in Net.head")
def an_edge_that_is_no_scalar(net):
    gradrein.backward(get_gradient_edge(net(X)))


@mistake(
    errors.GradientMismatchError,
    "but got torch.complex64",
    "output 0 (`value`), made by MulBackward0 after Net.head, is not real",
)
def not_real(net):
    value = net(X).sum() * 2j
    gradrein.backward(value)


@mistake(
    errors.GradientMismatchError,
    "Mismatch in shape: grad_output[1] has a shape of torch.Size([4, 2]) and output[1] has a shape of",
    "output 1 (`second`) is made by AddmmBackward0 in Net.body",
)
def shape(net):
    first, second = net(X), net.body(X)
    gradrein.backward([first, second], [torch.ones(2, 2), torch.ones(4, 2)])


@mistake(
    errors.GradientMismatchError,
    "Mismatch in dtype: grad_output[0] has a dtype of torch.complex64",
    "output 0 (`out`)",
    "Cast the gradient with `.to(torch.float32)`",
)
def dtype(net):
    out = net(X)
    gradrein.backward(out, torch.ones(2, 2, dtype=torch.complex64))


@mistake(errors.GradientMismatchError, "got 2 tensors and 1 gradients", "There is no gradient for output 1 (`second`)")
def too_few(net):
    first, second = net(X).sum(), net(X).sum()
    gradrein.backward([first, second], [None])


@mistake(errors.GradientMismatchError, "got 1 tensors and 2 gradients", "There is no output for gradient 1")
def too_many(net):
    gradrein.grad([net(X).sum()], net, [None, None])


@mistake(errors.BackwardError, "", "torch cannot vectorise this pass")
def unvectorised(net):
    hidden = net(X).exp()
    hidden.register_hook(lambda grad: grad * float(grad.sum()))
    gradrein.grad(hidden.square(), net.body.weight, torch.ones(2, 2, 2), is_grads_batched=True)
