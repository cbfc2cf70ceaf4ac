"""Hooks of every kind are refused; with `allow_opaque` numbers are those of a loop that differentiates each loss."""

import cProfile
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from functions import function
from gradrein._torch.hooks import has_hooks
from gradrein.errors import UnsupportedOperationError

from .oracle import flat, loop

B, D = 5, 4


class Net(nn.Module):
    """A net whose values can be hooked: between its layers, or made from a parameter."""

    def __init__(self, where=""):
        super().__init__()
        self.where, self.register = where, None
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def hooked(self, where, value):
        if self.register is not None and where == self.where:
            self.register(value)
        return value

    def forward(self, x):
        h = self.hooked("hidden", torch.tanh(self.a(x)))
        h = self.hooked("view", (h * 1.5).view(B, 2, 2)).view(B, D)
        weight = self.hooked("weight", self.b.weight.t())
        weight = self.hooked("product", weight * 1.5)
        return self.hooked("losses", (h @ weight).square().sum(1))


# Hooks, each made anew for every run: some count.


def adds_the_norm():
    return lambda g: g + g.norm()


def through_data():
    def hook(g):
        g.data.mul_(g.data.abs().sum())

    return hook


def every_second_time():
    seen = []

    def hook(g):
        seen.append(1)
        return g * 3 if len(seen) % 2 == 0 else None

    return hook


HOOKS = [adds_the_norm, through_data, every_second_time, lambda: torch.square]


def replacing(hook):
    def changed(gradients):
        found = hook(gradients[0])
        return None if found is None else (found, *gradients[1:])

    return changed


def on_node_after(value, hook):
    changed = replacing(hook)
    value.grad_fn.register_hook(lambda sent, _: changed(sent))


def in_a_thread(value, hook):
    """Nodes and hooks are numbered by thread."""
    thread = threading.Thread(target=value.register_hook, args=(hook,))
    thread.start()
    thread.join()


PLACES = ["hidden", "view", "weight", "product", "losses"]
WAYS = {
    "tensor": lambda value, hook: value.register_hook(hook),
    "before a node": lambda value, hook: value.grad_fn.register_prehook(replacing(hook)),
    "after a node": on_node_after,
    "in a thread": in_a_thread,
}


def x_of():
    return 3 * torch.randn(B, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def asked(losses, parameters):
    """Return the per-sample gradients of each loss alone, which are refused unless that is allowed."""
    with pytest.raises(UnsupportedOperationError, match="a hook is registered on .* Or pass allow_opaque=True"):
        gradrein.per_sample(losses, parameters)
    return gradrein.per_sample(losses, parameters, allow_opaque=True)


def check(ps, model, expected):
    rows = flat(expected)
    torch.testing.assert_close(flat({name: ps.grads()[name] for name in expected}), rows)
    torch.testing.assert_close(ps.norms(), rows.norm(dim=1))
    limit = float(rows.norm(dim=1).median()) or 1.0
    model.zero_grad()
    ps.clip_(limit)
    factors = (limit / rows.norm(dim=1).clamp(min=1e-300)).clamp(max=1) / B
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), factors @ rows)


def each(model, losses):
    return loop(losses, dict(model.named_parameters()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", PLACES)
def test_hooks_on_values_and_ops(where, way):
    if where == "losses" and "node" in way:
        pytest.skip("the loop differentiates views of the losses, which are other ops")
    for hook in HOOKS:
        model = Net(where)
        model.register = lambda value, hook=hook: WAYS[way](value, hook())
        expected = each(model, model(x_of()))  # of a second graph, with hooks of its own
        check(asked(model(x_of()), model), model, expected)


def test_hooks_on_parameters():
    """One of them is used directly, one through a transposed product."""
    for hook in HOOKS:
        model = Net()
        handles = [parameter.register_hook(hook()) for parameter in model.parameters()]
        expected = each(model, model(x_of()))
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.register_hook(hook())
        check(asked(model(x_of()), model), model, expected)
    with pytest.raises(UnsupportedOperationError, match="on `a.weight`") as caught:
        gradrein.per_sample(model(x_of()), model)
    assert caught.value.where == "a.weight"


def test_hooks_that_do_not_matter():
    """Those that were removed, and those on inputs, which do not run."""
    model, x, calls = Net("hidden"), x_of().requires_grad_(), []
    model.register = lambda h: h.register_hook(lambda g: 2 * g).remove()
    model.a.weight.register_hook(lambda g: 2 * g).remove()
    x.register_hook(lambda g: calls.append(1))
    expected = each(model, model(x))
    check(gradrein.per_sample(model(x), model), model, expected)
    assert not calls


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_tensors_at_once(mode):
    """torch itself does not run those that wait for all gradients of leaves but in backward()."""
    model, seen = Net(), []
    handle = torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), seen.append, mode=mode)
    if mode == "all":
        with pytest.raises(UnsupportedOperationError, match="register_multi_grad_hook"):
            gradrein.per_sample(model(x_of()), model, allow_opaque=True)
        handle.remove()
        return
    expected = each(model, model(x_of()))
    before = len(seen)
    check(asked(model(x_of()), model), model, expected)
    assert len(seen) == 2 * before


REGISTER = ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("layer", ["a", ""])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_of_modules(register, layer):
    for change in (lambda g: None, lambda g: g * g.norm()):
        model = Net()

        def hook(_, *gradients, change=change):
            first, *others = gradients[0]
            found = None if first is None else change(first)
            return None if found is None else (found, *others)

        getattr(model.get_submodule(layer), register)(hook)
        x = x_of().requires_grad_()  # else torch warns
        check(asked(model(x), model), model, each(model, model(x)))


def test_hooks_under_a_checkpoint():
    model = Net()

    def region(x):
        h = torch.tanh(model.a(x))
        h.register_hook(lambda g: g * g.norm())
        return model.b(h)

    def losses():
        return checkpoint(region, x_of(), use_reentrant=False).square().sum(1)

    check(asked(losses(), model), model, each(model, losses()))


Same = function("Same", torch.clone, lambda g, _: g)


UNKNOWN = {
    "coupled": (lambda model: model(x_of()) + model(x_of()).mean(), "whether samples are kept apart"),
    "an unknown op": (lambda model: Same.apply(model(x_of())), "The engine would have to run to find out"),
}


@pytest.mark.parametrize(("losses", "text"), UNKNOWN.values(), ids=UNKNOWN)
def test_coupling_is_refused_where_owners_could_only_be_observed(losses, text):
    """That would run the hook."""
    model, seen = Net("hidden"), []
    model.register = lambda h: h.register_hook(lambda g: seen.append(1) or 2 * g)
    with pytest.raises(UnsupportedOperationError, match=text):
        gradrein.per_sample(losses(model), model, allow_opaque=True)
    assert not seen
    ps = gradrein.per_sample(losses(model), model, allow_coupling=True, allow_opaque=True)
    check(ps, model, each(model, losses(model)))


@pytest.mark.parametrize("where", ["parameter", "product"])
def test_a_hook_that_is_registered_between_the_call_and_the_query(where):
    weight = nn.Parameter(torch.randn(D, D))
    product = weight * 1.5
    ps = gradrein.per_sample((x_of() @ product).square().sum(1), [weight])
    {"parameter": weight, "product": product}[where].register_hook(lambda g: g * g.norm())
    with pytest.raises(UnsupportedOperationError, match="since"):
        ps.grads()


def test_the_search_leaves_a_profiler_at_work():
    value, plain = torch.ones(3, requires_grad=True) * 2, torch.ones(3, requires_grad=True) * 2
    value.register_hook(lambda g: None)
    profiler = cProfile.Profile()
    with profiler:
        assert has_hooks([value.grad_fn])
        assert not has_hooks([plain.grad_fn])
        sorted([3, 1, 2])
    assert any("sorted" in str(entry.code) for entry in profiler.getstats())
    events = []
    sys.setprofile(lambda *event: events.append(event[1]))
    try:
        assert has_hooks([value.grad_fn])
        events.clear()
        sorted([3, 1, 2])
    finally:
        sys.setprofile(None)
    assert "c_call" in events


def test_hooks_of_others_in_every_step_are_no_reason_to_ask_the_engine():
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    for _ in range(3):
        other.register_forward_hook(lambda *_: None)
        hidden = other(torch.randn(5, 3))
        hidden.register_hook(lambda grad: 2 * grad)
        hidden.sum().backward()
        assert "proved" in gradrein.per_sample(layer(torch.randn(5, 3)).square().sum(1), layer).plan()
