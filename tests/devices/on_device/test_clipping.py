"""Clipping: few launches, however many tensors there are, no host reads, and the numbers of the host."""

from contextlib import nullcontext

import pytest
import simulated
import torch
from calls import CLIPPING, DROP_INS, LEARNING, with_gradients
from plugin import assert_same, host
from simulated import KIND, counted, no_host_reads

import gradrein
from gradrein import _devices

COUNTS = [6, 300]
DTYPES = [torch.float32, torch.bfloat16]
MORE = 5  # launches of each multi-tensor op for 300 tensors: one takes at most 64 of two lists


def launches(call, steps=1):
    """Count one step, the last of some."""
    for _ in range(steps):
        with counted() as counts:
            call()
    return counts


@pytest.mark.parametrize("name", DROP_INS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drop_ins(name, count, dtype):
    call = DROP_INS[name]
    ours, torchs = (launches(lambda m=m: call(m, with_gradients(count, dtype))) for m in (gradrein, torch.nn.utils))
    assert ours.launches.total() <= torchs.launches.total() + 2 + slack(dtype, count), ours
    assert not ours.reads


def slack(dtype, count):
    """Return how many more are allowed: on CUDA alone torch scales half types without copies in float32."""
    return 2 * (1 if count == 6 else MORE) if dtype == torch.bfloat16 and KIND != "cuda" else 0


@pytest.mark.parametrize("name", CLIPPING)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_policies_without_a_memory(name, count, dtype):
    call, most, reads = CLIPPING[name]
    parameters = with_gradients(count, dtype)
    counts = launches(lambda: call(parameters))
    assert counts.launches.total() <= limit(most, counts, count, dtype), counts
    assert counts.reads.total() == reads, counts


def limit(most, counts, count, dtype):
    """Return the limit: factors for each half tensor are applied to copies in float32."""
    fused = sum("foreach" in op for op in counts.launches)
    return most + (count > 6) * fused * MORE + (dtype == torch.bfloat16) * 2 + slack(dtype, count)


@pytest.mark.parametrize("make", LEARNING)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_policies_with_a_memory(make, count, dtype):
    parameters, policy = with_gradients(count, dtype), make()
    counts = launches(lambda: gradrein.clip_(parameters, policy, nonfinite="propagate"), 3)
    assert counts.launches.total() <= limit(LEARNING[make], counts, count, dtype), counts
    assert not counts.reads


@pytest.mark.parametrize("make", LEARNING)
def test_clipper(make):
    parameters = with_gradients()
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    plain = launches(optimizer.step)
    gradrein.Clipper(optimizer, make(), nonfinite="propagate")
    counts = launches(optimizer.step, 3)
    assert counts.launches.total() - plain.launches.total() <= LEARNING[make], counts
    assert not counts.reads


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("why", ["nonfinite", "spike"])
def test_a_fused_optimizer_skips_a_step_without_a_read(kind, why):
    """Weights, momentum and the count of steps are as before; a second model shows that others still move."""
    parameters = with_gradients()
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, fused=True, **settings)
    policy = gradrein.policies.SkipSpikes(warmup=2) if why == "spike" else gradrein.by_norm(1.0)
    gradrein.Clipper(optimizer, policy, nonfinite="skip")
    for step in range(5):
        if step == 4:
            parameters[0].grad.fill_(1e6 if why == "spike" else float("nan"))
        before = host([p.detach() for p in parameters]), host(optimizer.state_dict()["state"])
        with no_host_reads() if step > 1 else nullcontext():  # a state begins on the host
            optimizer.step()
        after = host([p.detach() for p in parameters]), host(optimizer.state_dict()["state"])
        assert torch.equal(after[0][1], before[0][1]) == (step == 4)
        assert not hasattr(optimizer, "found_inf")
        for p in parameters:
            p.grad.fill_(1.0)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_step_that_raised_leaves_no_decision_behind():
    """It would look like that of a GradScaler, and gradients of later steps would not be looked at."""
    parameters = with_gradients()
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
    clipper = gradrein.Clipper(optimizer, gradrein.by_norm(1.0), nonfinite="skip")
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    failing.remove()
    before = host([p.detach() for p in parameters])
    parameters[0].grad.fill_(float("nan"))
    optimizer.step()
    torch.testing.assert_close(host([p.detach() for p in parameters]), before, rtol=0, atol=0)
    assert clipper.report.skipped


CALLS = {name: call for name, (call, *_) in CLIPPING.items()} | {
    make.__name__: lambda ps, make=make: gradrein.clip_(ps, make(), nonfinite="propagate") for make in LEARNING
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_numbers_as_on_the_host(name, dtype):
    shapes = [(3, 4), (4,), (3, 4), (), (2, 3, 2)]

    def run():
        parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p) * 3
        report = CALLS[name](parameters)
        return [p.grad for p in parameters], [*report.norms.values()], [*report.norms_after.values()], report.clipped

    assert_same(run, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["skip", "zero"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(mode, bad):
    def run():
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
        for p in parameters:
            p.grad = torch.arange(3.0)
        parameters[2].grad[1] = bad
        report = gradrein.clip_(parameters, gradrein.by_norm(1.0), nonfinite=mode)
        return [p.grad for p in parameters], report.norm_after, [*report.offenders.values()], report.skipped

    assert_same(run)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_without_float64(name, dtype, monkeypatch):
    """As MPS: where an op made one, the simulated device would refuse."""
    parameters, twins = with_gradients(dtype=dtype), []
    for p in parameters:
        twins.append(torch.nn.Parameter(host(p)))
        twins[-1].grad = host(p.grad)
    monkeypatch.setattr(_devices, "WITHOUT_FLOAT64", {KIND})
    monkeypatch.setattr(simulated, "without_float64", True)
    norms = CALLS[name](parameters).norms_after.values()
    assert [*norms] == pytest.approx([*CALLS[name](twins).norms_after.values()], rel=1e-2)
    gradrein.clip_grad_norm_(parameters, 0.1, 3)
    gradrein.clip_grad_value_(parameters, 0.1)


def test_reading_is_forbidden_where_none_is_needed():
    parameters = with_gradients()
    with no_host_reads():
        norm = gradrein.clip_grad_norm_(parameters, 1.0)
        gradrein.clip_(parameters, gradrein.by_norm(0.5), nonfinite="skip")
    assert host(norm) > 1
