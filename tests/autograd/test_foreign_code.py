"""What other people's code does around a backward pass: overridden methods, own exceptions, scripts, containers."""

import collections

import pytest
import torch
from mistakes import MISTAKES, Net
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import gradrein
from functions import function
from gradrein import errors


@pytest.fixture
def leaf():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


# -- modules whose methods are not torch's ------------------------------------------------------------------


class MineError(Exception):
    """Raised only by the user code in these tests."""


def raising(*_args, **_kwargs):
    raise MineError


OVERRIDES = {
    "names": {"named_parameters": raising},
    "every attribute": {"__getattribute__": raising},
    "truth": {"__len__": raising, "__bool__": raising, "__eq__": raising, "__hash__": raising},
}


def guest(methods):
    module = nn.Linear(2, 2)
    module.__class__ = type("Guest", (nn.Linear,), methods)
    return module


def split_and_written():
    """A view of which torch refuses to say what made it: its base was written to."""
    base = torch.ones(4, requires_grad=True) * 1
    parts = base.split(2)
    base.mul_(2)
    return parts


def dead_wrappers():
    kept = []
    torch.func.grad(lambda x: (kept.append(x * 2), x.sum())[1])(torch.ones(3))
    torch.func.vmap(lambda x: (kept.append(x * 2), x)[1])(torch.ones(3, 2))
    return kept


BYSTANDERS = {name: lambda methods=methods: guest(methods) for name, methods in OVERRIDES.items()}
BYSTANDERS |= {"a view of what was written to": split_and_written, "what transforms left behind": dead_wrappers}


@pytest.mark.parametrize("bystander", BYSTANDERS)
@pytest.mark.parametrize("case", [case.values[0] for case in MISTAKES], ids=lambda case: case.__name__)
def test_what_cannot_be_read_hides_no_error(case, bystander):
    present = BYSTANDERS[bystander]()  # noqa: F841 - alive is all it has to be
    kind = errors.BackwardError if bystander not in OVERRIDES else RuntimeError  # without its cause, where need be
    with pytest.raises(kind):
        case(Net())


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_module_that_cannot_be_read_stops_no_trace(override, leaf):
    present = guest(OVERRIDES[override])  # noqa: F841
    net = Net()
    names = [node.parameter for node in gradrein.trace(net(leaf[None]).sum()).nodes if node.parameter]
    assert "Net.head.bias" in names


TORCHS_WORDS = [
    "input 0 appears to not have been used in the graph",
    "a tensor was modified by an inplace operation",
    "Trying to backward through the graph a second time",
    "it does not require grad and does not have a grad_fn",
]


class OwnError(RuntimeError):
    pass


@pytest.mark.parametrize("kind", [RuntimeError, OwnError])
@pytest.mark.parametrize("text", TORCHS_WORDS)
def test_an_own_exception_with_torchs_text_stays_what_it_is(text, kind, leaf):
    hidden = leaf * 2
    hidden.register_hook(raises(kind, text))
    with pytest.raises(kind) as caught:
        gradrein.backward(hidden.sum())
    assert type(caught.value) is kind
    assert str(caught.value) == text


def test_torchs_error_about_a_run_inside_a_backward_is_not_diagnosed_as_one_of_this_run(leaf):
    def inner(grad):
        with torch.enable_grad():
            first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
            return torch.autograd.grad(first.sum(), second)[0]

    with pytest.raises(RuntimeError, match="appears to not have been used") as caught:
        gradrein.backward(own_function(inner)(leaf).sum())
    assert type(caught.value) is RuntimeError


# -- gradients and the compiler ------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [["text"], [1.0, 2.0], torch.ones(3).numpy(), [torch.ones(3), "text"]])
def test_what_is_no_gradient_is_a_type_error_before_it_is_one_too_many(given, leaf):
    for backward in (torch.autograd.backward, gradrein.backward):
        if len(given) == 2 and backward is torch.autograd.backward and isinstance(given[0], torch.Tensor):
            continue  # torch does not look at what it drops
        with pytest.raises(TypeError, match="gradients can be either Tensors or None, but got"):
            backward(leaf * 2, given)


def test_sizes_that_are_not_known_while_tracing():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        sizes = [mode.shape_env.create_unbacked_symint() for _ in range(2)]
        x = torch.ones(sizes[0], requires_grad=True)
        (found,) = gradrein.grad(x * x, x, torch.ones(sizes[1]))
    assert found.dim() == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [torch.autograd.grad, gradrein.grad])
@pytest.mark.needs("trace_autograd_ops")
def test_compiled_whole_where_torchs_is(grad):
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def double(x):
        return grad({"loss": x.square().sum()}["loss"], {"x": x})["x"] * 2

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert torch.equal(double(torch.ones(3, requires_grad=True)), torch.full((3,), 4.0))
    assert counter.frame_count == 1


# -- containers ----------------------------------------------------------------------------------------------


DICTS = pytest.mark.needs("dicts for torch.autograd.grad")
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


@pytest.mark.parametrize(
    "container", [*[name for name in CONTAINERS if name != "dict"], pytest.param("dict", marks=DICTS), "Bag"], ids=str
)
@pytest.mark.parametrize("of", ["parameters", "inner"])
def test_the_result_has_the_form_that_torch_gives_it(container, of):
    if of == "inner" and container == "ParameterList":
        pytest.skip("holds parameters only")
    make = Bag if container == "Bag" else CONTAINERS[container]
    first, second = (nn.Parameter(torch.ones(2) * n) for n in (1, 2))
    values = [first, second] if of == "parameters" else [first * 1, second * 1]
    loss = (values[0] * values[1].square()).sum()
    expected = torch.autograd.grad(loss, make(values), retain_graph=True)
    found = gradrein.grad(loss, make(values), retain_graph=True)
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
    assert list(gradrein.grad(loss, module)) == [name for name, _ in module.named_parameters()]


# -- exceptions of the user's own, in a batch ----------------------------------------------------------------


def raises(kind, text):
    def run(*_):
        raise kind(text)

    return run


def own_function(action):
    return function("Own", lambda x: x * 1, lambda grad, _: action(grad)).apply


# -- torch.jit.script ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_scripts_take_ours_where_they_take_torchs():
    def squared(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        found = gradrein.grad([y.sum()], [x])[0]
        assert found is not None
        gradrein.backward([(x * x).sum()])
        return found

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    script = torch.jit.script(squared)
    assert torch.equal(script(x), 2 * x.detach())
    assert torch.equal(x.grad, 2 * x.detach())
    assert "aten::grad" in str(script.graph)
