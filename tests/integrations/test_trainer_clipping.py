"""Clipping in place of a trainer's own: once, by number, policy or mapping; with the norm before it in the log."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch

from gradrein import by_norm, policies
from gradrein.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")
RULES = {"number": 0.01, "policy": by_norm(0.01), "mapping": {"net.weight": 0.01, "*": None}, "name": "auto"}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def norm_of(parameters):
    return torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters])).item()


def check(rules, net, seen, clipper):
    """Look at the gradients that the optimizer has stepped with."""
    assert len(seen) == 3
    if rules == "name":
        assert isinstance(clipper.policy, policies.ByOvershoot)
        return
    parameters = [net.weight] if rules == "mapping" else [net.weight, net.bias]
    assert norm_of(parameters) == pytest.approx(0.01, rel=1e-4)
    if rules == "mapping":
        assert abs(net.bias.grad.item()) > 0.01


@pytest.mark.parametrize("rules", RULES)
def test_the_trainer_of_transformers(rules, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install 'gradrein[transformers]'")
    from gradrein.integrations.transformers import ClipCallback, MonitorCallback

    seen, model = [], Model()

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.extend([logs] if "loss" in logs else [])

        def on_optimizer_step(self, *_, **__):
            self.grads = [p.grad.clone() for p in model.parameters()]

    tracker, callback = Tracker(), ClipCallback(RULES[rules])
    rows = [{"x": torch.randn(4), "labels": 10 * torch.ones(1)} for _ in range(12)]
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="steps", save_steps=3,
    )  # fmt: skip
    transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=[tracker, callback]).train()
    assert "_gradrein_clippers" not in vars(callback.clipper.optimizer)
    again = ClipCallback(RULES[rules])
    resumed = transformers.Trainer(model=Model(), args=args, train_dataset=rows, callbacks=[again])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert str(again.clipper.state_dict()) == str(callback.clipper.state_dict())
    for p, g in zip(model.parameters(), tracker.grads, strict=True):
        p.grad = g
    check(rules, model.net, seen, callback.clipper)
    assert args.max_grad_norm == 0  # its own clipping is off
    assert all(float(logs["grad_norm"]) > 1 for logs in seen)
    assert all(float(logs["grad_norm_clipped"]) > 0 for logs in seen)
    args.max_grad_norm = 1.0
    monitor = MonitorCallback(tmp_path / "run.jsonl", clip=0.5)
    monitor.on_train_begin(args, None, None, model=model)
    monitor.on_train_end(args, None, None)
    assert args.max_grad_norm == 0


@pytest.mark.parametrize("rules", RULES)
def test_lightning(rules, tmp_path):
    pytest.importorskip("lightning", reason="pip install 'gradrein[lightning]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl
        from lightning.pytorch.loggers import CSVLogger

        from gradrein.integrations.lightning import ClipCallback

    seen = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return (self.net(batch) - 10).square().mean()

        def on_train_batch_end(self, *_):
            self.grads = [p.grad.clone() for p in self.parameters()]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-4)

    class Logger(CSVLogger):
        def log_metrics(self, metrics, step=None):
            seen.extend([metrics] if "grad_norm" in metrics else [])

    module, callback = Module(), ClipCallback(RULES[rules])
    trainer = pl.Trainer(
        max_steps=3, log_every_n_steps=1, logger=Logger(tmp_path), enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], gradient_clip_val=1e-5,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4)
    trainer.fit(module, loader)
    assert "_gradrein_clippers" not in vars(callback.clippers[0].optimizer)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = ClipCallback(RULES[rules])
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    pl.Trainer(max_steps=3, callbacks=[again], **options).fit(Module(), loader, ckpt_path=tmp_path / "end.ckpt")
    assert str(again.clippers[0].state_dict()) == str(callback.clippers[0].state_dict())
    for p, g in zip(module.parameters(), module.grads, strict=True):
        p.grad = g
    check(rules, module.net, seen, callback.clippers[0])
    assert all(metrics["grad_norm"] > 1 for metrics in seen)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="pip install 'gradrein[accelerate]'")
    from gradrein.integrations.accelerate import clip_

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    reports = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 4), 10 * torch.ones(4, 1))["loss"])
            reports.append(clip_(accelerator, model, {"net.*": 0.01}))
            if reports[-1] is not None:
                assert norm_of(model.parameters()) == pytest.approx(0.01, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
    assert [report is None for report in reports] == [True, False, True, False]
    assert reports[1].norm > 1
    for by_name in ("auto", {"*": "auto"}):
        with pytest.raises(ArgumentError, match="never learn"):
            clip_(accelerator, model, by_name)


def test_the_function_of_torchtitan():
    from gradrein.integrations.torchtitan import clip_grad_norm_

    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    norm = clip_grad_norm_([p], 1.0, foreach=True, pp_mesh=None, ep_enabled=True)
    assert norm == 5
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))


def test_a_mistake_is_an_error_where_it_is_made():
    pytest.importorskip("transformers")
    from gradrein.integrations.transformers import ClipCallback

    for wrong in (-1.0, "automatic", {"*": -1}):
        with pytest.raises(ArgumentError):
            ClipCallback(wrong)


@pytest.mark.needs("fully_shard on the CPU")
@pytest.mark.parametrize("trainer", ["Transformers", "Lightning"])
def test_two_processes_with_fsdp2_clip_as_one_does(trainer, monkeypatch):
    pytest.importorskip(trainer.lower(), reason=f"pip install 'gradrein[{trainer.lower()}]'")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    trainers = importlib.import_module("trainers")
    model, (x, y) = trainers.Model(), next(trainers.parts("none"))
    model(x, y)["loss"].backward()
    found = trainers.launched(trainer, "fsdp2", 2)
    assert found.get("before", found)[0] == pytest.approx(norm_of(model.parameters()), rel=1e-6)
    assert found["after"] == pytest.approx([trainers.LIMIT] * trainers.STEPS, rel=1e-6)
