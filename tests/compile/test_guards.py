"""Never stale: whatever the step reads may change between calls."""

import os
import random

import pytest
import torch
from torch import nn

import gradrein

from .helpers import B, C, D, Twins, batch, clipped, losses_of, mlp

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


def warm(twins, *args):
    """Call until the captured graph runs."""
    twins.run(*args)
    twins.captured(*args)


def test_other_values_other_shapes_other_dtypes():
    twins = Twins(mlp())
    warm(twins, *batch())
    twins.captured(*batch())
    warm(twins, *batch(B + 2, D))
    twins.captured(*batch())
    for model in (twins.model, twins.other):
        model.double()
        model.zero_grad()
    x, y = batch()
    warm(twins, x.double(), y)


def test_weights_that_were_stepped_or_replaced():
    twins = Twins(mlp())
    warm(twins, *batch())
    for model in (twins.model, twins.other):
        torch.optim.SGD(model.parameters(), 0.5).step()
    twins.captured(*batch())
    weight = torch.randn(C, 6)
    for model in (twins.model, twins.other):
        model[2].weight = nn.Parameter(weight.clone())
    warm(twins, *batch())
    for model in (twins.model, twins.other):
        model[2].weight.data = weight * 2
    twins.run(*batch())


def test_gradients_that_are_there_or_not():
    twins = Twins(mlp())
    warm(twins, *batch())
    twins.captured(*batch())
    for model in (twins.model, twins.other):
        model.zero_grad(set_to_none=False)
    twins.captured(*batch())
    held = twins.model[0].weight.grad
    for model in (twins.model, twins.other):
        model.zero_grad(set_to_none=True)
    twins.captured(*batch())
    assert twins.model[0].weight.grad is not held
    held = twins.model[0].weight.grad
    twins.captured(*batch())
    assert twins.model[0].weight.grad is held  # added to in place, as backward does


def test_training_mode_and_dropout():
    twins = Twins(nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.5), nn.Linear(6, C)))
    x, y = batch()
    warm(twins, x, y)
    first = twins.captured(x, y)
    assert not torch.equal(first, twins.captured(x, y))
    for model in (twins.model, twins.other):
        model.eval()
    warm(twins, x, y)
    assert torch.equal(twins.captured(x, y), twins.captured(x, y))
    for model in (twins.model, twins.other):
        model.train()
    assert not torch.equal(twins.captured(x, y), twins.captured(x, y))


def test_frozen_and_thawed_parameters():
    twins = Twins(mlp())
    warm(twins, *batch())
    for frozen in (True, False):
        for model in (twins.model, twins.other):
            model.zero_grad()
            model[0].requires_grad_(not frozen)
        warm(twins, *batch())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = mlp(), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += x.shape[0]
        return self.inner(x) * (2.0 if self.calls % 2 else 1.0)


def test_a_model_that_counts_its_calls():
    twins = Twins(Counting())
    for call in range(8):
        twins.run(*batch())
        assert twins.model.calls == twins.other.calls == call + 1
        assert twins.model.seen == (call + 1) * B


class Running(nn.Module):
    """Keeps a mean of what it saw, and uses that of the calls before."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        before = self.mean.clone()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.inner(x - before)


def test_buffers_are_updated():
    twins = Twins(Running())
    warm(twins, *batch())
    for _ in range(3):
        twins.captured(*batch())


class Chance(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = mlp(), draw

    def forward(self, x):
        return self.inner(x) * self.draw()


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.randint(1, 3), lambda: random.uniform(1, 2), lambda: random.choice([1.0, 2.0])],
    ids=["random", "randint", "uniform", "choice"],
)
def test_a_model_that_draws_from_pythons_generator(draw):
    twins = Twins(Chance(draw))
    twins.other.draw = draw
    for _ in range(5):
        twins.run(*batch())


def test_torchs_generator_seeded_or_not():
    twins = Twins(Chance(lambda: torch.rand(())))
    warm(twins, *batch())
    for _ in range(3):
        twins.captured(*batch())


SCALE = [1.0]


def test_globals_closures_and_attributes():
    factor = {"one": 1.0}

    def make(model):
        model.gain = 1.0

        def step(x, y):
            losses = losses_of(model, x, y) * SCALE[0] * factor["one"] * model.gain
            return gradrein.per_sample(losses, model).norms()

        return step

    twins = Twins(mlp(), make)
    warm(twins, *batch())
    try:
        SCALE[0] = 2.0
        warm(twins, *batch())
        factor["one"] = 3.0
        warm(twins, *batch())
        twins.model.gain = twins.other.gain = 4.0
        warm(twins, *batch())
        SCALE[0], factor["one"] = 1.0, 1.0
        twins.model.gain = twins.other.gain = 1.0
        twins.captured(*batch())
    finally:
        SCALE[0] = 1.0


def test_modules_that_are_exchanged():
    twins = Twins(mlp())
    warm(twins, *batch())
    for model in (twins.model, twins.other):
        model[1] = nn.ReLU()
    warm(twins, *batch())
    for model in (twins.model, twins.other):
        model.append(nn.Softmax(1))
    warm(twins, *batch())


def test_hooks_on_modules_that_come_and_go():
    twins = Twins(mlp())
    warm(twins, *batch())
    handles = [m[0].register_forward_hook(lambda _m, _i, out: out * 2) for m in (twins.model, twins.other)]
    twins.run(*batch())
    twins.run(*batch())
    for handle in handles:
        handle.remove()
    twins.run(*batch())


def test_hooks_on_all_modules_that_come_and_go():
    twins = Twins(mlp())
    warm(twins, *batch())
    register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda module, _, out: out * 2 if isinstance(module, nn.Tanh) else None)
    try:
        twins.eager(*batch())
        late = Twins(mlp())
        for _ in range(4):
            late.run(*batch())
    finally:
        handle.remove()
    twins.captured(*batch())
    late.run(*batch())
    late.run(*batch())


def test_hooks_on_parameters_that_come_and_go():
    twins = Twins(mlp())
    warm(twins, *batch())
    handles = [m[0].weight.register_hook(lambda g: g * 2) for m in (twins.model, twins.other)]
    twins.eager(*batch())
    for handle in handles:
        handle.remove()
    twins.captured(*batch())


def test_autocast_on_and_off():
    twins = Twins(mlp())
    warm(twins, *batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        warm(twins, *batch())
        twins.captured(*batch())
    twins.captured(*batch())


def test_inputs_that_share_memory_with_each_other():
    model = nn.Linear(D, 1)

    def make(model):
        def step(x, y):
            return gradrein.per_sample((model(x) + model(y).flip(0)).square(), model).norms()

        return step

    twins = Twins(model, make)
    x, y = torch.randn(B, D), torch.randn(B, D)
    warm(twins, x, y)
    for one, other in ((x, x), (x, x.view(B, D)), (x, x.detach())):
        with pytest.raises(gradrein.errors.BatchCouplingError):
            twins.step(one, other)
    twins.captured(x, y)


def test_windows_of_one_tensor_are_no_obstacle():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
    ids = torch.randint(7, (B, 9))
    twins = Twins(model)
    warm(twins, ids[:, :-1], ids[:, 1:])
    twins.captured(ids[:, :-1], ids[:, 1:])
    twins.eager(ids[:, :-1], ids[:, 1:].clone())


def test_a_graph_from_before_the_step():
    body, head = nn.Linear(D, D), nn.Linear(D, C)
    model = nn.Sequential(body, head)

    def make(model):
        def step(h, y):
            return gradrein.per_sample(losses_of(model[1], h, y), model).norms()

        return step

    twins = Twins(model, make)
    x, y = batch()
    for _ in range(3):
        expected = twins.plain(twins.other[0](x), y)
        assert torch.equal(twins.step(twins.model[0](x), y), expected)
    assert twins.ran == "eager"


def test_a_rule_that_is_registered_later(monkeypatch):
    from gradrein.persample.rules import registry

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_REGISTERED", list(registry._REGISTERED))
    twins = Twins(mlp())
    warm(twins, *batch())
    gradrein.register_rule("AddmmBackward0", lambda ctx: torch.zeros(ctx.samples, *ctx.shape), replace=True)
    twins.eager(*batch())


def test_grad_mode():
    twins = Twins(mlp())
    warm(twins, *batch())
    with torch.no_grad(), pytest.raises(gradrein.errors.NoGraphError):
        twins.step(*batch())
    twins.captured(*batch())


def test_steps_of_one_function_do_not_count_together():
    for _ in range(10):
        twins = Twins(nn.Linear(D, C), clipped)
        warm(twins, *batch())


def test_where_dynamo_is_switched_off():
    twins = Twins(mlp())
    warm(twins, *batch())
    with torch.compiler.set_stance("force_eager"):
        twins.eager(*batch())
    twins.captured(*batch())


def test_a_buffer_that_the_step_sets_anew():
    def make(model):
        model.register_buffer("seen", torch.zeros(()))
        model.register_buffer("last", torch.zeros(B))

        def step(x, y):
            model.seen += 1
            model.last = gradrein.per_sample(losses_of(model, x, y), model).norms()
            return model.seen

        return step

    twins = Twins(mlp(), make)
    held = twins.model.seen
    warm(twins, *batch())
    assert twins.captured(*batch()) is held
    assert held == 3


def test_the_default_dtype():
    twins = Twins(mlp())
    x, y = batch()
    warm(twins, x, y)
    torch.set_default_dtype(torch.float64)
    try:
        twins.run(x, y)
        twins.run(x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    twins.run(x, y)


SOURCE = """
import torch.nn.functional as F
import gradrein

class Scaled(Base):
    def forward(self, x):
        return self.inner(x) * factor

def step(x, y):
    return gradrein.per_sample(F.cross_entropy(model(x), y, reduction="none") * factor, model).norms()
"""
factor = 100.0  # of the same name in the module that code below claims to be of


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()


def test_code_whose_globals_are_not_those_of_its_module():
    mine, theirs = ({"__name__": __name__, "Base": Base, "factor": 2.0} for _ in range(2))
    for names in (mine, theirs):
        exec(SOURCE, names)
        names["model"] = names["Scaled"]()
    step = gradrein.compile(mine["step"], mine["model"], backend="captured")
    x, y = batch()
    for value in (2.0, 2.0, 3.0, 3.0, 2.0):
        mine["factor"] = value
        assert torch.equal(step(x, y), mine["step"](x, y))
    assert ": captured (" in step.explain()
    mine["model"] = theirs["model"]  # whose forward pass has other globals again
    step = gradrein.compile(mine["step"], theirs["model"], backend="captured")
    for _ in range(3):
        assert torch.equal(step(x, y), mine["step"](x, y))
    assert "the globals of the step or of a module are not those" in step.explain()


class Scaled(nn.Linear):
    def scale(self, x):
        return 2 * x

    def forward(self, x):
        return self.scale(super().forward(x))


class Loss:
    def of(self, x):
        return x.square().sum(1)


@pytest.mark.parametrize(
    ("owner", "name", "method"),
    [
        (Scaled, "scale", lambda self, x: 3 * x),
        (Scaled, "forward", lambda self, x: 5 * nn.Linear.forward(self, x)),
        (Scaled, "__call__", lambda self, x: 7 * nn.Module.__call__(self, x)),
        (Loss, "of", lambda self, x: x.abs().sum(1)),
    ],
    ids=["scale", "forward", "call", "loss"],
)
def test_methods_that_are_replaced(monkeypatch, owner, name, method):
    model, loss = Scaled(5, 3), Loss()

    def step(x):
        return gradrein.per_sample(loss.of(model(x)), model).norms()

    captured = gradrein.compile(step, model, backend="captured")
    for _ in range(3):
        captured(torch.randn(4, 5))
    assert ": captured (" in captured.explain()
    monkeypatch.setattr(owner, name, method, raising=False)
    x = torch.randn(4, 5)
    assert torch.equal(captured(x), step(x))
    assert "a method that it was read from has been replaced" in captured.explain()


def test_a_method_whose_code_is_replaced(monkeypatch):
    """As reloading does in a notebook."""
    model = Scaled(5, 3)

    def step(x):
        return gradrein.per_sample(model(x).square().sum(1), model).norms()

    captured, x = gradrein.compile(step, model, backend="captured"), torch.randn(4, 5)
    for _ in range(3):
        captured(x)
    monkeypatch.setattr(Scaled.scale, "__code__", (lambda self, x: 3 * x).__code__)
    assert torch.equal(captured(x), step(x))


def test_what_is_read_as_a_constant_stays_eager(monkeypatch):
    model, own = mlp(), random.Random(0)
    monkeypatch.setenv("GRADREIN_TEST", "2")
    counter = torch.zeros(())

    def asked(read):
        def step(x):
            return gradrein.per_sample(model(x).sum(1) * read(), model).norms()

        return gradrein.compile(step, model, backend="captured")

    reads = {
        "it reads the environment (`os.getenv`)": lambda: float(os.getenv("GRADREIN_TEST")),
        "it reads the environment (`os.environ`)": lambda: 1.0 + ("GRADREIN_TEST" in os.environ),
        "it draws from a `random.Random` of its own": lambda: own.random(),
        "it reads the version counter of a tensor (`_version`)": lambda: 1.0 + counter._version,
    }
    for reason, read in reads.items():
        step = asked(read)
        for _ in range(3):
            step(torch.randn(4, 5))
        assert reason in step.explain()


def test_hooks_that_pack_saved_values_around_a_captured_step():
    model, packed = mlp(), []

    def step(x):
        return gradrein.per_sample(model(x).square().sum(1), model).norms()

    captured, x = gradrein.compile(step, model, backend="captured"), torch.randn(4, 5)
    for _ in range(3):
        captured(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert torch.equal(captured(x), step(x))
    assert packed
    assert ": captured (" in captured.explain()
