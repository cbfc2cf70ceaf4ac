import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'gradrein[transformers]'")
pytest.importorskip("accelerate", reason="the Trainer needs it: pip install 'gradrein[transformers]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradrein.integrations.transformers import MonitorCallback

from gradrein.watch import read_run

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def data(n=32):
    torch.manual_seed(0)
    return [{"x": torch.randn(4), "labels": torch.ones(1)} for _ in range(n)]


def test_a_training_is_recorded(tmp_path, capsys):
    callback = MonitorCallback(tmp_path / "run.jsonl")
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", eval_strategy="steps", eval_steps=3, max_grad_norm=1e-3,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=args, train_dataset=data(), eval_dataset=data(8), callbacks=[callback])
    trainer.train()
    run = read_run(tmp_path / "run.jsonl")
    assert len(run.steps) == 6
    assert run.names == ["net.weight", "net.bias"]
    assert run.threshold == 1e-3
    assert min(run.norm) > 1e-3  # before the trainer's own clipping
    assert [step for step, _ in run.noted_losses("test")] == [3, 6]
    assert "'gradrein_norm'" in capsys.readouterr().out


class Tracker(TrainerCallback):
    """A tracker as those of `report_to`: it logs what it is given, when it is called."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append((state.global_step, dict(logs)))


def test_the_numbers_reach_trackers_that_come_before(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="pip install 'gradrein[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker, callback = Tracker(), MonitorCallback(tmp_path / "run.jsonl")
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, logging_steps=1, use_cpu=True,
        report_to=["tensorboard"], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = Trainer(model=Model(), args=args, train_dataset=data(), callbacks=[tracker, callback])
    trainer.train()
    norms = [logs["gradrein_norm"] for _, logs in tracker.logged if "loss" in logs]
    assert norms == pytest.approx(read_run(tmp_path / "run.jsonl").norm)
    events = next(tmp_path.rglob("events.out.tfevents.*")).parent
    found = EventAccumulator(str(events))
    found.Reload()
    assert [e.value for e in found.Scalars("train/gradrein_norm")] == pytest.approx(norms, rel=1e-5)
    trainer.train()  # goes on with the same record
    assert len(read_run(tmp_path / "run.jsonl").steps) == 8
