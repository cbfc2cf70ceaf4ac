"""`detect_nonfinite`: every way a NaN or an infinity can come about, none missed, none blamed on others."""

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein import _events
from gradrein.errors import NonFiniteGradientError


def caught(run, model=None):
    with pytest.raises(NonFiniteGradientError) as info, gradrein.detect_nonfinite(model):
        run()
    return info.value


class Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x, by):
        return self.second(self.first(x) / by)


def test_the_origin_is_the_first_node_with_finite_in_and_non_finite_out():
    x = torch.tensor([[4.0], [0.0], [1.0], [0.0]], requires_grad=True)
    error = caught(lambda: (x * 1).sqrt().exp().sum().backward())
    assert (error.node, error.operand, error.rows) == ("SqrtBackward0", "result", (1, 3))
    assert error.offenders == {"x": 2}
    assert str(error).splitlines() == [
        "NaN or infinite gradient values (how many) in x (2).",
        "Origin: SqrtBackward0. The gradient that came in is finite; of the gradient it sent to its input 0, "
        "2 of 4 values are not. Its saved operand `result` is zero (2 of 4 values, first at (1, 0), rows "
        "1, 3). Keep it away from zero before this op, by a clamp or a small constant; masking the result "
        "does not help, because 0 * inf is NaN.",
    ]


def sum_overflows(x):
    hidden = x * 0.1
    (hidden * 3e38 * 1e-38 + hidden * 3e38 * 1e-38).sum().backward(torch.tensor(1e38))


def hooked(x):
    hidden = x * 2
    hidden.register_hook(lambda g: g / 0)
    hidden.sum().backward()


def not_finite_before(x):
    x.grad = torch.full_like(x, torch.nan)
    (x * 2).sum().backward()


def masked(x):
    mask = torch.tensor([0.0, -torch.inf])  # not to blame: a mask is written like that
    ((x + mask).logsumexp(0) * (x[0] - 8).log()).backward()


ORIGINS = {  # what runs from the values 7 and 2: node, operand, rows, and words of the message
    "overflow": (
        lambda x: (x * 1e-38 * 1e30 * 1e30 * 1e-20).sum().backward(),
        "MulBackward0",
        None,
        (0, 1),
        "left the range of its dtype",
    ),
    "sum": (sum_overflows, "MulBackward0", None, (), "their sum overflows"),
    "hook": (hooked, "MulBackward0", None, (), "a hook on the tensor this op made makes it non-finite"),
    "before": (not_finite_before, None, None, (), "`.grad` was not finite before"),
    "passed in": (lambda x: (x * 2).backward(x / 0), None, None, (), "passed in for output 0 is not finite"),
    "forward": (
        lambda x: (x - 5).log().sum().backward(),
        "LogBackward0",
        "self",
        (1,),
        "The loss itself is nan, before any backward. Origin: LogBackward0 made NaN or infinity (1 of 2 values, first "
        "at (1,), row 1) out of `self` from -3 to 2.",
    ),
    "exp": (lambda x: x.exp().exp().exp().sum().backward(), "ExpBackward0", None, (0,), "made NaN or infinity"),
    "reciprocal": (lambda x: (1 / (x - 2)).sum().backward(), "ReciprocalBackward0", None, (1,), "made NaN"),
    "division": (lambda x: (x / (x - 2).detach()).sum().backward(), "DivBackward0", "other", (1,), "made NaN"),
    "power": (lambda x: ((x - 2) ** -0.5).sum().backward(), "PowBackward0", "self", (1,), "made NaN"),
    "root": (lambda x: ((x - 3).sqrt() + x.exp()).sum().backward(), "SqrtBackward0", None, (1,), "made NaN"),
    "acos": (lambda x: (x - 5).acos().sum().backward(), "AcosBackward0", "self", (0, 1), "made NaN"),
    "product": (lambda x: ((x * 1e30) * (x * 1e30)).sum().backward(), "MulBackward0", "other", (0, 1), "made NaN"),
    "mask": (masked, "LogBackward0", "self", (), "made NaN"),
    "saved nothing": (lambda x: (x + torch.inf).sum().backward(), None, None, (), "op that made it is unknown"),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_origins(name):
    run, node, operand, rows, words = ORIGINS[name]
    x = torch.tensor([7.0, 2.0], requires_grad=True)
    error = caught(lambda: run(x))
    assert (error.node, error.operand, error.rows) == (node, operand, rows), str(error)
    assert words in str(error)


def test_forward_origin_in_a_model_with_row_and_module():
    model, by = Divides(), torch.ones(4, 1)
    by[2] = 0
    error = caught(lambda: model(torch.randn(4, 3), by).sum().backward(), model)
    assert (error.node, error.module, error.operand, error.rows) == ("DivBackward0", "first", "other", (2,))
    assert error.offenders["first.weight"] == 9


def test_nan_in_the_data_and_in_a_parameter():
    model, x = Divides(), torch.randn(4, 3)
    x[1, 2] = float("nan")
    error = caught(lambda: model(x, 1.0).sum().backward(), model)
    assert (error.node, error.module, error.operand, error.rows) == ("AddmmBackward0", "first", "mat1", (1,))
    assert "It came in with data" in str(error)
    model.zero_grad()
    with torch.no_grad():
        model.second.bias[1] = float("inf")
    error = caught(lambda: model(torch.randn(4, 3), 1.0).sum().backward(), model)
    assert (error.module, error.operand, error.rows) == ("second", "second.bias", (1,))
    assert "already held NaN or infinity before the forward pass" in str(error)


def test_every_way_to_start_a_backward_pass():
    def zero():
        return torch.zeros(2, requires_grad=True)

    x, y, z = zero(), zero(), zero()
    assert caught(lambda: torch.autograd.backward(x.sqrt().sum())).offenders == {"x": 2}
    assert caught(lambda: torch.autograd.grad(y.sqrt().sum(), [y])).offenders == {"y": 2}
    assert caught(lambda: z.sqrt().sum().backward(inputs=[z])).offenders == {"z": 2}
    assert caught(lambda: gradrein.trace(zero().sqrt().sum())).node == "SqrtBackward0"
    w = zero()
    assert caught(lambda: torch.autograd.grad(w.sqrt().sum(), w, create_graph=True)).node == "SqrtBackward0"


def test_what_is_finite_passes_unchanged():
    torch.manual_seed(0)
    model, x = Divides(), torch.randn(4, 3)
    model(x, 2.0).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with gradrein.detect_nonfinite(model):
        model(x, 2.0).sum().backward()
        (grad,) = torch.autograd.grad(model(x, 2.0).sum(), [model.first.weight])
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert torch.equal(grad, expected[0])


def test_large_but_finite_values_pass():
    x = torch.ones(4, requires_grad=True)
    with gradrein.detect_nonfinite():
        (x * 3e38).backward(torch.ones(4))  # their sum overflows, they do not
    h = torch.ones(4, requires_grad=True, dtype=torch.half)
    with gradrein.detect_nonfinite():
        (h * 6e4).backward(torch.ones(4, dtype=torch.half))


def test_sparse_and_complex_gradients():
    embedding = nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        embedding.weight[1] = 0
    error = caught(lambda: embedding(torch.tensor([1, 2])).abs().sqrt().sum().backward(), embedding)
    assert (error.node, error.offenders) == ("SqrtBackward0", {"weight": 2})
    z = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    assert "PowBackward0" in caught(lambda: (z**0.5).abs().sum().backward()).node


def test_gradients_of_other_kinds_never_break_a_pass():
    with gradrein.detect_nonfinite():
        meta = torch.ones(2, device="meta", requires_grad=True)
        meta.exp().sum().backward()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        nested.requires_grad_()
        (nested * 2).values().sum().backward()
    nested.grad = None
    zero = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged).requires_grad_()
    assert caught(lambda: zero.sqrt().values().sum().backward()).offenders == {"zero": 3}


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant):
    model = Divides()
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()

    def region(x):
        return model.second(model.first(x).abs().sqrt())

    x = torch.ones(2, 3, requires_grad=True)
    error = caught(lambda: checkpoint(region, x, use_reentrant=reentrant).sum().backward(), model)
    assert (error.node, error.module, error.operand) == ("SqrtBackward0", "first", "result")


@pytest.mark.parametrize("donated", [True, False])
def test_compiled_functions_run_and_are_one_node(donated):
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=donated):
        compiled = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), backend="aot_eager")
        x = torch.zeros(2, 3, requires_grad=True)
        with gradrein.detect_nonfinite():
            for _ in range(3):
                compiled(x).sum().backward()
        y = torch.zeros(2, 3, requires_grad=True)
        error = caught(lambda: compiled(y.sqrt()).sum().backward())
    assert error.offenders == {"y": 6}
    assert error.node == (None if donated else "SqrtBackward0")
    assert ("donated_buffer = False" in str(error)) == donated


def test_batched_gradients_pass_through():
    x = torch.zeros(3, requires_grad=True)
    with gradrein.detect_nonfinite():
        torch.autograd.grad(x.exp(), x, torch.eye(3), is_grads_batched=True)
        torch.func.grad(lambda t: t.sin().sum())(torch.ones(3))


def test_blocks_nest_and_leave_nothing_behind():
    engine = torch.autograd.Variable._execution_engine
    x = torch.zeros(1, requires_grad=True)
    with gradrein.detect_nonfinite():
        with gradrein.detect_nonfinite():
            pass
        assert torch.autograd.Variable._execution_engine is not engine
        with pytest.raises(NonFiniteGradientError):
            x.sqrt().sum().backward()
        (x * 2).sum().backward(inputs=[torch.ones(1, requires_grad=True)])  # the block goes on after an error
    assert torch.autograd.Variable._execution_engine is engine
    x.sqrt().sum().backward()


class Nested(torch.autograd.Function):
    """Runs a backward pass in its own, so deep that torch's engine goes on in a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, threads):
        ctx.threads = threads
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = Nested.apply(ctx.x, depth - 1, threads) if depth else ctx.x.sqrt()
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.threads.add(threading.get_ident())
        torch.autograd.backward(ctx.out, grad)
        return ctx.x.grad, None, None


def test_the_origin_is_found_in_a_thread_of_the_engine():
    threads = set()
    x = torch.zeros(1, requires_grad=True)
    error = caught(lambda: Nested.apply(x, 70, threads).sum().backward())
    assert len(threads) > 1
    assert error.node == "SqrtBackward0"


def test_a_pass_in_a_thread_of_the_engine_notifies_nobody():
    class Counts:
        def __init__(self):
            self.seen = []

        def on_backward(self, tensors):
            self.seen.append(tensors)

        def on_backward_end(self, error):
            self.seen.append(error)

    counts, threads, x = Counts(), set(), torch.ones(1, requires_grad=True)
    _events.subscribe(counts)
    try:
        with mock.patch("torch.autograd.backward", _events.notify_backward(torch.autograd.backward)):
            loss = Nested.apply(x, 70, threads).sum()
            torch.autograd.backward(loss)
    finally:
        _events.unsubscribe(counts)
    assert len(threads) > 1
    assert counts.seen == [loss, None]


def test_other_threads_are_left_alone():
    errors = []

    def run():
        try:
            torch.zeros(1, requires_grad=True).sqrt().sum().backward()
        except Exception as error:
            errors.append(error)

    with gradrein.detect_nonfinite():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert errors == []


def test_nothing_lives_on_after_the_loss_is_dropped():
    x = torch.ones(3, requires_grad=True)
    gc.disable()
    try:
        with gradrein.detect_nonfinite():
            hidden = x.exp()
            alive = weakref.ref(hidden)
            loss = hidden.square().sum()
            loss.backward()
            del hidden, loss
            assert alive() is None
    finally:
        gc.enable()
