"""Once no hook is left on any tensor or node, graphs are not searched; what is registered later is seen."""

import gc
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import gradrein
from gradrein._torch.live_hooks import may_be_hooks
from gradrein.persample.cuts import hooks

B, D = 4, 3


@pytest.fixture(autouse=True)
def _few_searches(monkeypatch):
    monkeypatch.setattr(hooks, "_SEARCHES", 2)
    monkeypatch.setattr(hooks, "_looked", hooks._Looked())
    gc.collect()
    gc.freeze()  # whatever other tests have left is not looked at
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)


@pytest.fixture
def searches(monkeypatch):
    """Count the graphs that are searched."""
    done, search = [], hooks.has_hooks

    def counted(nodes, *known):
        done.append(search(nodes, *known))
        return done[-1]

    monkeypatch.setattr(hooks, "has_hooks", counted)
    return done


@contextmanager
def registered(register, *args):
    handle = register(*args)
    try:
        yield handle
    finally:
        handle.remove()


def norms(model, x, hook=None):
    hidden = model[0](x)
    if hook is not None:
        hidden.register_hook(hook)
    return gradrein.per_sample(model[1](hidden).square().sum(1), model).norms()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)).double(), torch.randn(B, D, dtype=torch.double)


def test_hooks_of_modules_end_the_search(searches):
    model, x = net()
    with registered(model.register_forward_hook, lambda *_: None):
        for _ in range(6):
            norms(model, x)
    assert searches == [False] * 2  # then the process was looked at, once


def test_a_hook_that_comes_later_is_seen(searches):
    model, x = net()
    with registered(model.register_forward_hook, lambda *_: None):
        plain = [norms(model, x) for _ in range(4)][-1]
        before = len(searches)
        doubled = norms(model, x, lambda g: 2 * g)
    assert searches[before:] == [True]
    assert not torch.allclose(doubled, plain)
    each = []
    for sample in range(B):
        hidden = model[0](x)
        hidden.register_hook(lambda g: 2 * g)
        grads = torch.autograd.grad(model[1](hidden).square().sum(1)[sample], list(model.parameters()))
        each.append(torch.cat([g.flatten() for g in grads]).norm())
    torch.testing.assert_close(doubled, torch.stack(each))


def test_a_hook_that_was_there_before_is_seen_on_an_old_graph(searches):
    model, x = net()
    old = model[0](x)
    old.register_hook(lambda g: 2 * g)
    found = [norms(model, x) for _ in range(6)][-1]
    assert searches == [False] * 6  # it is alive
    doubled = gradrein.per_sample(model[1](old).square().sum(1), model).norms()
    assert searches[-1]
    assert not torch.allclose(doubled, found)


def on_a_tensor():
    kept = torch.ones(2, requires_grad=True) * 2
    kept.register_hook(lambda g: g)
    return kept


def on_a_node():
    kept = torch.ones(2, requires_grad=True) * 2
    kept.grad_fn.register_hook(lambda *_: None)
    return kept


def before_a_node():
    kept = torch.ones(2, requires_grad=True) * 2
    kept.grad_fn.register_prehook(len)
    return kept


def on_a_leaf():
    kept = torch.ones(2, requires_grad=True)
    kept.register_hook(lambda g: g)
    return kept


def on_a_freed_tensor():
    kept = torch.ones(2, requires_grad=True) * 2
    kept.register_hook(lambda g: g)
    return kept.sum()


def on_several():
    kept = [torch.ones(2, requires_grad=True) * 2 for _ in range(2)]
    torch.autograd.graph.register_multi_grad_hook(kept, lambda _: None)
    return kept


def by_a_module():
    layer = nn.Sequential(nn.Linear(2, 2))
    layer.register_full_backward_hook(lambda *_: None)
    return layer(torch.ones(1, 2, requires_grad=True))


def on_a_tensor_whose_hooks_a_module_knows():
    kept, owner = on_a_tensor(), nn.Module()
    owner.my_hooks = owner._own_hooks = kept._backward_hooks
    return kept, owner


class Ordered(OrderedDict):
    """A dict of another kind, whose own methods are not to be called."""

    def items(self):
        raise AssertionError


def on_a_leaf_with_another_dict():
    kept = torch.ones(2, requires_grad=True)
    kept._backward_hooks = Ordered()
    kept.register_hook(lambda g: g)
    return kept


@pytest.mark.parametrize(
    "make",
    [
        on_a_tensor,
        on_a_node,
        before_a_node,
        on_a_leaf,
        on_a_freed_tensor,
        on_several,
        by_a_module,
        on_a_tensor_whose_hooks_a_module_knows,
        on_a_leaf_with_another_dict,
    ],
)
def test_hooks_that_are_alive(make):
    assert not may_be_hooks()
    kept = make()
    assert may_be_hooks()
    del kept
    gc.collect()
    assert not may_be_hooks()


def test_hooks_of_modules_and_optimizers_do_not_count():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with (
        registered(layer.register_forward_hook, len),
        registered(layer.register_state_dict_pre_hook, len),
        registered(layer.register_full_backward_hook, len),
        registered(optimizer.register_step_post_hook, len),
        registered(nn.modules.module.register_module_forward_hook, lambda *_: None),
        registered(register_optimizer_step_pre_hook, len),
    ):
        assert not may_be_hooks()


def test_a_hook_that_is_being_registered():
    waiting = OrderedDict()
    handle = RemovableHandle(waiting)
    assert may_be_hooks()
    del handle
    assert not may_be_hooks()


def test_frozen_objects_are_not_told(monkeypatch):
    assert not may_be_hooks()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    assert may_be_hooks()


def test_what_is_kept_in_other_dicts_is_not_called():
    class Key:
        number = 1

        def __hash__(self):
            return self.number

        @property
        def __class__(self):
            raise AssertionError

    key = Key()
    kept = OrderedDict({key: len})
    key.number = 2  # so that the dict does not find it
    assert not may_be_hooks()
    del kept
