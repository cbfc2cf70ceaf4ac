"""Losses on other data become curves of the record, wherever a script puts them; the script notices nothing."""

import io
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradrein
from gradrein.watch import read_run
from gradrein.watch.record.curves.criterion import _NAMES


def mse(a, b):
    return F.mse_loss(a, b)


def train(net, optimizer, steps=5, loss=mse):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(torch.ones(4, 2)), torch.zeros(4, 1)).backward()
        optimizer.step()


@pytest.fixture
def run_epochs():
    """Train five epochs, with something done after each; return the curves."""

    def run(after_epoch, loss=mse, **options):
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with gradrein.Monitor(net, optimizer, **options) as monitor:
            for epoch in range(5):
                train(net, optimizer, loss=loss)
                after_epoch(epoch, net, monitor)
        return {(c.name, c.origin): c for c in read_run(monitor.path).curves}

    return run


def test_printed_lines(run_epochs, capsys):
    found = run_epochs(lambda e, net, m: print(f"epoch {e} val_loss: {1 / (e + 1):.4f}"))
    curve = found["val loss", "printed"]
    assert curve.values == [1.0, 0.5, 0.3333, 0.25, 0.2]
    assert curve.steps == [5, 10, 15, 20, 25]
    assert capsys.readouterr().out == "".join(f"epoch {e} val_loss: {1 / (e + 1):.4f}\n" for e in range(5))


def test_a_number_that_no_one_names_has_to_resemble_the_training_loss(run_epochs):
    def losses(e, net, m):
        with torch.no_grad():
            print("train", 1.0, "test", float((net(torch.ones(4, 2))).square().mean()))

    assert ("test", "printed") in run_epochs(losses)
    assert not run_epochs(lambda e, net, m: print("test", 90.5 + e))


def test_two_values_are_no_curve(run_epochs):
    assert not run_epochs(lambda e, net, m: print("val loss", e + 0.5) if e < 2 else None)


def test_the_last_value_of_a_progress_bar_counts(run_epochs, capsys):
    def bar(e, net, m):
        for part in range(3):
            sys.stderr.write(f"\rValidation: {part}/3 [00:01<00:02, loss={e + 0.1 * part:.2f}]")
        sys.stderr.write("\n")

    assert run_epochs(bar)["validation loss", "printed"].values == pytest.approx([0.2, 1.2, 2.2, 3.2, 4.2])


@pytest.mark.parametrize(("end", "points"), [("\n", 5), ("\r", 3)])
def test_a_value_printed_again_is_a_point_unless_a_bar_shows_it(run_epochs, end, points):
    found = run_epochs(lambda e, net, m: print(f"val loss {(0.5, 0.5, 0.4, 0.3, 0.3)[e]}", end=end))
    assert len(found["val loss", "printed"]) == points


def test_streams_are_the_same_objects_and_left_as_they_were():
    before = sys.stdout, dict(vars(sys.stdout))
    with gradrein.Monitor():
        assert sys.stdout is before[0]
        with gradrein.Monitor():
            assert print("x") is None
            assert sys.stdout.write("val loss 0.3\n") == 13
    assert dict(vars(sys.stdout)) == before[1]


def test_a_stream_that_cannot_be_read_is_written_to(monkeypatch):
    class Closed(io.StringIO):
        __slots__ = ()

    stream = Closed()
    monkeypatch.setattr(sys, "stdout", stream)
    with gradrein.Monitor():
        print("val loss 0.1")
    assert stream.getvalue() == "val loss 0.1\n"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_criterion_without_gradients(run_epochs, mode):
    def evaluate(e, net, m):
        with mode():
            for _ in range(2):
                F.mse_loss(net(torch.ones(4, 2)), torch.ones(4, 1))

    found = run_epochs(evaluate)["mse_loss", "no_grad"]
    assert found.steps == [5, 10, 15, 20, 25]
    assert not run_epochs(evaluate, loss=lambda a, b: F.l1_loss(a, b))  # another function than the one that trains
    module = nn.MSELoss()
    assert run_epochs(lambda e, net, m: evaluate(e, net, m), loss=lambda a, b: module(a, b))


def test_a_loss_at_every_step_is_no_test_loss():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with gradrein.Monitor(net, optimizer) as monitor:
        for _ in range(40):
            train(net, optimizer, steps=1)
            with torch.no_grad():
                F.mse_loss(net(torch.ones(4, 2)), torch.zeros(4, 1))
    assert read_run(monitor.path).curves == []


def test_loss_functions_are_left_as_they_were_and_give_what_they_gave():
    before = {name: getattr(F, name) for name in _NAMES}
    x, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    plain = F.cross_entropy(x, y, reduction="none")
    with gradrein.Monitor():
        assert torch.equal(F.cross_entropy(x, y, reduction="none"), plain)
        assert torch.func.vmap(F.mse_loss)(x.detach(), x.detach()).shape == (4,)
        with pytest.raises(TypeError):
            F.cross_entropy()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces the end of both
            for compiled in (
                torch.jit.script(nn.MSELoss()),
                torch.jit.trace(lambda a, b: F.mse_loss(a, b), (torch.ones(2), torch.zeros(2))),
                torch.compile(lambda a, b: F.mse_loss(a, b), backend="eager", fullgraph=True),
            ):
                assert compiled(torch.ones(2), torch.zeros(2)) == 1
    assert {name: getattr(F, name) for name in _NAMES} == before


def test_a_subclass_finds_torchs_function_by_identity():
    seen = []
    original = F.mse_loss

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    with gradrein.Monitor():
        F.mse_loss(torch.ones(2).as_subclass(Mine), torch.zeros(2))
        assert F.mse_loss is not original
    assert original in seen
    assert F.mse_loss is original


def test_tensorboard(run_epochs, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    before = vars(tensorboard.SummaryWriter)["add_scalar"]
    with tensorboard.SummaryWriter(tmp_path) as writer:
        found = run_epochs(
            lambda e, net, m: [writer.add_scalar("Loss/test", e + 0.5, e), writer.add_scalar("acc/test", 0.9, e)]
        )
    assert found["test loss", "TensorBoard"].values == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert len(found) == 1
    assert vars(tensorboard.SummaryWriter)["add_scalar"] is before


def test_wandb_style_logs(run_epochs, monkeypatch):
    logged = []
    module = types.ModuleType("wandb")
    module.log = logged.append
    monkeypatch.setitem(sys.modules, "wandb", module)
    found = run_epochs(lambda e, net, m: module.log({"val/loss": torch.tensor(e + 0.5), "val/acc": 0.5}))
    assert found["val loss", "wandb"].values == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert len(logged) == 5
    assert module.log == logged.append


def test_notes_and_one_curve_for_one_loss(run_epochs):
    def note_and_print(e, net, m):
        m.note("test", loss=e + 0.5)
        print("test loss", e + 0.5)

    found = run_epochs(note_and_print)
    assert list(found) == [("test", "noted")]


def test_where_the_script_calls_backward_and_step(run_epochs):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with gradrein.Monitor(net, optimizer) as monitor:
        train(net, optimizer)
    backward, step = (n for n in read_run(monitor.path).notes if "site" in n)
    assert backward["file"] == step["file"] == __file__
    assert step["line"] == backward["line"] + 1
    assert step["text"] == "optimizer.step()"
    assert step["names"] == {"optimizer": "optimizer"}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda p: (2 * p.abs() ** 3).mean(), {"power": 3.0, "of": "Abs", "weighted": True}),
        (lambda p: (p - 1).square().mean(), {"power": 2.0, "of": "Sub"}),
        (lambda p: p.abs().mean(), {}),
        (lambda p: p.square().sum(), {}),  # a penalty on the weights
        (lambda p: 0.1 * p.abs().mean(), {}),
    ],
)
def test_how_the_loss_is_put_together(loss, expected):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with gradrein.Monitor() as monitor:
        loss(weight).backward()
        optimizer.step()
    site = next(n for n in read_run(monitor.path).notes if n.get("site") == "backward")
    assert site["loss_graph"] == expected
