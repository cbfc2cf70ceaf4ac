"""Clipping in place of a trainer's own: once, by number, policy or mapping; with the norm before it in the log."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch

from gradrein import by_norm, policies
from gradrein.errors import ArgumentError, ArgumentTypeError

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
    assert args.max_grad_norm == 1  # its own clipping is on again
    assert all(float(logs["grad_norm"]) > 1 for logs in seen)
    assert all(float(logs["grad_norm_clipped"]) > 0 for logs in seen)
    monitor = MonitorCallback(tmp_path / "run.jsonl", clip=0.5)
    monitor.on_train_begin(args, None, None, model=model)
    assert args.max_grad_norm == 0
    monitor.on_train_end(args, None, None)
    assert args.max_grad_norm == 1


class Rows(torch.nn.Module):
    """Two layers, of which one is left alone or frozen."""

    def __init__(self, poison=None):
        super().__init__()
        self.embed, self.net, self.poison = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), poison

    def forward(self, x, labels):
        loss = (self.net(self.embed(x)) - labels).square().mean()
        if self.poison is not None:
            loss = loss + self.net.bias.sum() * self.poison
        return {"loss": loss}


@pytest.fixture
def trained(tmp_path):
    """Train a model of rows by the Trainer for three steps, and return the trainer and what it logged."""
    transformers = pytest.importorskip("transformers", reason="pip install 'gradrein[transformers]'")

    def train(model, *callbacks, resume=None, folder="out", trainer_class=transformers.Trainer, **options):
        logged = []

        class Tracker(transformers.TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                logged.extend([logs] if "loss" in logs else [])

        args = transformers.TrainingArguments(
            str(tmp_path / folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_steps=2, optim="sgd", **options,
        )  # fmt: skip
        rows = [{"x": torch.randn(4), "labels": 10 * torch.ones(1)} for _ in range(12)]
        trainer = trainer_class(model=model, args=args, train_dataset=rows, callbacks=[Tracker(), *callbacks])
        trainer.train(resume_from_checkpoint=resume)
        return trainer, logged

    return train


def test_a_group_that_is_left_alone_does_not_count(trained, tmp_path):
    from gradrein.integrations.transformers import ClipCallback, MonitorCallback

    callback, monitor = ClipCallback({"embed*": None, "*": 0.5}), MonitorCallback(tmp_path / "run.jsonl")
    trainer, logged = trained(Rows(), callback, monitor)
    assert float(logged[-1]["grad_norm"]) == pytest.approx(callback.clipper.report.norm, rel=1e-3)
    assert float(logged[-1]["grad_norm_clipped"]) == pytest.approx(0.5, rel=1e-3)
    # What all gradients were multiplied by is measured, and is not the factor of the one group.
    assert monitor.monitor.latest["clip"] > 1.01 * callback.clipper.report.coefficient
    assert trainer.args.max_grad_norm == 1.0
    assert "_get_grad_norm" not in vars(trainer)


@pytest.mark.parametrize("nonfinite", ["raise", "zero"])
def test_the_trainer_does_not_spoil_gradients_by_measuring_them(trained, nonfinite):
    from gradrein.errors import NonFiniteGradientError
    from gradrein.integrations.transformers import ClipCallback

    model, callback = Rows(poison=float("inf")), ClipCallback(1.0, nonfinite=nonfinite)
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=r"net\.bias") as raised:
            trained(model, callback)
        assert "embed" not in str(raised.value)
        return
    trained(model, callback)
    assert torch.isfinite(model.embed.weight).all()
    assert callback.clipper.report.offenders == {"net.bias": 1}


def test_a_folder_of_its_own_and_a_checkpoint_from_elsewhere(trained, tmp_path):
    import transformers

    from gradrein.errors import GradreinWarning
    from gradrein.integrations.transformers import ClipCallback

    class Search(transformers.Trainer):
        def _get_output_dir(self, trial):
            return str(tmp_path / "run-0")

    model, first = Rows(), ClipCallback("median")
    trained(model, first, trainer_class=Search)
    again = ClipCallback("median")
    trained(Rows(), again, resume=str(tmp_path / "run-0" / "checkpoint-3"), folder="elsewhere")
    assert str(again.clipper.state_dict()) == str(first.clipper.state_dict())
    (tmp_path / "run-0" / "checkpoint-3" / "clipper.pt").unlink()
    with pytest.warns(GradreinWarning, match="learn anew"):
        trained(Rows(), ClipCallback("median"), resume=str(tmp_path / "run-0" / "checkpoint-3"), folder="third")
    trained(model, first, folder="goes on")  # the same model goes on, another begins anew
    assert first.clipper.state_dict()["*"]["rows"]["seen"] == 6
    trained(Rows(), first, folder="anew")
    assert first.clipper.state_dict()["*"]["rows"]["seen"] == 3


def test_a_training_that_failed_clips_nobody_else(trained, tmp_path):
    from gradrein.integrations.transformers import MonitorCallback

    class Failing(Rows):
        def forward(self, x, labels):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().forward(x, labels)

    monitor = MonitorCallback(tmp_path / "run.jsonl", clip=0.01)
    with pytest.raises(KeyboardInterrupt):
        trained(Failing(), monitor)
    other = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    other(torch.randn(8, 4)).mul(100).square().mean().backward()
    before = norm_of(other.parameters())
    optimizer.step()
    assert norm_of(other.parameters()) == before
    stopped = monitor.monitor
    trained(Rows(), monitor)
    assert monitor.monitor is not stopped
    assert monitor.monitor.steps == 3
    stopped.stop()


def test_the_loss_of_the_first_of_several_datasets(tmp_path):
    pytest.importorskip("transformers")
    from gradrein.integrations.transformers import MonitorCallback

    callback, noted = MonitorCallback(), []
    callback.monitor = type("M", (), {"note": lambda self, name, loss: noted.append(loss)})()
    for step in range(2):
        for number, name in enumerate("ab"):
            callback.on_evaluate(None, None, None, metrics={f"eval_{name}_loss": step + number / 2, "epoch": 1})
    assert noted == [0.0, 1.0]
    noted.clear()
    callback._test_loss = None
    callback.on_evaluate(None, None, None, metrics={"eval_mlm_loss": 3.0, "eval_loss": 2.0})
    assert noted == [2.0]


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
    assert trainer.gradient_clip_val == 1e-5  # its own clipping is on again
    check(rules, module.net, seen, callback.clippers[0])
    assert all(metrics["grad_norm"] > 1 for metrics in seen)


def test_lightning_with_two_optimizers(tmp_path):
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'gradrein[lightning]'")
    from gradrein import policies
    from gradrein.integrations.lightning import ClipCallback, MonitorCallback

    class Pair(pl.LightningModule):
        outside = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.gen, self.disc = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
            self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward((self.disc(self.gen(batch)) - 10).square().mean())
                optimizer.step()

        def configure_optimizers(self):
            gen = (
                [*self.gen.parameters(), torch.nn.Parameter(torch.zeros(1))] if self.outside else self.gen.parameters()
            )
            return [torch.optim.SGD(given, 1e-4) for given in (gen, self.disc.parameters())]

    def fit(*callbacks, logger=False):
        options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_steps=6, log_every_n_steps=1, logger=logger, accelerator="cpu", callbacks=[*callbacks], **options
        )
        trainer.fit(Pair(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4))
        return trainer

    by_name = ClipCallback({"frozen*": None, "gen.*": 0.01, "disc.*": 0.02})
    fit(by_name)
    assert [clipper.report.norm_after for clipper in by_name.clippers] == pytest.approx([0.01, 0.02], rel=1e-4)
    learning = ClipCallback(policies.ByMedian(warmup=1))
    fit(learning)
    first, second = (clipper.policy for clipper in learning.clippers)
    assert first is not second
    assert str(first.state_dict()) != str(second.state_dict())
    from lightning.pytorch.loggers import CSVLogger

    trainer = fit(MonitorCallback(tmp_path / "run.jsonl", clip=policies.ByMedian(warmup=1)), logger=CSVLogger(tmp_path))
    assert {"gradrein/norm", "gradrein/opt1/norm"} <= trainer.callback_metrics.keys()
    with pytest.raises(ArgumentError, match="never used"):
        fit(ClipCallback({"nobody*": None, "*": 1.0}))
    Pair.outside = True  # a number needs no names: an optimizer may have a parameter that the module has not
    fit(ClipCallback(0.01))


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
                for given in (model.parameters(), optimizer):  # as `accelerator.clip_grad_norm_` takes them
                    assert clip_(accelerator, given, 1e-3).norm_after == pytest.approx(1e-3, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
    assert [report is None for report in reports] == [True, False, True, False]
    assert reports[1].norm > 1
    with pytest.raises(ArgumentTypeError, match="the first argument is the Accelerator"):
        clip_(model, accelerator, 1.0)
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
def test_two_processes_with_fsdp2_clip_as_one_does(monkeypatch):
    pytest.importorskip("transformers", reason="pip install 'gradrein[transformers]'")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    trainers = importlib.import_module("trainers")
    model, (x, y) = trainers.Model(), next(trainers.parts("none"))
    model(x, y)["loss"].backward()
    found = trainers.launched("Transformers", "fsdp2", 2)
    assert found.get("before", found)[0] == pytest.approx(norm_of(model.parameters()), rel=1e-6)
    assert found["after"] == pytest.approx([trainers.LIMIT] * trainers.STEPS, rel=1e-6)
