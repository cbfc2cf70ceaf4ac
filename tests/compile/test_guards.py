"""What a step reads may change between calls: Dynamo's guards see it, or our own checks at every call."""

import threading

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import UnsupportedOperationError

from .helpers import B, C, D, Twins, batch, losses_of, mlp

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


def warm(twins, *args):
    """Call until the captured graph runs."""
    twins.run(*args)
    twins.captured(*args)


def replace_weight(model):
    model[2].weight = nn.Parameter(torch.full_like(model[2].weight, 0.1))


def replace_data(model):
    model[2].weight.data = torch.full_like(model[2].weight, 0.2)


CHANGES = {  # and whether the step has to be captured again
    "stepped": (lambda model: torch.optim.SGD(model.parameters(), 0.5).step(), False),
    "replaced": (replace_weight, True),
    "other data": (replace_data, False),
    "evaluated": (nn.Module.eval, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_changed_between_calls(name):
    change, again = CHANGES[name]
    twins = Twins(nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.5), nn.Linear(6, C)))
    x, y = batch()
    warm(twins, x, y)
    assert not torch.equal(twins.captured(x, y), twins.captured(x, y))  # dropout draws anew
    for model in (twins.model, twins.other):
        change(model)
    if again:
        twins.run(x, y)
    twins.captured(x, y)


def test_other_shapes_other_dtypes_and_no_graph():
    twins = Twins(mlp())
    warm(twins, *batch())
    warm(twins, *batch(B + 2, D))
    with torch.no_grad(), pytest.raises(gradrein.errors.NoGraphError):
        twins.step(*batch())
    twins.captured(*batch())
    for model in (twins.model, twins.other):
        model.double()
        model.zero_grad()
    x, y = batch()
    warm(twins, x.double(), y)


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


def test_hooks_on_parameters_that_come_and_go():
    twins = Twins(mlp())
    warm(twins, *batch())
    handles = [m[0].weight.register_hook(lambda g: g * 2) for m in (twins.model, twins.other)]
    for step in (twins.plain, twins.step):
        with pytest.raises(UnsupportedOperationError, match="a hook is registered on `0.weight`"):
            step(*batch())
    for handle in handles:
        handle.remove()
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
    from gradrein.persample.ops import rules

    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    twins = Twins(mlp())
    warm(twins, *batch())
    gradrein.register_rule("AddmmBackward0", lambda ctx: torch.zeros(ctx.samples, *ctx.shape), replace=True)
    twins.eager(*batch())


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


def test_steps_in_several_threads():
    model, failed = nn.Linear(6, 2), []
    compiled = gradrein.compile(
        lambda x: gradrein.per_sample(model(x).square().sum(1), model).norms(), model, backend="captured"
    )

    def run(rows):
        try:
            for _ in range(3):
                assert compiled(torch.randn(rows, 6)).shape == (rows,)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rows,)) for rows in (2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert compiled(torch.randn(7, 6)).shape == (7,)
