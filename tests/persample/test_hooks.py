"""Hooks of every kind are refused; with `allow_opaque` numbers are those of a loop that differentiates each loss."""

import cProfile
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein._torch.hooks import has_hooks
from gradrein.errors import UnsupportedOperationError

B, D = 5, 4


class Net(nn.Module):
    """A net whose values can be hooked: between its layers, or made from a parameter."""

    def __init__(self, where):
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


# Hooks ----------------------------------------------------------------------------------------------------------------
# Each is made anew for every run: some count.


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


def looks():
    seen = []
    return lambda g: seen.append(g.norm())


HOOKS = [adds_the_norm, through_data, every_second_time, looks, lambda: torch.square]


def on_tensor(hook):
    return lambda value: value.register_hook(hook())


def on_node_before(hook):
    changed = replacing(hook())
    return lambda value: value.grad_fn.register_prehook(changed)


def on_node_after(hook):
    changed = replacing(hook())
    return lambda value: value.grad_fn.register_hook(lambda sent, _: changed(sent))


def in_a_thread(hook):
    """Nodes and hooks are numbered by thread."""

    def register(value):
        thread = threading.Thread(target=value.register_hook, args=(hook(),))
        thread.start()
        thread.join()

    return register


def replacing(hook):
    def changed(gradients):
        found = hook(gradients[0])
        return None if found is None else (found, *gradients[1:])

    return changed


PLACES = ["hidden", "view", "weight", "product", "losses"]
WAYS = [on_tensor, on_node_before, on_node_after, in_a_thread]


def x_of(seed=0):
    return 3 * torch.randn(B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def net(where):
    torch.manual_seed(0)
    return Net(where).double()


def loop(model, losses):
    """Return what each loss alone gives."""
    names, leaves = zip(*model.named_parameters(), strict=True)
    rows = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses.unbind()]
    return {name: torch.stack(found) for name, found in zip(names, zip(*rows, strict=True), strict=True)}


def asked(losses, parameters, **options):
    """Return the per-sample gradients of each loss alone, which are refused unless that is allowed."""
    with pytest.raises(UnsupportedOperationError, match="a hook is registered on .* Or pass allow_opaque=True"):
        gradrein.per_sample(losses, parameters, **options)
    return gradrein.per_sample(losses, parameters, allow_opaque=True, **options)


def check(make, register):
    """Compare with a loop over a second graph, with hooks of its own."""
    model = make()
    model.register = register()
    expected = loop(model, model(x_of()))
    model.register = register()
    check_queries(asked(model(x_of()), model), model, expected)


def check_queries(ps, model, expected):
    rows = torch.cat([one.flatten(1) for one in expected.values()], 1)
    found = torch.cat([ps.grads()[name].flatten(1) for name in expected], 1)
    torch.testing.assert_close(found, rows)
    torch.testing.assert_close(ps.norms(), rows.norm(dim=1))
    limit = float(rows.norm(dim=1).median()) or 1.0
    model.zero_grad()
    ps.clip_(limit)
    factors = (limit / rows.norm(dim=1).clamp(min=1e-300)).clamp(max=1) / B
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), factors @ rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", PLACES)
def test_hooks_on_values_and_ops(where, way):
    if where == "losses" and way in (on_node_before, on_node_after):
        pytest.skip("the loop differentiates views of the losses, which are other ops")
    for hook in HOOKS:
        check(lambda: net(where), lambda hook=hook: way(hook))


def test_hooks_on_parameters():
    """One of them is used directly, one through a transposed product."""
    for hook in HOOKS:
        model = net("")
        handles = [parameter.register_hook(hook()) for parameter in model.parameters()]
        expected = loop(model, model(x_of()))
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.register_hook(hook())
        check_queries(asked(model(x_of()), model), model, expected)
    with pytest.raises(UnsupportedOperationError, match="on `a.weight`") as caught:
        gradrein.per_sample(model(x_of()), model)
    assert caught.value.where == "a.weight"


def test_a_hook_that_was_removed_is_no_hook():
    model = net("hidden")
    model.register = lambda h: h.register_hook(lambda g: 2 * g).remove()
    model.a.weight.register_hook(lambda g: 2 * g).remove()
    check_queries(gradrein.per_sample(model(x_of()), model), model, loop(model, model(x_of())))


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_tensors_at_once(mode):
    """torch itself does not run those that wait for all gradients of leaves but in backward()."""
    model, seen = net(""), []
    handle = torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), seen.append, mode=mode)
    if mode == "all":
        with pytest.raises(UnsupportedOperationError, match="register_multi_grad_hook"):
            gradrein.per_sample(model(x_of()), model, allow_opaque=True)
        handle.remove()
        return
    expected = loop(model, model(x_of()))
    before = list(seen)
    seen.clear()
    check_queries(asked(model(x_of()), model), model, expected)
    assert len(seen) == len(before)


REGISTER = ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("layer", ["a", ""])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_of_modules(register, layer):
    for change in (lambda g: None, lambda g: g * g.norm()):
        model = net("")

        def hook(_, *gradients, change=change):
            first, *others = gradients[0]
            found = None if first is None else change(first)
            return None if found is None else (found, *others)

        getattr(model.get_submodule(layer), register)(hook)
        x = x_of().requires_grad_()  # else torch warns
        expected = loop(model, model(x))
        check_queries(asked(model(x), model), model, expected)


def test_hooks_under_a_checkpoint():
    model = net("")

    def region(x):
        h = torch.tanh(model.a(x))
        h.register_hook(lambda g: g * g.norm())
        return model.b(h)

    def losses():
        return checkpoint(region, x_of(), use_reentrant=False).square().sum(1)

    check_queries(asked(losses(), model), model, loop(model, losses()))


def test_coupling_is_refused_where_there_are_hooks():
    model = net("hidden")
    model.register = lambda h: h.register_hook(lambda g: 2 * g)

    def losses():
        return model(x_of()) + model(x_of()).mean()

    with pytest.raises(UnsupportedOperationError, match="whether samples are kept apart"):
        gradrein.per_sample(losses(), model, allow_opaque=True)
    ps = gradrein.per_sample(losses(), model, allow_coupling=True, allow_opaque=True)
    check_queries(ps, model, loop(model, losses()))


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_hook_and_an_op_that_nothing_is_known_of():
    """Owners would have to be observed, which runs the hook."""
    model, seen = net("hidden"), []
    model.register = lambda h: h.register_hook(lambda g: seen.append(g.clone()))
    check_queries(asked(model(x_of()), model), model, expected := loop(model, model(x_of())))
    torch.testing.assert_close(seen[:B], seen[B:])  # those of the losses and no others
    assert expected
    seen.clear()
    with pytest.raises(UnsupportedOperationError, match="The engine would have to run to find out"):
        gradrein.per_sample(Same.apply(model(x_of())), model, allow_opaque=True)
    assert not seen
    expected = loop(model, Same.apply(model(x_of())))
    ps = gradrein.per_sample(Same.apply(model(x_of())), model, allow_opaque=True, allow_coupling=True)
    check_queries(ps, model, expected)


@pytest.mark.parametrize("where", ["parameter", "product"])
def test_a_hook_that_is_registered_between_the_call_and_the_query(where):
    weight = nn.Parameter(torch.randn(D, D, dtype=torch.float64))
    product = weight * 1.5
    ps = gradrein.per_sample((x_of() @ product).square().sum(1), [weight])
    {"parameter": weight, "product": product}[where].register_hook(lambda g: g * g.norm())
    with pytest.raises(UnsupportedOperationError, match="since"):
        ps.grads()


def test_hooks_on_inputs_are_not_run():
    model, x, calls = net(""), x_of().requires_grad_(), []
    x.register_hook(lambda g: calls.append(1))
    expected = loop(model, model(x))
    check_queries(gradrein.per_sample(model(x), model), model, expected)
    assert not calls


# The search -----------------------------------------------------------------------------------------------------------


def hooked_node(hook):
    value = torch.ones(3, requires_grad=True) * 2
    value.register_hook(hook)
    return value


def test_the_search_leaves_a_profiler_at_work():
    value, plain = hooked_node(lambda g: None), torch.ones(3, requires_grad=True) * 2
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


# The numbers that torch gives to hooks, on which the proof that there are none rests -------------------------------------


def test_hooks_of_others_in_every_step_are_no_reason_to_ask_the_engine():
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    for _ in range(3):
        other.register_forward_hook(lambda *_: None)
        hidden = other(torch.randn(5, 3))
        hidden.register_hook(lambda grad: 2 * grad)
        hidden.sum().backward()
        assert "proved" in gradrein.per_sample(layer(torch.randn(5, 3)).square().sum(1), layer).plan()
