"""Clipping inside trainers, by the one line of each integration: its norm beside that of one process, for each layout.

    python benchmarks/trainers.py     # writes results/trainers.json; some minutes

The same model, data and global batch on one process, on DDP with two, on FSDP2 with two and four (gloo, CPU). In each
run the norm before clipping that the trainer logs is compared with that of one process, and the norm of the gradients
that the optimizer sees with the limit. What a trainer cannot do on a CPU is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import gradrein

LIMIT, STEPS, BATCH = 0.05, 3, 8
LAYOUTS = {"one process": ("none", 1), "DDP, 2": ("ddp", 2), "FSDP2, 2": ("fsdp2", 2), "FSDP2, 4": ("fsdp2", 4)}


class Model(nn.Module):
    """Two blocks and a head; the loss is part of it, as the Trainer of Transformers has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, 1)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x).tanh() + x
        return {"loss": (self.head(x) - labels).square().mean()}


def samples():
    generator = torch.Generator().manual_seed(1)
    count = BATCH * STEPS
    return torch.randn(count, 12, generator=generator), torch.randn(count, 1, generator=generator)


def rank_and_size():
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def parts():
    """This rank's share of each global batch."""
    rank, size = rank_and_size()
    x, y = samples()
    for step in range(STEPS):
        rows = slice(step * BATCH + rank * BATCH // size, step * BATCH + (rank + 1) * BATCH // size)
        yield x[rows], y[rows]


class Seen:
    """The norm of the gradients that an optimizer steps with, over all ranks."""

    def __init__(self, layout):
        self.norms, self.sharded = [], layout == "fsdp2"

    def attach(self, optimizer):
        step = optimizer.step
        first = optimizer.param_groups[0]["params"][0]
        if hasattr(first, "placements") != self.sharded:
            raise RuntimeError("this trainer shards on accelerators only, not on a CPU")

        def watched(*args, **kwargs):
            out = step(*args, **kwargs)
            grads = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.norms.append(float(gradrein.clip_grad_norm_(grads, float("inf"))))
            return out

        optimizer.step = watched


def with_accelerate(layout):
    from accelerate import Accelerator

    from gradrein.integrations.accelerate import clip_

    accelerator = Accelerator(cpu=True)
    model = Model()
    if layout == "fsdp2":  # by hand: Accelerate itself shards on accelerators only
        for block in (*model.blocks, model):
            torch.distributed.fsdp.fully_shard(block)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    before, after = [], Seen(layout)
    after.attach(optimizer.optimizer)
    for x, y in parts():
        optimizer.zero_grad()
        accelerator.backward(model(x, y)["loss"])
        before.append(clip_(accelerator, model, LIMIT).norm)
        optimizer.step()
    return before, after.norms


def with_transformers(layout):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradrein.integrations.transformers import ClipCallback

    _, size = rank_and_size()
    x, y = samples()
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    before, after = [], Seen(layout)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, optimizer=None, **__):
            after.attach(optimizer.optimizer)

        def on_log(self, *_, logs=None, **__):
            before.extend([logs["grad_norm"]] if "grad_norm" in logs else [])

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(rows)

    folder = tempfile.mkdtemp()
    fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": 2}} if layout == "fsdp2" else {}
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH // size, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", **fsdp,
    )  # fmt: skip
    callbacks = [ClipCallback(LIMIT), Watch()]
    with contextlib.redirect_stdout(sys.stderr):
        InOrder(model=Model(), args=args, train_dataset=rows, callbacks=callbacks).train()
    return before, after.norms


def with_lightning(layout):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import ModelParallelStrategy

    from gradrein.integrations.lightning import ClipCallback

    after = Seen(layout)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def configure_model(self):
            if layout == "fsdp2" and not isinstance(next(self.parameters()), torch.distributed.tensor.DTensor):
                mesh = self.device_mesh["data_parallel"]
                for block in (*self.model.blocks, self.model):
                    torch.distributed.fsdp.fully_shard(block, mesh=mesh)

        def training_step(self, batch, index):  # noqa: ARG002
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            after.attach(optimizer)
            return optimizer

    _, size = rank_and_size()
    callback = ClipCallback(LIMIT)
    before = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_, **__):
            before.append(callback.clippers[0].report.norm)

    loader = torch.utils.data.DataLoader(list(parts()), batch_size=None)
    strategy = {"none": "auto", "ddp": "ddp", "fsdp2": ModelParallelStrategy(size, 1) if layout == "fsdp2" else None}
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, strategy=strategy[layout], max_steps=STEPS, log_every_n_steps=1,
        logger=CSVLogger(tempfile.mkdtemp()), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback, Watch()], num_sanity_val_steps=0, gradient_clip_val=9.0,
        use_distributed_sampler=False,
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        trainer.fit(Module(), loader)
    return before, after.norms


TRAINERS = {"Accelerate": with_accelerate, "Transformers": with_transformers, "Lightning": with_lightning}


def child(trainer, layout):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before, after = TRAINERS[trainer](layout)
    if rank_and_size()[0] == 0:
        print("RESULT " + json.dumps([[float(n) for n in before], [float(n) for n in after]]))
    if dist.is_initialized():
        dist.destroy_process_group()


def launched(trainer, layout, size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
    if size == 1:
        command = [sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    run = subprocess.run(
        [*command, "--child", trainer, layout], capture_output=True, text=True, timeout=240, env=environment
    )
    result = re.search(r"^RESULT (.*)$", run.stdout, re.MULTILINE)
    if result is None:
        errors = re.findall(r"^(?:\[rank\d+\]: )?(\w*Error: .*)$", run.stderr, re.MULTILINE)
        return {"cannot": (errors or [run.stderr[-300:]])[0][:200]}
    return dict(zip(("before", "after"), json.loads(result[1]), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--trainers", nargs="*", default=list(TRAINERS))
    asked = parser.parse_args()
    if asked.child:
        return child(*asked.child)
    rows = []
    for trainer in asked.trainers:
        one = None
        for name, (layout, size) in LAYOUTS.items():
            row = {"trainer": trainer, "layout": name, **launched(trainer, layout, size)}
            row = {
                key: value.removeprefix("RuntimeError: ") if key == "cannot" else value for key, value in row.items()
            }
            one = row.get("before") if one is None else one
            if one and "before" in row:
                row["norm, relative difference"] = max(abs(a / b - 1) for a, b in zip(row["before"], one, strict=True))
                row["largest norm after, over the limit"] = max(row["after"]) / LIMIT
            print(row, flush=True)
            rows.append(row)
    path = pathlib.Path(__file__).parent / "results" / "trainers.json"
    path.write_text(json.dumps({"method": __doc__, "limit": LIMIT, "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
