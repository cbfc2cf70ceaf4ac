"""`Clipper`: the same as calling `clip_` right before `optimizer.step()`, in every way a loop is written."""

import copy
import io
import math
import pickle

import pytest
import torch
from cases import gradient, parameter

import gradrein
from gradrein.errors import ArgumentError, NonFiniteGradientError

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}
every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def batches(n=8):
    return [torch.randn(5, 3) * 10 ** (i % 3) for i in range(n)]


def loss_of(model, x):
    return (model(x) ** 2).mean() + 10 * model(x).sum()


@every_optimizer
def test_is_clip_before_the_step(build):
    data = batches()
    trained = []
    for inside in (False, True):
        model, policy = model_of(), gradrein.policies.ByMedian(k=0.5, warmup=2)
        optimizer = build(model.parameters())
        if inside:
            gradrein.Clipper(optimizer, policy)
        for x in data:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            if not inside:
                gradrein.clip_(model.parameters(), policy)
            optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=0)


@every_optimizer
@pytest.mark.parametrize("unscaled_by_hand", [False, True])
def test_with_a_grad_scaler(build, unscaled_by_hand):
    """Clipped after unscaling; a step the scaler skips is not clipped and not learned from."""
    data = batches()
    trained, states = [], []
    for scaled in (False, True):
        model, policy = model_of(), gradrein.policies.ByZScore(warmup=2)
        optimizer = build(model.parameters())
        clipper = gradrein.Clipper(optimizer, policy)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0, growth_interval=3)
        for i, x in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            overflow = i == 4
            if overflow and not scaled:
                continue  # what the scaler does by itself
            if overflow:
                next(iter(model.parameters())).grad[0, 0] = math.inf
            if unscaled_by_hand:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        trained.append([p.detach() for p in model.parameters()])
        states.append(clipper.state_dict()["*"]["rows"])
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)
    assert states[0]["seen"] == states[1]["seen"] == len(data) - 1
    torch.testing.assert_close(states[0]["mean"], states[1]["mean"], rtol=1e-5, atol=1e-6)


def test_gradient_accumulation_clips_the_sum_once():
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=1.0)
    clipper = gradrein.Clipper(optimizer, gradrein.by_norm(1.0))
    for _ in range(4):
        (p * gradient(0.5)).sum().backward()
    optimizer.step()
    assert clipper.report.norm == pytest.approx(2.0)
    torch.testing.assert_close(p.detach(), -gradient(1.0))


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_is_clipped_after_it_ran(by_keyword):
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=1.0)
    gradrein.Clipper(optimizer, gradrein.by_norm(1.0))

    def closure():
        optimizer.zero_grad()
        loss = (p * gradient(50.0)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert loss.item() == 0
    torch.testing.assert_close(p.detach(), -gradient(1.0))


def test_lbfgs():
    p = parameter()
    optimizer = torch.optim.LBFGS([p], lr=1.0, max_iter=3)
    clipper = gradrein.Clipper(optimizer, gradrein.by_norm(1.0))

    def closure():
        optimizer.zero_grad()
        loss = ((p - 100) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert clipper.report.norm_after == pytest.approx(1.0)


def test_removed():
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=1.0)
    with gradrein.Clipper(optimizer, gradrein.by_norm(1.0)):
        pass
    p.grad = gradient(5.0)
    optimizer.step()
    torch.testing.assert_close(p.detach(), -gradient(5.0))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@every_optimizer
@pytest.mark.parametrize("why", ["nonfinite", "spike"])
def test_a_skipped_step_moves_nothing(build, why):
    """Not even by momentum or weight decay, and the state of the optimizer stays."""
    model = model_of()
    optimizer = build(model.parameters())
    policy = gradrein.policies.SkipSpikes(warmup=3) if why == "spike" else gradrein.by_norm(1.0)
    clipper = gradrein.Clipper(optimizer, policy, nonfinite="skip")
    for i in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if i == 4:
            next(iter(model.parameters())).grad[0, 0] = math.nan if why == "nonfinite" else 1e6
        optimizer.step()
        moved = any((a != p).any() for a, p in zip(before, model.parameters(), strict=True))
        assert moved == (i != 4)
        assert clipper.report.skipped == (i == 4)
    assert all((p.grad == 0).all() for p in model.parameters())  # given back after the step


def test_a_skipped_group_moves_nothing_and_the_others_do():
    ps = {"a": parameter(), "b": parameter()}
    optimizer = torch.optim.SGD(ps.items(), lr=1.0, momentum=0.9)
    gradrein.Clipper(optimizer, {"a": gradrein.policies.SkipSpikes(warmup=2), "b": gradrein.by_norm(1.0)})
    for norm in (1.0, 1.0, 100.0):
        before = {key: p.detach().clone() for key, p in ps.items()}
        for p in ps.values():
            p.grad = gradient(norm)
        optimizer.step()
    torch.testing.assert_close(ps["a"].detach(), before["a"], rtol=0, atol=0)
    assert (ps["b"] != before["b"]).all()


def test_nonfinite_raises_with_names_before_anything_moves():
    model = model_of()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    gradrein.Clipper(optimizer, gradrein.by_norm(1.0))
    loss_of(model, batches(1)[0]).backward()
    model[2].bias.grad[0] = math.nan
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteGradientError, match=r"2\.bias \(1 value\)"):
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_dry_run_reports_only():
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=1.0)
    clipper = gradrein.Clipper(optimizer, gradrein.policies.SkipSpikes(gradrein.by_norm(1.0), warmup=1), dry_run=True)
    for norm in (1.0, 5.0):
        p.grad = gradient(norm)
        optimizer.step()
    assert clipper.report.skipped
    torch.testing.assert_close(p.detach(), -gradient(6.0))


def test_a_second_clipper_is_refused():
    model = model_of()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    first = gradrein.Clipper(optimizer, {"2.*": gradrein.by_norm(0.5), "*": None})
    with pytest.raises(ArgumentError, match=r"already has a clipper, Clipper\(SGD, .* `remove\(\)` on it first"):
        gradrein.Clipper(optimizer, gradrein.by_norm(1.0))
    gradrein.Clipper(optimizer, gradrein.by_norm(1.0), dry_run=True).remove()
    gradrein.Clipper(torch.optim.SGD(model.parameters(), lr=0.1), gradrein.by_norm(1.0))
    first.remove()
    with gradrein.Clipper(optimizer, gradrein.by_norm(1.0)):
        pass
    gradrein.Clipper(optimizer, gradrein.by_norm(1.0))


def test_patterns_take_names_from_the_model():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = gradrein.Clipper(optimizer, {"2.*": gradrein.by_norm(0.5), "*": None}, model=model)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert clipper.report.by_pattern["2.*"].norm_after <= 0.5 + 1e-6
    with pytest.raises(
        ArgumentError, match=r"4 of the 4 parameters of SGD are not in `model`, the first of shape \(4, 3\)"
    ):
        gradrein.Clipper(optimizer, gradrein.by_norm(1.0), model=model_of())
    with pytest.raises(ArgumentError, match="`nonfinite` is one of raise"):
        gradrein.Clipper(optimizer, gradrein.by_norm(1.0), nonfinite="ignore")


@pytest.mark.parametrize("named", [True, False])
def test_patterns_take_parameter_groups(named):
    model = model_of()
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1)
    policy = {"group:0": gradrein.policies.ByZScore(warmup=2), "*.bias" if named else "*": None}
    clipper = gradrein.Clipper(
        optimizer, {**policy, "*": gradrein.by_norm(0.5)} if named else policy, model=model if named else None
    )
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert {*clipper.report.by_pattern} == ({"group:0", "*"} if named else {"group:0"})
    assert clipper.state_dict()["group:0"]["rows"]["seen"] == 1
    clipper.load_state_dict(clipper.state_dict())


def test_checkpoint():
    data, trained = batches(10), []
    for pause in (False, True):
        model = model_of()
        policy = lambda: {"0.*": gradrein.policies.ByZScore(warmup=2), "*": gradrein.policies.ByRunningNorm(warmup=2)}  # noqa: E731
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01)
        clipper = gradrein.Clipper(optimizer, policy())
        for i, x in enumerate(data):
            if pause and i == 5:
                file = io.BytesIO()
                torch.save(clipper.state_dict(), file)
                file.seek(0)
                clipper.remove()
                clipper = gradrein.Clipper(optimizer, policy())
                clipper.load_state_dict(torch.load(file, weights_only=True))
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=0)
    clipper.remove()
    with pytest.raises(ArgumentError, match=r"the patterns \['\*', '0\.\*'\], this clipper has .* \['\*'\]"):
        gradrein.Clipper(optimizer, gradrein.policies.ByZScore()).load_state_dict(clipper.state_dict())


def test_fixed_policies_have_nothing_to_save():
    clipper = gradrein.Clipper(torch.optim.SGD([parameter()], lr=1.0), gradrein.by_norm(1.0))
    assert clipper.state_dict() == {}
    clipper.load_state_dict({})


def test_what_clip_takes_is_passed_on(monkeypatch):
    p, seen = parameter(), []
    clip = gradrein.clip_
    monkeypatch.setattr(
        "gradrein.clip._clipper.clip_", lambda *a, **k: seen.append(k) or clip(*a, **{**k, "placement": None})
    )
    optimizer = torch.optim.SGD([("p", p)], lr=1.0)
    given = {"nonfinite": "zero", "dry_run": True, "placement": {"*": None}}
    gradrein.Clipper(optimizer, gradrein.by_norm(1.0), **given)
    p.grad = gradient(1.0)
    optimizer.step()
    assert seen == [given]


def test_a_clipper_says_what_it_clips():
    clipper = gradrein.Clipper(torch.optim.SGD([parameter()], lr=1.0), gradrein.by_norm(1.0))
    assert repr(clipper) == f"Clipper(SGD, {gradrein.by_norm(1.0)!r}, nonfinite='raise')"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_copied_without_a_clipper_or_not_at_all(copied):
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    plain = set(vars(optimizer))
    clipper = gradrein.Clipper(optimizer, gradrein.by_norm(1.0))
    for shared in (optimizer, clipper):
        with pytest.raises(ArgumentError, match=r"a copy would not be clipped. Copy it before you build the Clipper"):
            copied(shared)
    clipper.remove()
    assert set(vars(optimizer)) == plain
    copied(optimizer)


def test_a_step_that_calls_its_parents_is_clipped_once():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    p = parameter()
    torch.optim.SGD([p], lr=1.0)  # torch hooks the step of a class when it makes the first of it
    optimizer = Mine([p], lr=1.0)
    policy = gradrein.policies.ByZScore(warmup=100)
    seen = []
    decide = policy.decide
    policy.decide = lambda grads: seen.append(1) or decide(grads)
    gradrein.Clipper(optimizer, policy)
    for _ in range(3):
        p.grad = gradient(1.0)
        optimizer.step()
    assert len(seen) == 3


def test_patterns_may_be_for_what_another_optimizer_has():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("gen", "disc", "frozen")})
    model["frozen"].requires_grad_(False)
    policy = {"frozen*": None, "gen.*": gradrein.by_norm(0.1), "disc.*": gradrein.by_norm(0.2)}
    for name, limit in (("gen", 0.1), ("disc", 0.2)):
        optimizer = torch.optim.SGD(model[name].parameters(), 0.1)
        clipper = gradrein.Clipper(optimizer, policy, model=model)
        model[name](torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        assert list(clipper.policy) == [f"{name}.*"]
        assert clipper.report.norm_after == pytest.approx(limit, rel=1e-4)
    with pytest.raises(ArgumentError, match="'nobody' is never used"):
        gradrein.Clipper(torch.optim.SGD(model["gen"].parameters(), 0.1), {"nobody": None, **policy}, model=model)


def test_the_factor_of_a_group_is_not_that_of_all():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1)
    with gradrein.Monitor(model, optimizer) as monitor:
        model(torch.ones(1, 2)).square().sum().mul(100).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        gradrein.clip_(optimizer, {"0.*": gradrein.by_norm(0.01), "*": None})
        kept = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    before, after = (torch.cat([g.flatten() for g in each]).norm() for each in (grads, kept))
    assert monitor.latest["clip"] == pytest.approx(float(after / before), rel=1e-4)
    assert monitor.latest["norm"] == pytest.approx(float(before), rel=1e-4)
