import pytest
import torch

import gradrein

mlflow = pytest.importorskip("mlflow", reason="pip install 'gradrein[mlflow]'")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_numbers_reach_a_local_store(tmp_path, monkeypatch):
    from gradrein.integrations.mlflow import scalars

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with mlflow.start_run() as run, gradrein.Monitor(net, optimizer, on_step=scalars()) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "gradrein/norm")
    assert [metric.step for metric in history] == [0, 1, 2]
    assert history[-1].value == pytest.approx(monitor.latest["norm"])
