import warnings

import pytest
import torch

import gradrein

pytest.importorskip("tensorboard", reason="pip install 'gradrein[tensorboard]'")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_scalars_are_written(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        from gradrein.integrations.tensorboard import scalars

    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with SummaryWriter(tmp_path) as writer, gradrein.Monitor(net, optimizer, on_step=scalars(writer)) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("gradrein/norm")] == [0, 1, 2]
    assert events.Scalars("gradrein/norm")[-1].value == pytest.approx(monitor.latest["norm"], rel=1e-5)


def test_a_second_optimizer_has_names_of_its_own():
    from gradrein.integrations._scalars import named

    nets = [torch.nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    received = []
    with gradrein.Monitor(on_step=lambda latest: received.append(named(latest, "gradrein/"))):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert [step for step, _ in received] == [0, 0]
    assert "gradrein/norm" in received[0][1]
    assert "gradrein/opt1/norm" in received[1][1]
    assert "gradrein/norm" not in received[1][1]
