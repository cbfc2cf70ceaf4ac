"""Memory of stored gradients is used again, and never after anybody else could get hold of it."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import gradrein
from gradrein.persample.representations.buffers import Buffers, Loan, _of_models

from .oracle import loop

B, T, D = 16, 64, 64
CPU = torch.device("cpu")


def linear():
    return nn.Linear(D, D, bias=False)


def convolution():
    return nn.Conv2d(8, 64, 3, padding=1, bias=False)


def data(model):
    return torch.randn(B, T, D) if isinstance(model, nn.Linear) else torch.randn(B, 8, 12, 12)


def losses(model, x):
    return model(x).square().flatten(1).mean(1)


def split(model, x, **options):
    return gradrein.per_sample(losses(model, x), model, **{"retain_graph": False, **options})


def where(ps):
    """Return where the gradients are stored."""
    return ps._forms["weight"].stored.data_ptr()


def free(model):
    return [block.data_ptr() for blocks in _of_models[model]._free.values() for block in blocks]


def expected(model, x):
    return loop(losses(model, x), dict(model.named_parameters()))["weight"]


@pytest.fixture(params=[linear, convolution], ids=["linear", "convolution"])
def model(request):
    return request.param()


def test_a_step_uses_the_memory_of_the_one_before(model):
    ps = split(model, data(model))
    first = where(ps)
    del ps
    for _ in range(3):
        assert free(model) == [first]
        x = data(model)
        ps = split(model, x)
        assert where(ps) == first
        torch.testing.assert_close(ps.norms(), expected(model, x).flatten(1).norm(dim=1))
        del ps


@pytest.mark.parametrize("retain_graph", [True, False])
def test_clipped_sums_are_those_of_a_model_without_buffers(model, retain_graph):
    for _ in range(3):
        x, fresh = data(model), copy.deepcopy(model)
        for one in (model, fresh):
            one.zero_grad()
            gradrein.per_sample(losses(one, x), one, retain_graph=retain_graph).clip_(0.01)
        assert torch.equal(model.weight.grad, fresh.weight.grad)


def test_results_that_live_together_have_their_own_memory(model):
    data_of, results = [data(model) for _ in range(3)], []
    for x in data_of:
        results.append(split(model, x))
    assert len({where(ps) for ps in results}) == 3
    for x, ps in zip(data_of, results, strict=True):
        torch.testing.assert_close(ps.grads()["weight"], expected(model, x))


HOLD = {
    "gradients": lambda ps: ps.grads()["weight"],
    "a block": lambda ps: next(iter(ps.stream(samples=2)))[2],
    "a view": lambda ps: ps.grads()["weight"][3, :1],
    "an array": lambda ps: ps.grads()["weight"].numpy(),
    "a storage": lambda ps: ps.grads()["weight"].untyped_storage(),
    "shared memory": lambda ps: ps.grads()["weight"].share_memory_(),
    "nothing": lambda ps: ps.grads() and None,
}


@pytest.mark.parametrize("hold", HOLD)
def test_memory_that_was_handed_out_is_not_used_again(model, hold):
    ps = split(model, data(model))
    held = HOLD[hold](ps)
    del ps
    assert free(model) == []
    split(model, data(model))
    del held


def test_a_resized_gradient_does_no_harm(model):
    split(model, data(model)).grads()["weight"].untyped_storage().resize_(0)
    x = data(model)
    torch.testing.assert_close(split(model, x).grads()["weight"], expected(model, x))


def test_gradients_look_like_any_others(model):
    split(model, data(model))
    g = split(model, data(model)).grads()["weight"]
    assert g._base is None or g._base.shape == g.shape
    g.mul_(torch.ones(B, *(1,) * (g.dim() - 1), requires_grad=True))  # no view made without grad
    assert g.requires_grad


def test_the_model_can_be_converted_copied_and_swapped(model):
    split(model, data(model))
    other = nn.Parameter(torch.randn_like(model.weight))
    torch.utils.swap_tensors(model.weight, other)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin.weight, model.weight)
    assert twin not in _of_models


def test_results_can_be_copied(model):
    x = data(model)
    ps = split(model, x)
    copies = [copy.deepcopy(ps), pickle.loads(pickle.dumps(ps))]
    del ps
    split(model, data(model)).clip_(1.0)
    for one in copies:
        torch.testing.assert_close(one.grads()["weight"], expected(model, x))


def test_memory_goes_with_the_model():
    model = linear()
    split(model, data(model))
    buffers = weakref.ref(_of_models[model])
    del model
    gc.collect()
    assert buffers() is None


def test_memory_that_no_call_takes_is_freed(model):
    split(model, data(model))
    assert len(free(model)) == 1
    for _ in range(2):
        split(model, data(model), memory_budget=0)
    assert free(model) == []
    assert not any(_of_models[model]._free_before.values())


def test_a_call_that_fails_returns_nothing(model):
    with pytest.raises(gradrein.errors.NonFiniteGradientError):
        split(model, data(model) * torch.nan).clip_(1.0)
    x = data(model)
    torch.testing.assert_close(split(model, x).grads()["weight"], expected(model, x))


def test_parameters_without_a_model_have_none(model):
    ps = gradrein.per_sample(losses(model, data(model)), dict(model.named_parameters()), retain_graph=False)
    assert ps._loan._blocks == []
    assert model not in _of_models


def test_what_a_loan_takes():
    buffers = Buffers()
    loan = buffers.lend()
    assert loan.take((4, 4), torch.float32, CPU) is None
    assert loan.take((1024, 1024), torch.float32, torch.device("meta")) is None
    first = loan.take((1024, 1024), torch.float32, CPU)
    assert loan.take((1024, 1024), torch.float32, CPU) is not first
    buffers.take_back([first])
    assert loan.take((2, 512, 1024), torch.float32, CPU) is not first
    assert loan.take((1024, 1024), torch.float64, CPU) is not first
    assert loan.take((1024, 1024), torch.float32, CPU) is first
    with torch.inference_mode():
        assert loan.take((1024, 1024), torch.float32, CPU) is None
    with TorchFunctionMode():
        assert loan.take((1024, 1024), torch.float32, CPU) is None
    assert Loan().take((1024, 1024), torch.float32, CPU) is None


def test_threads_do_not_share_memory(model):
    errors = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(5):
                x = torch.randn(data(model).shape, generator=generator)
                norms = split(model, x).norms()
                torch.testing.assert_close(norms, expected(model, x).flatten(1).norm(dim=1), rtol=1e-4, atol=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
