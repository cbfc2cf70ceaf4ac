"""Private training with peft, autocast, checkpoints, Lightning and the Trainer of Transformers."""

import pathlib
import runpy

import pytest
import torch
import torch.nn.functional as F
from common import data, flat, losses_of, make, mlp, train
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradrein import errors

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("largest", [None, 3])
def test_bfloat16_by_autocast(largest):
    run = make(max_physical_batch=largest)
    for x, y, _ in run.loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = losses_of(run.model, x, y)
        run.step(losses)
    torch.testing.assert_close(flat(run.model), flat(train(make()).model), atol=2e-2, rtol=2e-2)


def test_checkpoints():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    torch.testing.assert_close(flat(train(make(Checkpointed())).model), flat(train(make()).model))


class Sequences(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))


def sequence_losses(model, inputs):
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:], reduction="none")


def test_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = make(model, Sequences(), 6)
    for batch in run.loader:
        run.step(sequence_losses(model, batch))
    assert run.steps == 4
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in moved)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "package"), [("private_lightning", "lightning"), ("private_trainer", "peft")])
def test_examples(name, package, capsys):
    pytest.importorskip(package)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "epsilon" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_the_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from gradrein.integrations.transformers import PrivateTrainer

    class Ours(PrivateTrainer):
        def losses(self, model, inputs):
            return sequence_losses(model, inputs)

    def fit(run, resume=None, **options):
        given = {"num_train_epochs": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        args = transformers.TrainingArguments(str(tmp_path), lr_scheduler_type="constant", **{**given, **options})
        Ours(run, args=args).train(resume_from_checkpoint=resume)
        return run

    plain = make(llama(), Sequences(), 6)
    for _ in range(2):
        for batch in plain.loader:
            plain.step(sequence_losses(plain.model, batch))
    run = fit(make(llama(), Sequences(), 6), save_strategy="steps", save_steps=3)
    assert run.steps == 8
    torch.testing.assert_close(flat(run.model), flat(plain.model))
    resumed = fit(make(llama(), Sequences(), 6), resume=str(tmp_path / "checkpoint-3"))
    assert resumed.steps == 8
    assert torch.equal(flat(resumed.model), flat(run.model))
    with pytest.raises(errors.PrivacyError, match="max_physical_batch to Private instead of"):
        fit(make(llama(), Sequences(), 6), gradient_accumulation_steps=2)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    from gradrein.integrations.lightning import PrivateCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net, self.run = mlp(), None

        def training_step(self, batch, index):
            x, y, _ = batch
            self.run.step(losses_of(self.net, x, y))

        def configure_optimizers(self):
            return self.run.optimizer

    def fit(module, loader=None, path=None, **options):
        module.run = make(module)
        trainer = pl.Trainer(
            max_epochs=2,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[PrivateCallback(module.run)],
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(module, loader or module.run.loader, ckpt_path=path)
        return trainer

    module = Module()
    trainer = fit(module)
    assert module.run.steps == 10
    torch.testing.assert_close(flat(module.net), flat(train(make(), 2).model))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = Module()
    fit(again, path=tmp_path / "half.ckpt")
    assert again.run.steps == 10
    assert torch.equal(flat(again.net), flat(module.net))
    with pytest.raises(errors.PrivacyError, match="fit the module of the run, with run.loader"):
        fit(Module(), DataLoader(data(), batch_size=8))
    with pytest.raises(errors.PrivacyError, match="Lightning fetches one ahead"):
        PrivateCallback(make(max_physical_batch=3))
