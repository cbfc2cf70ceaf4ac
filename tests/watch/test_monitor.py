import math

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import ArgumentError
from gradrein.watch import read_run


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture
def net():
    return model()


@pytest.fixture
def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def train(net, optimizer, steps=6, clip=None):
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(16, 4)).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_numbers_are_those_of_the_run(tmp_path, net, optimizer):
    path = tmp_path / "run.jsonl"
    expected = []
    hook = optimizer.register_step_pre_hook(
        lambda *_: expected.append([p.grad.norm().item() for p in net.parameters()])
    )
    weights = []
    with gradrein.Monitor(net, optimizer, record=path):
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        losses = train(net, optimizer, 1)
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        losses += train(net, optimizer, 5)
    hook.remove()
    run = read_run(path)
    assert run.loss == pytest.approx(losses, rel=1e-6)
    assert run.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for row, total, true in zip(run.norms, run.norm, expected, strict=True):
        assert row == pytest.approx(true, rel=1e-4)
        assert total == pytest.approx(math.sqrt(sum(n * n for n in true)), rel=1e-6)
    assert run.update[0] == pytest.approx(float((weights[1] - weights[0]).norm() / weights[1].norm()), rel=1e-4)
    assert run.lr == [0.1] * 6
    assert all(math.isnan(c) for c in run.clip)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_training_is_bit_for_bit_the_same(make):
    plain, watched = model(), model()
    one = make(plain.parameters(), lr=0.1)
    two = make(watched.parameters(), lr=0.1)
    train(plain, one)
    with gradrein.Monitor(watched, two):
        train(watched, two)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def replaced():
    loaders = torch.utils.data.dataloader._BaseDataLoaderIter
    theirs = loaders.__next__, loaders._next_index, loaders._reset
    return torch.autograd.backward, torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler.scale, *theirs


def test_it_leaves_nothing_behind():
    before = replaced()
    with gradrein.Monitor():
        with gradrein.Monitor():
            pass
        assert torch.autograd.backward is not before[0]
    assert replaced() == before


def test_the_cosine_is_that_of_step_and_next_gradient():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.5)
    with gradrein.Monitor(None, optimizer) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            (weight.square().sum() / 2).backward()
            optimizer.step()
    run = read_run(monitor.path)
    assert math.isnan(run.step_grad_cosine[0])
    assert run.step_grad_cosine[1:] == [1.0, 1.0]  # past the minimum at each step: the gradient points back


def test_names_are_found_without_the_model(net, optimizer):
    with gradrein.Monitor() as monitor:
        train(net, optimizer, 1)
    assert read_run(monitor.path).names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_accumulated_losses_are_summed(net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        values = []
        for _ in range(4):
            loss = net(torch.randn(8, 4)).square().mean() / 4
            loss.backward()
            values.append(loss.item())
        optimizer.step()
    assert read_run(monitor.path).loss == pytest.approx([sum(values)], rel=1e-6)


def test_two_optimizers_of_one_backward_have_the_same_loss():
    net = model()
    one = torch.optim.SGD(net[0].parameters(), lr=0.1)
    two = torch.optim.Adam(net[2].parameters(), lr=0.1)
    with gradrein.Monitor(net) as monitor:
        loss = net(torch.randn(8, 4)).square().mean()
        loss.backward()
        one.step()
        two.step()
    runs = [read_run(monitor.path, optimizer=i) for i in (0, 1)]
    assert [r.optimizer for r in runs] == ["SGD", "Adam"]
    assert [r.loss for r in runs] == [pytest.approx([loss.item()], rel=1e-6)] * 2
    assert runs[0].n_optimizers == 2


def test_a_closure_is_recorded_and_clipped():
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    x = torch.randn(16, 4)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        seen.append(loss.item())
        return loss

    with gradrein.Monitor(net, optimizer, clip=1e-3) as monitor:
        optimizer.step(closure)
        assert math.sqrt(sum(p.grad.norm().item() ** 2 for p in net.parameters())) < 1.001e-3
    run = read_run(monitor.path)
    assert len(seen) > 1
    assert run.loss == pytest.approx(seen[:1], rel=1e-6)
    assert run.clip[0] < 1


def test_a_step_that_calls_its_parents_is_one_step():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    net = model()
    torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = Mine(net.parameters(), lr=0.1)
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer, 3)
    assert monitor.steps == 3
    assert len(read_run(monitor.path).steps) == 3


def test_a_step_that_uses_another_optimizer_is_one_step():
    class Outer(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.inner = torch.optim.SGD(self.param_groups[0]["params"][:2], lr=0.1)

        def step(self, closure=None):
            self.inner.step()

    net = model()
    optimizer = Outer(net.parameters())
    with gradrein.Monitor(net, clip="zscore") as monitor:
        train(net, optimizer, 3)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 1)  # one that steps by itself is recorded
    assert monitor.steps == 4
    run = read_run(monitor.path)
    assert run.optimizer == "Outer"
    assert run.n_optimizers == 2


def test_after_a_step_that_raised_it_goes_on():
    class Fragile(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["lr"] == 0:
                raise RuntimeError("out of luck")
            return super().step(closure)

    net = model()
    optimizer = Fragile(net.parameters(), lr=0.0)
    with gradrein.Monitor(net, optimizer) as monitor:
        with pytest.raises(RuntimeError, match="out of luck"):
            train(net, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.1
        train(net, optimizer, 3)
    assert len(read_run(monitor.path).steps) == 3


def test_our_own_backward_and_clipping_are_recorded_as_well(net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        loss = net(torch.randn(8, 4)).square().mean()
        gradrein.backward(loss)
        norm = gradrein.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    run = read_run(monitor.path)
    assert run.loss == pytest.approx([loss.item()], rel=1e-6)
    assert run.norm == pytest.approx([norm.item()], rel=1e-5)
    assert run.threshold == 0.01


def test_auto_holds_a_run_that_would_diverge_and_a_bad_step_leaves_no_trace():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=2.5)  # beyond 2 over the curvature
    with gradrein.Monitor(None, optimizer, clip="auto") as monitor:
        for t in range(100):
            optimizer.zero_grad()
            (weight.square().sum() / 2).backward()
            if t == 50:
                weight.grad[0] = math.nan
            optimizer.step()
    assert float(weight.detach().norm()) < 0.1
    run = read_run(monitor.path)
    assert run.clip[50] == 0.0  # left out
    assert run.nonfinite[0].offenders == {"parameter 0": 1}


def test_policies_go_by_name_and_each_optimizer_has_its_own():
    net = model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (net[0], net[2])]
    with gradrein.Monitor(net, clip="zscore") as monitor:
        for _ in range(3):
            net(torch.randn(8, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert monitor.steps == 6
    assert len(read_run(monitor.path, optimizer=1).steps) == 3


def test_every_records_fewer_and_clips_all(net, optimizer):
    with gradrein.Monitor(net, optimizer, every=3, clip=1e-6) as monitor:
        before = net[0].weight.detach().clone()
        train(net, optimizer, 7)
        assert float((net[0].weight.detach() - before).norm()) < 1e-6
    run = read_run(monitor.path)
    assert run.steps == [0, 3, 6]
    assert all(
        math.isnan(t) for t in run.step_grad_cosine
    )  # these gradients do not follow the steps that were measured
    assert monitor.steps == 7


def test_bad_values_are_named(net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer, 1)
        net(torch.randn(4, 4)).sum().backward()
        net[2].weight.grad[0, :3] = math.nan
        optimizer.step()
    assert read_run(monitor.path).nonfinite[0].offenders == {"2.weight": 3}
    assert monitor.findings()[0].name == "nonfinite"


def test_frozen_sparse_and_missing_gradients():
    table = nn.Embedding(5, 3, sparse=True)
    unused = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*table.parameters(), unused], lr=0.1)
    with gradrein.Monitor(None, optimizer) as monitor:
        for _ in range(12):
            optimizer.zero_grad()
            table(torch.tensor([1, 1])).sum().backward()
            optimizer.step()
    run = read_run(monitor.path)
    assert run.norms[0] == [pytest.approx(2 * math.sqrt(3), rel=1e-4), None]
    assert [f.name for f in monitor.findings()] == ["dead"]


def test_a_scaled_loss_is_recorded_unscaled(net, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with gradrein.Monitor(net, optimizer) as monitor:
        loss = net(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        bad = net(torch.randn(8, 4)).square().mean() * math.inf
        scaler.scale(bad).backward()
        scaler.step(optimizer)  # finds the infinity and leaves the step out
        scaler.update()
        optimizer.zero_grad()
        last = net(torch.randn(8, 4)).square().mean()
        scaler.scale(last).backward()
        scaler.step(optimizer)
        scaler.update()
    run = read_run(monitor.path)
    assert run.loss == pytest.approx([loss.item(), last.item()], rel=1e-6)
    assert run.norm[0] < 100
    assert [n["note"] for n in run.notes if "note" in n] == ["scaler skipped"]


def test_new_parameters_are_introduced_again():
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer, 2)
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
        train(net, optimizer, 2)
    assert read_run(monitor.path).names[-1] == "2.bias"


def test_on_step_is_called_at_each_step(net, optimizer):
    received = []
    with gradrein.Monitor(net, optimizer, on_step=received.append) as monitor:
        train(net, optimizer, 2)
    assert [t["step"] for t in received] == [0.0, 1.0]
    assert set(received[1]) == {"step", "loss", "norm", "update", "lr"}
    assert monitor.latest == received[1]


def test_recording_that_cannot_go_on_does_not_stop_the_run(monkeypatch, net, optimizer):
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer, 1)
        monkeypatch.setattr("gradrein.watch.record.measure.Meter.measure_gradients", lambda *_: 1 / 0)
        train(net, optimizer, 2)
    assert monitor.steps == 3
    assert "ZeroDivisionError" in monitor.stopped_because


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": 1.5}, {"clip": "sometimes"}, {"clip": -1.0}, {"max_bytes": 5}]
)
def test_what_cannot_mean_anything_is_refused(wrong):
    with pytest.raises(ArgumentError):
        gradrein.Monitor(**wrong)


def test_a_monitor_that_is_started_again_goes_on(net, optimizer):
    monitor = gradrein.Monitor(net, optimizer, clip=0.01)
    for steps, total in ((4, 4), (2, 6)):
        with monitor:
            train(net, optimizer, steps)
        train(net, optimizer, 1)  # not observed, and not clipped
        assert monitor.steps == total
        run = read_run(monitor.path)
        assert run.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert run.steps == list(range(total))
        assert max(run.clip) < 1
        assert not optimizer._optimizer_step_pre_hooks
        assert "__reduce_ex__" not in vars(optimizer)
    assert math.isnan(run.step_grad_cosine[4])  # the gradient after a pause does not follow the step before it
    assert not math.isnan(run.step_grad_cosine[5])


def test_a_monitor_that_is_on_is_not_started_twice(net, optimizer):
    before = torch.autograd.backward
    with gradrein.Monitor(net, optimizer).start() as monitor, monitor:
        train(net, optimizer, 1)
        monitor.start()
        with monitor:
            train(net, optimizer, 1)
        train(net, optimizer, 1)  # the inner block does not end the outer one
    assert monitor.steps == len(read_run(monitor.path).steps) == 3
    assert torch.autograd.backward is before
    monitor.stop()
    train(net, optimizer, 1)
    assert monitor.steps == 3


def test_a_checkpointed_loss_is_counted_once(net, optimizer):
    """Its backward pass calls backward once more, on the same number."""
    x = torch.randn(8, 4, requires_grad=True)
    with gradrein.Monitor(net, optimizer) as monitor:
        loss = torch.utils.checkpoint.checkpoint(lambda x: net(x).square().mean(), x, use_reentrant=True)
        loss.backward()
        optimizer.step()
    assert read_run(monitor.path).loss == pytest.approx([loss.item()], rel=1e-6)


def test_a_healthy_run_is_found_healthy():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    true = torch.randn(4, 1)
    with gradrein.Monitor(net, optimizer) as monitor:
        for _ in range(300):
            x = torch.randn(64, 4)
            optimizer.zero_grad()
            (net(x) - x @ true).square().mean().backward()
            optimizer.step()
    assert monitor.findings() == []
    assert monitor.advice().threshold is None


def test_weights_are_compared_on_a_sample_of_each_tensor(monkeypatch):
    monkeypatch.setattr("gradrein.watch.record.measure._SAMPLE", 1)
    monkeypatch.setattr("gradrein.watch.record.measure._LEAST_OF_EACH", 10)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    strides = []
    for p in net.parameters():  # at most 10 elements, and a stride that goes through all columns
        stride = -(-p.numel() // 10)
        while math.gcd(stride, p.shape[-1]) > 1:
            stride += 1
        strides.append(stride)
    assert len(set(strides)) > 1

    def look(tensors):
        parts = zip(tensors, strides, strict=True)
        return torch.cat([t.detach().reshape(-1)[::stride] * stride**0.5 for t, stride in parts])

    with gradrein.Monitor(net, optimizer) as monitor:
        before = look(net.parameters())
        train(net, optimizer, 1)
        after = look(net.parameters())
        torch.manual_seed(3)
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        gradient = look([p.grad for p in net.parameters()])
        optimizer.step()
    run = read_run(monitor.path)
    assert run.update[0] == pytest.approx(float((after - before).norm() / after.norm()), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(after - before, gradient, dim=0)
    assert run.step_grad_cosine[1] == pytest.approx(float(cosine), abs=1e-3)


@pytest.mark.parametrize("columns", [64, 768, 1000])
def test_a_sample_extrapolates_to_all_weights(columns):
    layer = nn.Linear(columns, 3000)  # a second column in which weights are large: no stride may miss or prefer it
    with torch.no_grad():
        layer.weight[:, 1] *= 50
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with gradrein.Monitor(layer, optimizer, norms="weight") as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            layer(torch.randn(8, columns)).square().mean().backward()
            before = layer.weight.detach().clone()
            optimizer.step()
    after = layer.weight.detach()
    true = float((after - before).norm() / after.norm())
    assert monitor.latest["update/weight"] == pytest.approx(true, rel=0.15)


def test_rows_that_a_sample_has_not_seen_are_not_called_unmoved():
    net = nn.Sequential(nn.Embedding(200_000, 4), nn.Linear(4, 1))
    frozen = nn.Linear(700, 700)
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": frozen.parameters(), "lr": 0.0}], lr=0.1)
    words = torch.tensor([[3, 5]])  # few of the rows; a sample of one in twelve weights has none of them
    with gradrein.Monitor(None, optimizer) as monitor:
        for _ in range(12):
            optimizer.zero_grad()
            (net(words).sum() + frozen(torch.randn(2, 700)).square().mean()).backward()
            optimizer.step()
    run = read_run(monitor.path)
    assert run.unmoved[-1] == {3, 4}  # what is frozen has been seen to have a gradient
    assert [f.name for f in monitor.findings()] == ["dead"]
