"""Memory of stored gradients is used again, and never while anything refers to it."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import bridle
from bridle.persample.representations.buffers import Buffers, buffers_of

from .oracle import loop

B, T, D = 16, 64, 64


def linear():
    return nn.Linear(D, D, bias=False)


def convolution():
    return nn.Conv2d(8, 64, 3, padding=1, bias=False)


def data(model):
    return torch.randn(B, T, D) if isinstance(model, nn.Linear) else torch.randn(B, 8, 12, 12)


def losses(model, x):
    return model(x).square().flatten(1).mean(1)


def stored(model, x, **options):
    """Return what was split, with its gradients stored."""
    ps = bridle.per_sample(losses(model, x), model, retain_graph=False, **options)
    assert ps._forms["weight"].stored is not None or options
    return ps


def kept(model):
    return [buffer.memory.data_ptr() for buffer in buffers_of(model.parameters())._kept]


@pytest.fixture(params=[linear, convolution], ids=["linear", "convolution"])
def model(request):
    return request.param()


def expected(model, x):
    return loop(losses(model, x), dict(model.named_parameters()))["weight"]


def test_a_step_uses_the_memory_of_the_one_before(model):
    first = stored(model, data(model))
    where = kept(model)
    assert where == [first._forms["weight"].dense().data_ptr()]
    del first
    for _ in range(3):
        x = data(model)
        ps = stored(model, x)
        assert kept(model) == where
        torch.testing.assert_close(ps.grads()["weight"], expected(model, x))
        del ps


@pytest.mark.parametrize("retain_graph", [True, False])
def test_clipped_sums_are_those_of_a_model_without_buffers(model, retain_graph):
    for _ in range(3):
        x, fresh = data(model), copy.deepcopy(model)
        for one in (model, fresh):
            one.zero_grad()
            bridle.per_sample(losses(one, x), one, retain_graph=retain_graph).clip_(0.01)
        assert torch.equal(model.weight.grad, fresh.weight.grad)


HOLD = {
    "the result": lambda ps: ps,
    "gradients": lambda ps: ps.grads()["weight"],
    "a block": lambda ps: next(iter(ps.stream(samples=2)))[2],
    "a view": lambda ps: ps.grads()["weight"][3, :1],
    "an array": lambda ps: ps.grads()["weight"].numpy(),
    "a storage": lambda ps: ps.grads()["weight"].untyped_storage(),
    "a capsule": lambda ps: torch.utils.dlpack.to_dlpack(ps.grads()["weight"]),
}


def read(held):
    if isinstance(held, bridle.persample.PerSample):
        return held.grads()["weight"].clone()
    if isinstance(held, torch.UntypedStorage):
        return torch.tensor([], dtype=torch.uint8).set_(held).clone()
    return torch.as_tensor(held).clone()


@pytest.mark.parametrize("hold", [name for name in HOLD if name != "a capsule"])
def test_memory_that_is_still_held_is_left_alone(model, hold):
    ps = stored(model, data(model))
    held = HOLD[hold](ps)
    before = read(held)
    del ps
    for _ in range(3):
        x = data(model)
        other = stored(model, x)
        torch.testing.assert_close(other.grads()["weight"], expected(model, x))
        del other
    assert torch.equal(read(held), before)


def test_memory_behind_a_capsule_is_left_alone(model):
    ps = stored(model, data(model))
    capsule, before = HOLD["a capsule"](ps), ps.grads()["weight"].clone()
    del ps
    stored(model, data(model))
    assert torch.equal(torch.utils.dlpack.from_dlpack(capsule), before)


def test_memory_goes_with_the_model(model):
    stored(model, data(model))
    memory = weakref.ref(buffers_of(model.parameters())._kept[0].memory)
    assert memory() is not None
    model.weight = None
    gc.collect()
    assert memory() is None


def test_memory_that_a_call_did_not_use_is_freed(model):
    stored(model, data(model))
    assert len(kept(model)) == 1
    for size in (B + 1, B + 2, B + 3):
        stored(model, torch.cat([data(model)] * 2)[:size])
        assert len(kept(model)) <= 2  # of this call and of the one before
    stored(model, data(model), memory_budget=0)
    stored(model, data(model), memory_budget=0)
    assert kept(model) == []


def test_small_blocks_and_traced_steps_get_none():
    buffers = Buffers()
    cpu = torch.device("cpu")
    assert buffers.take((4, 4), torch.float32, cpu) is None
    assert buffers.take((1024, 1024), torch.float32, torch.device("meta")) is None
    first = buffers.take((1024, 1024), torch.float32, cpu)
    assert buffers.take((1024, 1024), torch.float32, cpu).data_ptr() != first.data_ptr()
    where = first.data_ptr()
    del first
    assert buffers.take((2, 512, 1024), torch.float32, cpu).data_ptr() == where
    assert buffers.take((1024, 1024), torch.float64, cpu).data_ptr() != where


def test_threads_do_not_share_memory(model):
    errors = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(5):
                x = torch.randn(data(model).shape, generator=generator)
                norms = stored(model, x).norms()
                torch.testing.assert_close(norms, expected(model, x).flatten(1).norm(dim=1), rtol=1e-4, atol=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
