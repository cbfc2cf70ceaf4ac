import warnings

import pytest
import torch

import bridle

pytest.importorskip("tensorboard", reason="pip install 'bridle[tensorboard]'")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_scalars_are_written(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        from bridle.integrations.tensorboard import scalars

    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with SummaryWriter(tmp_path) as writer, bridle.Monitor(net, optimizer, on_step=scalars(writer)) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("bridle/norm")] == [0, 1, 2]
    assert events.Scalars("bridle/norm")[-1].value == pytest.approx(monitor.latest["norm"], rel=1e-5)


def test_a_second_optimizer_has_names_of_its_own():
    from bridle.integrations._scalars import named

    nets = [torch.nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    received = []
    with bridle.Monitor(on_step=lambda latest: received.append(named(latest, "bridle/"))):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert [step for step, _ in received] == [0, 0]
    assert "bridle/norm" in received[0][1]
    assert "bridle/opt1/norm" in received[1][1]
    assert "bridle/norm" not in received[1][1]
