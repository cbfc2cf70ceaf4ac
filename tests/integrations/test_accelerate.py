import warnings

import pytest
import torch

pytest.importorskip("accelerate", reason="pip install 'gradrein[accelerate]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator

    from gradrein.integrations.accelerate import monitor

from gradrein.watch import read_run

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_prepared_run_is_recorded(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 1))
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, plain)
    with monitor(accelerator, model, optimizer, record=tmp_path / "run.jsonl", clip=1e-3):
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = model(torch.randn(8, 4)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    run = read_run(tmp_path / "run.jsonl")
    assert len(run.steps) == 3
    assert run.names == ["0.weight", "0.bias"]
    assert all(c < 1 for c in run.clip)
