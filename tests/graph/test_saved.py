"""Saved values in every state: ready, freed, stale, packed; of torch's ops and of custom Functions."""

import contextlib
import cProfile

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gradrein import graph
from gradrein._torch import saved


def states(node, **kwargs):
    return {entry.name: entry.state for entry in graph.saved(node, **kwargs)}


def test_ready_values_are_the_tensors_themselves():
    x, y = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    entries = {entry.name: entry for entry in graph.saved((x * y).grad_fn)}
    assert entries["other"].value is y
    assert entries["self"].value is None  # y wants no gradient, so torch did not keep x
    assert all(entry.state == "ready" for entry in entries.values())


def test_freed_after_backward():
    out = torch.ones(3, requires_grad=True).exp()
    out.sum().backward()
    assert states(out.grad_fn) == {"result": "freed"}


def changed_in_place():
    hidden = torch.ones(3, requires_grad=True).exp()
    out = hidden * hidden
    hidden.add_(1).mul_(2)
    return hidden, out


def test_stale_has_versions():
    _, out = changed_in_place()
    for entry in graph.saved(out.grad_fn):
        assert entry.state == "stale"
        assert entry.versions == (0, 2)
        assert entry.value is None


@pytest.mark.needs("SavedTensor.data")
def test_stale_holds_the_changed_tensor():
    hidden, out = changed_in_place()
    assert all(entry.held is hidden for entry in graph.saved(out.grad_fn))


@pytest.mark.needs("SavedTensor.data")
def test_lists_are_read_one_by_one():
    index, other = torch.tensor([0, 1]), torch.tensor([1, 0])
    out = torch.ones(3, 3, requires_grad=True)[index, other]
    assert states(out.grad_fn)["indices[1]"] == "ready"
    other.add_(0)
    assert states(out.grad_fn)["indices[0]"] == "ready"
    assert states(out.grad_fn)["indices[1]"] == "stale"


def test_packed_is_not_unpacked_unless_asked():
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    calls = []

    def run(x):
        calls.append(1)
        return layer(x).exp()

    out = checkpoint(run, x, use_reentrant=False)
    assert states(out.grad_fn) == {"result": "packed"}
    assert len(calls) == 1
    (entry,) = graph.saved(out.grad_fn, unpack=True)
    assert torch.equal(entry.value, out)
    assert len(calls) == 2


def test_offloaded_is_packed():
    x = torch.ones(3, requires_grad=True)
    with save_on_cpu():
        out = x.exp()
    assert states(out.grad_fn) == {"result": "packed"}
    assert states(out.grad_fn, unpack=True) == {"result": "ready"}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        out = x * factor
        ctx.save_for_backward(x, factor, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        _, factor, _ = ctx.saved_tensors
        return grad * factor, None


def test_custom_function():
    x, factor = torch.ones(3, requires_grad=True), torch.tensor(2.0)
    out = Scale.apply(x, factor)
    entries = graph.saved(out.grad_fn)
    assert [entry.name for entry in entries] == ["tensors[0]", "tensors[1]", "tensors[2]"]
    assert entries[1].value is factor


@pytest.mark.needs("SavedTensor.data")
def test_one_stale_tensor_of_a_custom_function():
    factor = torch.tensor(2.0)
    out = Scale.apply(torch.ones(3, requires_grad=True), factor)
    factor.mul_(2)
    assert states(out.grad_fn) == {"tensors[0]": "ready", "tensors[1]": "stale", "tensors[2]": "ready"}


def test_custom_function_freed():
    out = Scale.apply(torch.ones(3, requires_grad=True), torch.tensor(2.0))
    out.sum().backward()
    assert states(out.grad_fn) == {"tensors": "freed"}


def test_a_failing_unpack_hook_is_the_users_error_not_ours():
    def fail(_):
        raise RuntimeError("disk full")

    with saved_tensors_hooks(lambda x: x.detach(), fail):
        out = torch.ones(3, requires_grad=True).exp()
    assert states(out.grad_fn) == {"result": "packed"}
    with pytest.raises(RuntimeError, match="disk full"):
        graph.saved(out.grad_fn, unpack=True)


# A torch that does not tell hooks nor what it holds: only the node can be asked.


@pytest.fixture
def silent_handles(monkeypatch):
    monkeypatch.setattr("gradrein._torch.saved.READS_HANDLES", False)
    monkeypatch.setattr("gradrein.graph._saved.READS_HANDLES", False)


def test_without_handles_one_of_several_stale_values_is_not_guessed(silent_handles):
    factor = torch.tensor(2.0)
    out = Scale.apply(torch.ones(3, requires_grad=True), factor)
    factor.mul_(2)
    (entry,) = graph.saved(out.grad_fn)
    assert (entry.name, entry.state, entry.versions) == ("tensors", "stale", (0, 1))
    assert entry.value is entry.held is None


def test_without_handles_a_profiler_stays_at_work(silent_handles):
    out = torch.ones(3, requires_grad=True).exp()
    profiler = cProfile.Profile()
    with profiler:
        found = states(out.grad_fn)
        sorted([2, 1])
    assert found == {"result": "ready"}
    assert any("sorted" in str(entry.code) for entry in profiler.getstats())


def test_without_handles_no_hook_is_run_unless_asked(silent_handles):
    calls = []

    def unpack(x):
        calls.append(1)
        return x

    with saved_tensors_hooks(lambda x: x.detach(), unpack):
        x = torch.ones(3, requires_grad=True)
        outputs = [x.exp(), Scale.apply(x, torch.tensor(2.0)), torch.cat([x, x]).sin()]
    for node in [out.grad_fn for out in outputs]:
        assert set(states(node).values()) == {"packed"}
        assert not calls
        assert set(states(node, unpack=True).values()) == {"ready"}
        assert calls
        calls.clear()


def test_without_handles_ready_stale_and_freed_are_told_apart(silent_handles):
    test_ready_values_are_the_tensors_themselves()
    test_stale_has_versions()
    test_freed_after_backward()
    test_packed_is_not_unpacked_unless_asked()


CONTEXTS = {
    "none": (contextlib.nullcontext, False),
    "hooks": (lambda: saved_tensors_hooks(lambda value: value, lambda value: value), True),
    "disabled": (lambda: disable_saved_tensors_hooks("not here"), False),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_hooks_that_pack_are_noticed_and_left_alone(context):
    make, expected = CONTEXTS[context]
    with make():
        assert [saved.has_pack_hooks(), saved.has_pack_hooks()] == [expected, expected]
        if context == "disabled":
            with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(str, str):
                pass
    assert not saved.has_pack_hooks()
