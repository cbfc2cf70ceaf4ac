import warnings

import pytest
import torch

pytest.importorskip("lightning", reason="pip install 'gradrein[lightning]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl

    from gradrein.integrations.lightning import MonitorCallback

from gradrein.watch import read_run

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns about loggers and workers


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(folder, callback, **options):
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[callback], enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(Model(), data)
    return trainer


def test_a_fit_is_recorded(tmp_path):
    callback = MonitorCallback(tmp_path / "run.jsonl")
    trainer = fit(tmp_path, callback, logger=True, log_every_n_steps=1)
    run = read_run(tmp_path / "run.jsonl")
    assert len(run.steps) == 8
    assert run.names == ["net.weight", "net.bias"]
    assert run.optimizer == "Adam"
    assert all(loss > 0 for loss in run.loss)
    assert "gradrein/norm" in trainer.callback_metrics


def test_norms_are_those_before_its_own_clipping(tmp_path):
    fit(tmp_path, MonitorCallback(tmp_path / "run.jsonl"), logger=False, gradient_clip_val=1e-3)
    run = read_run(tmp_path / "run.jsonl")
    assert run.threshold == 1e-3
    assert min(run.norm) > 1e-3


def test_clipping_by_us(tmp_path):
    fit(tmp_path, MonitorCallback(tmp_path / "run.jsonl", clip=1e-3), logger=False)
    run = read_run(tmp_path / "run.jsonl")
    assert run.clip == pytest.approx([1e-3 / n for n in run.norm], rel=1e-4)


@pytest.mark.parametrize("ours", [1e-2, 1e-4])
def test_clipping_by_us_switches_the_trainers_own_off(tmp_path, ours):
    fit(tmp_path, MonitorCallback(tmp_path / "run.jsonl", clip=ours), logger=False, gradient_clip_val=1e-3)
    run = read_run(tmp_path / "run.jsonl")
    assert min(run.norm) > 1e-2
    assert run.clip == pytest.approx([ours / n for n in run.norm], rel=1e-3)
    assert run.threshold == ours


class Validated(Model):
    def validation_step(self, batch, index):
        self.log("val/Loss", self.net(batch[0]).square().mean())
        self.log("other", 3.0)


@pytest.mark.parametrize(("name", "expected"), [(None, None), ("other", 3.0), ("none", [])])
def test_the_validation_loss_is_a_curve(tmp_path, name, expected):
    callback = MonitorCallback(tmp_path / "run.jsonl", validation_loss=name)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[callback], enable_progress_bar=False, enable_checkpointing=False, logger=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path, val_check_interval=4,
    )  # fmt: skip
    module = Validated()
    trainer.fit(module, data, data)
    noted = read_run(tmp_path / "run.jsonl").noted_losses("val")
    if expected == []:
        assert noted == []
        return
    assert [after for after, _ in noted] == [4, 8, 12, 16]  # not the check before the fit
    assert noted[-1][1] == pytest.approx(expected or float(trainer.callback_metrics["val/Loss"]), rel=1e-6)


def test_a_second_fit_goes_on_with_the_record(tmp_path):
    callback = MonitorCallback(tmp_path / "run.jsonl")
    module, data = Model(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
    for _ in range(2):
        pl.Trainer(
            max_epochs=1, callbacks=[callback], enable_progress_bar=False, enable_checkpointing=False, logger=False,
            enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        ).fit(module, data)  # fmt: skip
    assert callback.monitor.steps == 4
    assert read_run(tmp_path / "run.jsonl").n_optimizers == 2
