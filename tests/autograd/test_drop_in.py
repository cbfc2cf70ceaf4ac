"""The module as a drop-in for `torch.autograd`, and everything around it that must keep working."""

import gc
import pathlib
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
import gradrein.autograd as autograd

NAMES = [
    *("Function", "NestedIOFunction", "Variable", "variable", "no_grad", "enable_grad", "set_grad_enabled"),
    *("inference_mode", "set_multithreading_enabled", "grad_mode", "detect_anomaly", "set_detect_anomaly"),
    *("gradcheck", "gradgradcheck", "forward_ad", "functional", "graph", "profiler", "_is_checkpoint_valid"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_torchs(name):
    assert getattr(autograd, name) is getattr(torch.autograd, name)


def test_names_that_are_ours():
    assert autograd.backward is gradrein.backward is not torch.autograd.backward
    assert autograd.grad is gradrein.grad is not torch.autograd.grad
    assert set(torch.autograd.__all__) <= set(autograd.__all__) <= set(dir(autograd))


def test_a_name_nobody_has():
    with pytest.raises(AttributeError, match="no_such_name"):
        autograd.no_such_name  # noqa: B018


def model_and_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.randn(5, 3, requires_grad=True)


def gradients(run, backward):
    """Return the gradients that `backward` leaves after `run(model, x)`."""
    model, x = model_and_input()
    backward(run(model, x).square().sum())
    return [t.grad for t in (x, *model.parameters())]


WAYS = {
    "plain": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "compiled": lambda model, x: torch.compile(model, backend="aot_eager")(x),
    "autocast": lambda model, x: torch.autocast("cpu", dtype=torch.bfloat16)(model)(x).float(),
    "inner no_grad": lambda model, x: model(x) * torch.no_grad()(model)(x),
    "hooked": lambda model, x: (model.register_full_backward_hook(lambda *_: None), model(x))[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_gradients_as_torch(way):
    ours = gradients(WAYS[way], gradrein.backward)
    theirs = gradients(WAYS[way], torch.autograd.backward)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Logged(torch.Tensor):
    """A subclass that sees the calls made on it."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_sees_torchs_functions_and_gets_its_gradients():
    x = torch.ones(3, requires_grad=True)
    loss = (x * 2).as_subclass(Logged).sum()
    Logged.seen.clear()
    gradrein.backward(loss, retain_graph=True)
    (found,) = gradrein.grad(loss, x)
    assert torch.autograd.backward in Logged.seen
    assert torch.autograd.grad in Logged.seen
    assert torch.equal(found.as_subclass(torch.Tensor), x.grad.as_subclass(torch.Tensor))


def test_a_subclass_may_return_its_own_result():
    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.autograd.grad:
                return tuple("mine" for _ in args[1])
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Overriding)
    assert gradrein.grad(x, {"x": x}) == {"x": "mine"}


def test_under_a_mode_ours_runs():
    x = torch.ones(3, requires_grad=True)
    with torch.device("cpu"):
        (found,) = gradrein.grad(x * 2, x, torch.eye(3), is_grads_batched=True)
        with pytest.raises(gradrein.errors.GradientMismatchError):
            gradrein.backward(x * 2)
    assert torch.equal(found, 2 * torch.eye(3))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own
def test_called_from_compiled_code():
    model, x = model_and_input()

    @torch.compile(backend="eager")
    def step(x):
        gradrein.backward(model(x).square().sum())
        return gradrein.grad(model(x).square().sum(), model)["0.weight"]

    assert torch.equal(step(x), model[0].weight.grad)


# Nothing stays behind.


def run_backward(model, x):
    gradrein.backward(model(x).sum())


def run_grad(model, x):
    gradrein.grad(model(x).sum(), model)


def run_batched(model, x):
    gradrein.grad(model(x), model, torch.ones(2, 5, 2), is_grads_batched=True)


def run_find_unused(model, x):
    gradrein.autograd.find_unused_parameters(model(x).sum(), model)


@pytest.mark.parametrize("use", [run_backward, run_grad, run_batched, run_find_unused])
def test_graph_and_model_are_gone_afterwards(use):
    model, x = model_and_input()
    hidden = weakref.WeakSet()
    model[1].register_forward_hook(lambda _module, _args, out: hidden.add(out))
    use(model, x)
    gc.collect()
    assert len(hidden) == 0
    alive = weakref.ref(model[0].weight)
    del model, x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", ["backward", "grad", "find_unused_parameters", "detect_nonfinite", *NAMES])
def test_every_name_is_in_the_docs(name):
    page = pathlib.Path(__file__).parents[2] / "docs" / "autograd.md"
    if name != "grad_mode":  # a module torch exports by accident of its layout
        assert f"`{name}`" in page.read_text().partition("## Where each name comes from")[2]
