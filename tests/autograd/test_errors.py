"""Every error of `backward` and `grad`: its type, torch's first line, the diagnosis, and that it holds nothing alive."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from mistakes import MISTAKES, NO_GRAPH, Net, X
from torch.utils.checkpoint import checkpoint

import gradrein
from functions import function
from gradrein import errors

every_mistake = pytest.mark.parametrize(("run", "kind", "first_line", "texts"), MISTAKES)


@pytest.fixture
def net():
    return Net()


@every_mistake
def test_the_cause_is_named(net, run, kind, first_line, texts):
    with pytest.raises(kind) as caught:
        run(net)
    assert isinstance(caught.value, RuntimeError)
    first, _, rest = str(caught.value).partition("\n")
    assert first_line in first
    assert [text for text in texts if text not in rest] == []
    for copied in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):  # as between processes
        assert (type(copied), str(copied), vars(copied)) == (kind, str(caught.value), vars(caught.value))


def test_causes_are_attributes_as_well(net):
    found = {}
    for case in MISTAKES:
        with pytest.raises(errors.BackwardError) as caught:
            case.values[0](Net())
        found[case.id] = vars(caught.value)
    assert found["unused"]["names"] == ("idle.weight", "idle.bias")
    assert [len(found[name]["crossings"]) for name in ("carried_over", "freed", "freed_by_torch")] == [1, 0, 0]
    assert len(found["stale"]["stale"]) == 2
    assert "no live object shows why" in found["nothing_left_to_see"]["causes"][-1]


def test_what_is_no_output():
    with pytest.raises(TypeError, match="output 0 is a int; expected a Tensor or a GradientEdge"):
        gradrein.backward([5])


def test_unused_parameters(net):
    find = gradrein.autograd.find_unused_parameters
    assert find(net(X).sum(), net) == find(checkpoint(net, X, use_reentrant=False).sum(), net)
    assert find(net(X).sum(), net) == ["idle.weight", "idle.bias"]
    assert len(find(torch.ones(1), net)) == 6
    assert find([net(X).sum(), net.idle(X).sum()], net) == []
    with pytest.raises(errors.UnsupportedOperationError, match="reentrant checkpoint") as caught:
        find(checkpoint(net, X.clone().requires_grad_(), use_reentrant=True).sum(), net)
    assert caught.value.op == "CheckpointFunctionBackward"
    net.idle.requires_grad_(False)
    assert find(net(X).sum(), net) == []


# What is not ours to explain


def boom(*_):
    raise RuntimeError("boom")


def test_other_errors_pass_through_untouched():
    with pytest.raises(RuntimeError, match=r"^boom$") as caught:
        gradrein.backward(function("Boom", lambda x: x * 1, boom).apply(torch.ones(1, requires_grad=True)))
    assert not isinstance(caught.value, errors.GradreinError)


def test_the_original_error_is_the_cause():
    with pytest.raises(errors.NoGraphError) as caught:
        gradrein.backward(torch.ones(1))
    assert type(caught.value.__cause__) is RuntimeError


def test_a_failing_diagnosis_does_not_hide_torchs_error(monkeypatch):
    def fail(*_):
        raise ValueError("cannot look")

    monkeypatch.setattr("gradrein.graph.find_names", fail)
    with pytest.raises(RuntimeError, match=NO_GRAPH) as caught:
        gradrein.backward(torch.ones(1))
    assert not isinstance(caught.value, errors.GradreinError)


# A caught error holds nothing: when the except block ends, the graph is gone, without the collector.


@pytest.fixture
def without_collector():
    checkpoint(torch.exp, torch.ones(1), use_reentrant=False)  # its first call imports the compiler, which holds frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def unknown(net):
    hidden = net(X).exp()
    hidden.register_hook(lambda _: np.ones(3)[7])
    gradrein.backward(hidden.sum())


def replayed(net):
    x = X.clone().requires_grad_()
    gradrein.autograd.replay(checkpoint(net, x, use_reentrant=True).sum(), x)


def traced(net):
    out = net(X).exp()
    gradrein.backward(out.sum())
    gradrein.trace(out.sum(), net)


def not_finite(net):
    out = net(X)
    with gradrein.detect_nonfinite():
        gradrein.backward((out - out).sqrt().sum())


def fail(run):
    """Make the mistake, catch what it raises, and return references to what must be gone by then."""
    net = Net()
    held = [weakref.ref(net), weakref.ref(net.body.weight)]

    def watch(module, args, out):
        held.append(weakref.ref(out))
        if out.grad_fn is not None:  # nodes themselves have no weak references
            mark = out.grad_fn.metadata["mark"] = Net()
            held.append(weakref.ref(mark))

    net.body.register_forward_hook(watch)
    try:
        run(net)
    except (RuntimeError, IndexError):
        return held
    raise AssertionError("no error was raised")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(
    "run", [*(case.values[0] for case in MISTAKES), unknown, replayed, traced, not_finite], ids=lambda run: run.__name__
)
def test_a_caught_error_holds_nothing(run):
    assert [held() for held in fail(run) if held() is not None] == []
