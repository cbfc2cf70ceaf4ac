"""What guards do not see: weights that are tied later, memory that is shared later, threads, checks that a compiler drops."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein

from .test_inductor import needs_compiler

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


def test_weights_that_are_tied_after_the_capture():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    step = lambda x: gradrein.per_sample(model(x).square().sum(1), model).norms()  # noqa: E731
    compiled, x = gradrein.compile(step, model, backend="captured"), torch.randn(3, 4)
    for _ in range(3):
        compiled(x)
    assert ": captured" in compiled.explain()
    model[2].weight = model[0].weight
    assert torch.equal(compiled(x), step(x))


def test_an_input_that_shares_memory_with_a_weight_after_the_capture():
    model = nn.Linear(4, 4)

    def step_of(model):
        def step(x):
            x.mul_(0.5)
            return gradrein.per_sample(model(x).square().sum(1), model).norms()

        return step

    compiled = gradrein.compile(step_of(model), model, backend="captured")
    for _ in range(3):
        compiled(torch.randn(4, 4))
    twin = copy.deepcopy(model)
    assert torch.equal(compiled(model.weight.data), step_of(twin)(twin.weight.data))


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


def test_another_dtype_while_there_are_gradients():
    model, x = nn.Linear(6, 2), torch.randn(4, 6)
    step = lambda x: gradrein.per_sample(model(x).square().sum(1), model).clip_(0.3)  # noqa: E731
    compiled = gradrein.compile(step, model, backend="captured")
    compiled(x)
    model.double()
    assert compiled(x.double()).dtype == torch.float64


def classifier(backend):
    model = nn.Linear(6, 3)
    step = lambda x, y: gradrein.per_sample(F.cross_entropy(model(x), y, reduction="none"), model).clip_(0.3)  # noqa: E731
    return model, gradrein.compile(step, model, backend=backend)


@pytest.mark.parametrize("backend", ["captured", pytest.param("inductor", marks=needs_compiler)])
def test_a_target_that_is_out_of_range(backend):
    model, compiled = classifier(backend)
    for _ in range(2):
        compiled(torch.randn(4, 6), torch.tensor([0, 1, 2, -100]))
    model.zero_grad()
    for wrong in (7, -5):
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(torch.randn(4, 6), torch.tensor([wrong, 1, 2, 0]))
    assert model.weight.grad is None


def test_what_a_compiler_would_not_check_stays_uncompiled():
    model = nn.Linear(6, 1)
    step = lambda x: gradrein.per_sample(  # noqa: E731
        F.binary_cross_entropy(model(x).sigmoid().squeeze(1), torch.ones(len(x)), reduction="none"), model
    ).norms()
    compiled = gradrein.compile(step, model, backend="inductor")
    for _ in range(2):
        compiled(torch.randn(4, 6))
    assert "inductor drops the check of values in `binary_cross_entropy" in compiled.explain()
