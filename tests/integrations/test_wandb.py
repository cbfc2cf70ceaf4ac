"""The rows that reach `run.log`; a real offline run is the example of docs/integrations.md, which test_docs runs."""

import pytest
import torch

import gradrein

pytest.importorskip("wandb", reason="pip install 'gradrein[wandb]'")


class Run:
    """What `wandb.init` returns, as far as it is used."""

    def __init__(self):
        self.metrics, self.rows = {}, []

    def define_metric(self, name, **options):
        self.metrics[name] = options

    def log(self, row, commit):
        self.rows.append((row, commit))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("commit", [True, False])
def test_every_step_is_a_row_over_its_own_axis(commit):
    from gradrein.integrations.wandb import scalars

    run, net = Run(), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradrein.Monitor(net, optimizer, on_step=scalars(run, commit=commit)) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert run.metrics == {"gradrein/step": {"hidden": True}, "gradrein/*": {"step_metric": "gradrein/step"}}
    assert [(row["gradrein/step"], committed) for row, committed in run.rows] == [(i, commit) for i in range(3)]
    last, _ = run.rows[-1]
    assert last["gradrein/norm"] == monitor.latest["norm"]
    assert {"gradrein/loss", "gradrein/update", "gradrein/lr"} <= set(last)
