"""Clipping is recorded as what happened, whoever does it, in whatever order, and however the name was imported."""

import math
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_grad_value_
from torch.nn.utils import clip_grads_with_norm_ as torch_clip_grads_with_norm_
from torch.nn.utils import get_total_norm as torch_get_total_norm

import gradrein
from gradrein import clip_, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from gradrein.errors import GradreinWarning
from gradrein.watch import read_run

from .processes import run_process

LIMIT = 0.25


def with_norm(clip, measure):
    def call(net):
        grads = [p.grad for p in net.parameters()]
        clip(net.parameters(), LIMIT, measure(grads))

    return call


# Imported before any monitor starts, so no name that is looked up again.
BY_NORM = {
    "ours": lambda net: clip_grad_norm_(net.parameters(), LIMIT),
    "ours, of a module, by keyword": lambda net: clip_grad_norm_(parameters=net, max_norm=LIMIT),
    "ours, of a dict": lambda net: clip_grad_norm_(dict(net.named_parameters()), LIMIT),
    "ours in two halves": with_norm(clip_grads_with_norm_, get_total_norm),
    "clip_": lambda net: clip_(net, gradrein.by_norm(LIMIT)),
    "clip_ by patterns": lambda net: clip_(net, {"*": gradrein.by_norm(LIMIT)}),
    "torch's": lambda net: torch_clip_grad_norm_(net.parameters(), LIMIT),
    "torch's, by keyword": lambda net: torch_clip_grad_norm_(parameters=list(net.parameters()), max_norm=LIMIT),
    "torch's in two halves": with_norm(torch_clip_grads_with_norm_, torch_get_total_norm),
    "torch's, looked up": lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT),
}
OTHERWISE = {
    "by value": lambda net: clip_grad_value_(net, 0.01),
    "torch's by value": lambda net: torch_clip_grad_value_(net.parameters(), 0.01),
    "by parameter": lambda net: clip_(net, gradrein.by_norm(0.1, per_parameter=True)),
    "by unit": lambda net: clip_(net, gradrein.by_unit(1e-3)),
    "a part of the model": lambda net: clip_(net[2], gradrein.by_norm(0.1)),
    "by the largest": lambda net: clip_grad_norm_(net, 0.01, "inf"),
    "by the sum": lambda net: torch_clip_grad_norm_(net.parameters(), 0.01, 1),
    "twice": lambda net: (clip_grad_norm_(net, 2 * LIMIT), torch_clip_grad_norm_(net.parameters(), LIMIT)),
    "by value, then by norm": lambda net: (clip_grad_value_(net, 0.1), clip_(net, gradrein.by_norm(LIMIT))),
    "parts apart": lambda net: [clip_(part, gradrein.by_norm(0.1)) for part in (net[0], net[2])],
}

OTHER_NORMS = OTHERWISE["by the largest"], OTHERWISE["by the sum"]


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture
def net():
    return model()


@pytest.fixture
def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=1e-3)


def norms(net):
    return [0.0 if p.grad is None else p.grad.norm().item() for p in net.parameters()]


def train(net, optimizer, clip=lambda net: None, steps=3):
    """Return the norms before the script clips, and those the optimizer got."""
    before, after = [], []
    handle = optimizer.register_step_pre_hook(lambda *_: after.append(norms(net)))
    for t in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(t))
        (10 * net(x)).square().mean().backward()
        before.append(norms(net))
        clip(net)
        optimizer.step()
    handle.remove()
    return before, after


@pytest.mark.parametrize("clip", [*BY_NORM.values(), *OTHERWISE.values()], ids=[*BY_NORM, *OTHERWISE])
def test_the_norms_are_those_before_clipping(clip, net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        before, after = train(net, optimizer, clip)
    run = read_run(monitor.path)
    for row, true in zip(run.norms, before, strict=True):
        assert row == pytest.approx(true, rel=1e-4)
    assert run.norm == pytest.approx([math.hypot(*row) for row in before], rel=1e-5)
    assert run.clip == pytest.approx(
        [math.hypot(*a) / math.hypot(*b) for a, b in zip(after, before, strict=True)], rel=1e-4
    )
    assert max(run.clip) < 1
    by_norm = clip in BY_NORM.values() and clip is not BY_NORM["clip_ by patterns"]
    assert run.threshold == (LIMIT if by_norm or clip is OTHERWISE["twice"] else 0.01 if clip in OTHER_NORMS else None)


@pytest.mark.parametrize("name", ["ours", "clip_", "torch's"])
def test_a_threshold_that_is_not_reached_is_no_clipping(name, net, optimizer):
    high = {
        "ours": lambda net: clip_grad_norm_(net, 1e6),
        "clip_": lambda net: clip_(net, gradrein.by_norm(1e6)),
        "torch's": lambda net: torch_clip_grad_norm_(net.parameters(), 1e6),
    }
    with gradrein.Monitor(net, optimizer) as monitor:
        before, _ = train(net, optimizer, high[name])
    run = read_run(monitor.path)
    assert run.clip == [1.0, 1.0, 1.0]
    assert run.threshold == 1e6
    assert run.norm == pytest.approx([math.hypot(*row) for row in before], rel=1e-6)


@pytest.mark.parametrize(
    "look",
    [
        lambda net: clip_grad_norm_(net, math.inf),
        lambda net: torch_clip_grad_norm_(net.parameters(), math.inf),
        lambda net: clip_(net, gradrein.by_norm(LIMIT), dry_run=True),
        lambda net: get_total_norm([p.grad for p in net.parameters()]),
    ],
)
def test_only_measuring_is_no_clipping(look, net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer, look)
    assert all(map(math.isnan, read_run(monitor.path).clip))


@pytest.mark.parametrize("who", ["script", "clipper", "both"])
@pytest.mark.parametrize("own", [0.1, 10.0])
def test_a_run_clipped_twice_is_recorded_as_both(who, own, net, optimizer):
    """The script clips tightly, or a `Clipper` does, and the monitor as well."""
    clip = (lambda net: None) if who == "clipper" else BY_NORM["torch's"]
    if who != "script":
        gradrein.Clipper(optimizer, gradrein.by_norm(0.2))
    with gradrein.Monitor(net, optimizer, clip=own) as monitor:
        before, _ = train(net, optimizer, clip)
    run = read_run(monitor.path)
    tightest = min(own, LIMIT if who == "script" else 0.2)
    assert run.norm == pytest.approx([math.hypot(*row) for row in before], rel=1e-5)
    assert run.clip == pytest.approx([tightest / math.hypot(*row) for row in before], rel=1e-4)
    assert run.threshold == tightest


def test_a_clipper_attached_while_the_monitor_is_on_is_seen(net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer, steps=1)
        with gradrein.Clipper(optimizer, gradrein.by_norm(LIMIT)):
            before, _ = train(net, optimizer, steps=2)
    run = read_run(monitor.path)
    assert math.isnan(run.clip[0])
    assert run.clip[1:] == pytest.approx([LIMIT / math.hypot(*row) for row in before], rel=1e-4)
    assert run.norm[1:] == pytest.approx([math.hypot(*row) for row in before], rel=1e-5)


def test_what_is_added_after_clipping_is_not_taken_for_clipped(net, optimizer):
    """Gradients that are written again are recorded as the optimizer gets them."""
    with gradrein.Monitor(net, optimizer) as monitor:
        net(torch.ones(2, 4)).sum().backward()
        clip_grad_norm_(net, 1e-3)
        net(torch.ones(2, 4)).sum().backward()  # accumulates
        true = math.hypot(*norms(net))
        optimizer.step()
    run = read_run(monitor.path)
    assert run.norm == pytest.approx([true], rel=1e-6)
    assert math.isnan(run.clip[0])


def test_one_backward_two_optimizers_each_with_its_own_clipping():
    net = model()
    optimizers = [torch.optim.SGD(net[i].parameters(), lr=1e-3) for i in (0, 2)]
    with gradrein.Monitor(net) as monitor:
        net(torch.ones(2, 4)).sum().backward()
        clip_grad_norm_(net[0], 1e-3)
        clip_(net[2], gradrein.by_norm(1e-2))
        true = [math.hypot(*norms(net[i])) for i in (0, 2)]
        for optimizer in optimizers:
            optimizer.step()
    for opt, after in enumerate(true):
        run = read_run(monitor.path, optimizer=opt)
        assert run.norm[0] * run.clip[0] == pytest.approx(after, rel=1e-4)
        assert run.threshold == (1e-3, 1e-2)[opt]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by", ["monitor", "clipper", "script"])
def test_scaled_gradients_are_clipped_after_they_are_unscaled(fused, by):
    """A step of a gradient of norm 50 at lr=1 has length 1, whatever the scale."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if by == "clipper":
        gradrein.Clipper(optimizer, gradrein.by_norm(1.0))
    own = {"monitor": 1.0, "clipper": None, "script": 5.0}[by]
    with gradrein.Monitor(None, optimizer, clip=own) as monitor:
        scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
        if by == "script":
            scaler.unscale_(optimizer)
            torch_clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert weight.detach().norm().item() == pytest.approx(1.0, rel=1e-5)
    run = read_run(monitor.path)
    assert run.norm == pytest.approx([50.0], rel=1e-6)
    assert run.clip == pytest.approx([0.02], rel=1e-5)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("why", ["spike", "nonfinite"])
@pytest.mark.parametrize("by", ["monitor", "clipper"])
def test_a_skipped_step_moves_nothing_and_is_recorded(make, why, by):
    weight = nn.Parameter(torch.ones(3))
    options = {"momentum": 0.9, "weight_decay": 0.1} if make is torch.optim.SGD else {}
    optimizer = make([weight], lr=0.1, **options)
    policy = gradrein.policies.SkipSpikes(warmup=3)
    if by == "clipper":
        gradrein.Clipper(optimizer, policy, nonfinite="skip")
    with gradrein.Monitor(None, optimizer, clip=policy if by == "monitor" else None) as monitor:
        for t in range(6):
            before = weight.detach().clone()
            weight.grad = torch.ones(3)
            if t == 4:
                weight.grad[0] = 1e6 if why == "spike" else math.nan
            optimizer.step()
            assert torch.equal(weight.detach(), before) == (t == 4)
    run = read_run(monitor.path)
    assert run.clip[4] == 0.0
    assert run.update[4] == 0.0
    if why == "spike":
        assert run.norm[4] == pytest.approx(math.hypot(1e6, 1, 1), rel=1e-6)
    else:
        assert run.nonfinite[0].offenders == {"parameter 0": 1}


def test_torchs_functions_are_as_before_afterwards():
    functions = torch_clip_grad_norm_, torch_clip_grad_value_, torch_clip_grads_with_norm_
    before = [f.__closure__[0].cell_contents for f in functions]
    with gradrein.Monitor(), gradrein.Monitor():
        assert [f.__closure__[0].cell_contents for f in functions] != before
    assert [f.__closure__[0].cell_contents for f in functions] == before


def test_errors_and_warnings_of_torch_stay_torchs():
    def said_of_nothing():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_clip_grad_norm_((p for p in ()), 1.0)
        return [(one.category, str(one.message)) for one in caught]

    expected = said_of_nothing()  # older torch says nothing
    with gradrein.Monitor():
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            torch_clip_grad_norm_([nn.Parameter(torch.ones(1))])
        with pytest.raises(AttributeError):
            torch_clip_grad_norm_([3], 1.0)
        assert said_of_nothing() == expected


def test_a_torch_that_is_built_otherwise_is_named(monkeypatch):
    def clip_grad_norm_(parameters, max_norm, norm_type=2.0):
        return torch.tensor(1.0)

    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", clip_grad_norm_)
    with pytest.warns(GradreinWarning, match="`clip_grad_norm_` of torch"):
        monitor = gradrein.Monitor().start()
    monitor.stop()
    assert torch.nn.utils.clip_grad.clip_grad_norm_ is clip_grad_norm_


def test_compiled_clipping_is_left_alone():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    clip = torch.compile(lambda w: torch_clip_grad_norm_([w], 1.0), backend="eager")
    with gradrein.Monitor():
        assert clip(weight).item() == 5.0
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_nobody_is_notified_in_a_forked_child(tmp_path):
    code = """
import os, torch, gradrein
from gradrein import _events
monitor = gradrein.Monitor(record="run.jsonl").start()
if os.fork() == 0:
    assert not _events.subscribers
    w = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([w], lr=1.0)
    w.sum().backward(); gradrein.clip_grad_norm_([w], 0.1); o.step()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
monitor.stop()
"""
    done = run_process([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run.jsonl").steps == []
