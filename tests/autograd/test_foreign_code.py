"""What other people's code does around a backward pass: overridden methods, own exceptions, scripts, containers."""

import collections
import warnings

import pytest
import torch
from torch import nn

import bridle
from bridle import errors, graph


@pytest.fixture
def leaf():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


# -- modules whose methods are not torch's ------------------------------------------------------------------


class MineError(Exception):
    """Raised by nobody but the code under test's guests."""


def raising(*_args, **_kwargs):
    raise MineError


def old_signature(self, prefix="", recurse=True):
    return nn.Module.named_parameters(self, prefix, recurse)


OVERRIDES = {
    "named_parameters, as it was": {"named_parameters": old_signature},
    "named_parameters, raising": {"named_parameters": raising, "parameters": raising},
    "named_buffers": {"named_buffers": raising},
    "modules": {"named_modules": raising, "modules": raising},
    "children": {"named_children": raising, "children": [1, 2]},
    "attributes": {"__getattr__": raising},
    "every attribute": {"__getattribute__": raising},
    "length and truth": {"__len__": raising, "__bool__": raising, "__eq__": raising, "__hash__": raising},
    "no entries": {"_parameters": property(raising)},
}


def guest(methods):
    module = nn.Linear(2, 2)
    module.__class__ = type("Guest", (nn.Linear,), methods)
    return module


def unused(leaf):
    bridle.grad(leaf.sum(), torch.ones(2, requires_grad=True))


def non_scalar(leaf):
    bridle.backward(leaf * 2)


def second_pass(leaf):
    loss = leaf.exp().sum()
    bridle.backward(loss)
    bridle.backward(loss)


def no_graph(leaf):
    bridle.backward(leaf.detach().sum())


def stale(leaf):
    hidden = leaf.exp()
    loss = hidden.square().sum()
    hidden.mul_(2)
    bridle.backward(loss)


def shape(leaf):
    bridle.backward(leaf * 2, torch.ones(2))


def dtype(leaf):
    bridle.backward(leaf * 2, torch.ones(3, dtype=torch.complex64))


def number(leaf):
    bridle.backward([leaf * 2, leaf * 3], [torch.ones(3)])


MISTAKES = {
    unused: errors.UnusedInputError,
    non_scalar: errors.NonScalarOutputError,
    second_pass: errors.GraphFreedError,
    no_graph: errors.NoGraphError,
    stale: errors.InplaceModifiedError,
    shape: errors.GradientMismatchError,
    dtype: errors.GradientMismatchError,
    number: errors.GradientMismatchError,
}


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_module_with_methods_of_its_own_changes_no_error(mistake, override, leaf):
    present = guest(OVERRIDES[override])  # noqa: F841 - alive is all it has to be
    with pytest.raises(MISTAKES[mistake]):
        mistake(leaf)


def test_names_are_found_behind_an_override():
    net = nn.Sequential(guest({"named_parameters": raising, "named_buffers": raising}))
    assert graph.find_names(net).of(net._modules["0"]._parameters["bias"]) == "0.bias"


def test_a_module_that_contains_itself_and_one_that_shares():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].owner, net[0].twin = net, net[0]
    assert graph.find_names(net).of(net[0].weight) == "0.weight"


def test_names_in_a_scripted_module():
    net = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net)
    assert graph.find_names(scripted).of(next(scripted.parameters())) == "0.weight"


def test_variables_that_are_no_dict_of_names(leaf):
    class Strange(dict):
        def items(self):
            raise MineError

    source = "bridle.backward(leaf * 2)"
    with pytest.raises(errors.NonScalarOutputError):
        exec(source, {"bridle": bridle, "leaf": leaf}, Strange())


def test_a_subclass_does_not_see_the_search_for_a_cause(leaf):
    class Watching(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    bystander = torch.ones(2, requires_grad=True).as_subclass(Watching) * 2  # noqa: F841
    Watching.seen = 0
    with pytest.raises(errors.UnusedInputError):
        unused(leaf)
    assert Watching.seen == 0


# -- containers ----------------------------------------------------------------------------------------------


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda values: (value for value in values),
    "deque": collections.deque,
    "dict view": lambda values: dict(enumerate(values)).values(),
    "ParameterList": nn.ParameterList,
    "dict": lambda values: {str(index): value for index, value in enumerate(values)},
}


class Bag(nn.Module):
    """A module that is a sequence, in the old way."""

    def __init__(self, values):
        super().__init__()
        self.values = list(values)

    def __getitem__(self, index):
        return self.values[index]


@pytest.mark.parametrize("container", [*CONTAINERS, "Bag"])
@pytest.mark.parametrize("of", ["parameters", "inner"])
def test_the_result_has_the_form_that_torch_gives_it(container, of):
    if of == "inner" and container == "ParameterList":
        pytest.skip("holds parameters only")
    make = Bag if container == "Bag" else CONTAINERS[container]
    first, second = (nn.Parameter(torch.ones(2) * n) for n in (1, 2))
    values = [first, second] if of == "parameters" else [first * 1, second * 1]
    loss = (values[0] * values[1].square()).sum()
    expected = torch.autograd.grad(loss, make(values), retain_graph=True)
    found = bridle.grad(loss, make(values), retain_graph=True)
    assert type(found) is type(expected)
    for theirs, ours in zip(_values(expected), _values(found), strict=True):
        assert torch.equal(theirs, ours)


def _values(found):
    return list(found.values()) if isinstance(found, dict) else list(found)


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(2, 2)), nn.ParameterDict({"a": torch.ones(2)})])
def test_a_module_that_torch_does_not_take_stands_for_its_parameters(module):
    loss = sum(p.sum() for p in module.parameters())
    with pytest.raises((TypeError, RuntimeError)):
        torch.autograd.grad(loss, module, retain_graph=True)
    assert list(bridle.grad(loss, module)) == [name for name, _ in module.named_parameters()]


def test_backward_into_a_parameter_list(leaf):
    held = nn.ParameterList([torch.ones(3), torch.ones(3)])
    bridle.backward((held[0] * held[1] * leaf).sum(), inputs=held)
    assert leaf.grad is None
    assert torch.equal(held[0].grad, leaf.detach())


def test_an_empty_parameter_list_is_refused_as_in_torch(leaf):
    for grad in (torch.autograd.grad, bridle.grad):
        with pytest.raises(RuntimeError, match="cannot be empty"):
            grad(leaf.sum(), nn.ParameterList())


# -- exceptions of the user's own, in a batch ----------------------------------------------------------------


def raises(kind, text):
    def run(*_):
        raise kind(text)

    return run


def wrong_shapes(grad):
    return grad + torch.ones(7)


def no_such_index(grad):
    return grad[9]


OWN = {
    "RuntimeError": raises(RuntimeError, "mine"),
    "IndexError": raises(IndexError, "mine"),
    "ValueError": raises(ValueError, "mine"),
    "NotImplementedError": raises(NotImplementedError, "mine"),
    "KeyError": lambda _: {}["mine"],
    "with torch's words": raises(RuntimeError, "vmap: Batching rule not implemented for my own op"),
    "a mistake in shapes": wrong_shapes,
    "an index too high": no_such_index,
    "from a with block": lambda grad: torch.no_grad()(raises(RuntimeError, "mine"))(grad),
}


def own_function(action, calls):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            calls.append(1)
            return action(grad)

    return Own.apply


def own_hook(action, calls):
    def apply(x):
        y = x * 1
        y.register_hook(lambda grad: (calls.append(1), action(grad))[1])
        return y

    return apply


def own_unpack(action, calls):
    def apply(x):
        def unpack(value):
            calls.append(1)
            action(value)
            return value

        with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
            return x.exp()

    return apply


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("place", [own_function, own_hook, own_unpack])
@pytest.mark.parametrize("name", OWN)
def test_the_users_own_exception_passes_in_a_batch_after_one_call(name, place, retain_graph, leaf):
    def told(grad):
        calls = []
        out = place(OWN[name], calls)(leaf.exp()).square()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            grad(out, leaf, torch.eye(3), is_grads_batched=True, retain_graph=retain_graph)
        return type(caught.value), str(caught.value), len(calls)

    assert told(bridle.grad) == told(torch.autograd.grad)


NONSENSE = {
    "two for one": lambda grad: (grad, grad),
    "none for one": lambda _: (),
    "a string": lambda _: "text",
    "another shape": lambda grad: grad.sum(),
    "another dtype": lambda grad: grad.to(torch.complex64),
}


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("place", [own_function, own_hook])
@pytest.mark.parametrize("name", NONSENSE)
def test_what_returns_nonsense_in_a_batch_is_told_after_one_call(name, place, retain_graph, leaf):
    def told(grad):
        calls = []
        out = place(NONSENSE[name], calls)(leaf.exp()).square()
        try:
            grad(out, leaf, torch.eye(3), is_grads_batched=True, retain_graph=retain_graph)
        except Exception as error:
            kinds = (RuntimeError, TypeError)
            return next(kind for kind in kinds if isinstance(error, kind)), str(error).splitlines()[0], len(calls)
        return "no error"

    assert told(bridle.grad) == told(torch.autograd.grad)


def test_an_own_exception_from_the_loop_over_a_node(leaf):
    calls = []

    def looks(grad):
        calls.append(1)
        if float(grad.sum()) > 1:  # cannot be vectorised, so called once per gradient from here on
            raise RuntimeError("mine")
        return grad

    out = own_function(looks, [])(leaf)
    with pytest.raises(RuntimeError, match="^mine$"):
        bridle.grad(out, leaf, torch.eye(3) * 2, is_grads_batched=True)
    assert len(calls) == 2


# -- torch.jit.script ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_scripts_take_ours_where_they_take_torchs():
    def squared(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        found = bridle.grad([y.sum()], [x])[0]
        assert found is not None
        bridle.backward([(x * x).sum()])
        return found

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    script = torch.jit.script(squared)
    assert torch.equal(script(x), 2 * x.detach())
    assert torch.equal(x.grad, 2 * x.detach())
    assert "aten::grad" in str(script.graph)
