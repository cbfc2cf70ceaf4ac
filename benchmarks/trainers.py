"""Clipping inside trainers, by the one line of each integration: its norm beside that of one process, for each layout.

    python benchmarks/trainers.py [--trainers Lightning ...]     # all, or these anew, in results/trainers.json

The same model, data and global batch on one process, on DDP with two, on FSDP2 with two and four, on FSDP2 x tensor
parallelism with two times two (gloo, CPU). In each run the norm before clipping that the trainer logs is compared with
that of one process, and the norm of the gradients that the optimizer sees with the limit. What a trainer cannot do on a
CPU is said. Accelerate, alone and in Transformers, drops FSDP2 on CPUs: it is made to keep it, and then shards as on
accelerators; with tensor parallelism, its model is sharded by hand. torchtitan (0.2.2; leave it out where it is not
installed) trains its llama3 debug model in its own loop; since it asks for an accelerator and triton, the CPU stands in
for the one, and its kernels for experts are left out. Under DDP its gradients are those of one process over the number
of ranks; the norm is compared times that number.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gradrein

LIMIT, STEPS, BATCH = 0.02, 3, 8
LAYOUTS = {
    "one process": ("none", 1),
    "DDP, 2": ("ddp", 2),
    "FSDP2, 2": ("fsdp2", 2),
    "FSDP2, 4": ("fsdp2", 4),
    "FSDP2 x TP, 2 x 2": ("fsdp2-tp", 4),
}


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


def shard(model, mesh):
    """Shard a model over a mesh of data-parallel ranks, or of those and tensor-parallel ones."""
    if mesh.ndim == 2:
        columns = {f"blocks.{i}": ColwiseParallel(output_layouts=Replicate()) for i in range(len(model.blocks))}
        parallelize_module(model, mesh["tensor_parallel"], columns)
        mesh = mesh["data_parallel"]
    for block in (*model.blocks, model):
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)


def parts(layout):
    """This rank's share of each global batch."""
    rank, size = rank_and_size()
    if layout == "fsdp2-tp":
        rank, size = rank // 2, size // 2
    x, y = samples()
    for step in range(STEPS):
        rows = slice(step * BATCH + rank * BATCH // size, step * BATCH + (rank + 1) * BATCH // size)
        yield x[rows], y[rows]


class Seen:
    """The norm of the gradients that an optimizer steps with, over all ranks."""

    def __init__(self, layout):
        self.norms, self.sharded = [], layout.startswith("fsdp2")

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


def shard_with_accelerate_on_a_cpu():
    """Let Accelerate take what it was told of FSDP2 for CPUs as well: it drops it for anything but accelerators."""
    from accelerate.state import AcceleratorState, DistributedType

    begin = AcceleratorState.__init__

    def begin_sharded(self, *args, fsdp_plugin=None, **options):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = begin_sharded


def with_accelerate(layout):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from gradrein.integrations.accelerate import clip_

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plugin = None
    if layout == "fsdp2":
        shard_with_accelerate_on_a_cpu()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Linear"])
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if layout == "fsdp2-tp":  # by hand
        sizes, names = (rank_and_size()[1] // 2, 2), ("data_parallel", "tensor_parallel")
        shard(model, init_device_mesh("cpu", sizes, mesh_dim_names=names))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    before, after = [], Seen(layout)
    after.attach(optimizer.optimizer)
    for x, y in parts(layout):
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
    fsdp = {}
    if layout == "fsdp2-tp":
        raise RuntimeError("the Trainer takes tensor parallelism from a model of Transformers with a plan for it")
    if layout == "fsdp2":
        shard_with_accelerate_on_a_cpu()
        fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Linear"]}}
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
            if layout.startswith("fsdp2") and not isinstance(next(self.parameters()), torch.distributed.tensor.DTensor):
                shard(self.model, self.device_mesh if layout == "fsdp2-tp" else self.device_mesh["data_parallel"])

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

    loader = torch.utils.data.DataLoader(list(parts(layout)), batch_size=None)
    strategies = {"none": lambda: "auto", "ddp": lambda: "ddp", "fsdp2": lambda: ModelParallelStrategy(size, 1)}
    strategies["fsdp2-tp"] = lambda: ModelParallelStrategy(size // 2, 2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, strategy=strategies[layout](), max_steps=STEPS, log_every_n_steps=1,
        logger=CSVLogger(tempfile.mkdtemp()), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback, Watch()], num_sanity_val_steps=0, gradient_clip_val=9.0,
        use_distributed_sampler=False,
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        trainer.fit(Module(), loader)
    return before, after.norms


def stand_in_for_an_accelerator():
    """Let torchtitan take the CPU for its device."""
    sys.modules["torchtitan.models.moe.kernels"] = mock.MagicMock()  # imports triton, for experts
    torch._utils._get_available_device_type = lambda: "cpu"
    device = SimpleNamespace(total_memory=1)
    torch.cpu.get_device_properties, torch.cpu.get_device_name = lambda _: device, lambda _: "CPU"
    torch.cpu.memory_stats = lambda _: dict.fromkeys(
        ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0
    )
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    torch.cpu.current_device = lambda: 0


def with_torchtitan(layout):
    stand_in_for_an_accelerator()
    import torchtitan.distributed.utils as dist_utils
    import torchtitan.train
    from torchtitan.config import JobConfig
    from torchtitan.protocols import train_spec

    from gradrein.integrations.torchtitan import clip_grad_norm_

    dist_utils.clip_grad_norm_ = clip_grad_norm_
    tokens = torch.randint(2048, (STEPS * BATCH, 65), generator=torch.Generator().manual_seed(1))

    class Loader(list):  # of this rank's rows of each global batch
        def __init__(self, dp_world_size, dp_rank, **_):
            rows = [part.chunk(dp_world_size)[dp_rank] for part in tokens.split(BATCH)]
            super().__init__(({"input": part[:, :-1]}, part[:, 1:]) for part in rows)

        def state_dict(self):
            return {}

        def load_state_dict(self, _):
            pass

    spec = dataclasses.replace(train_spec.get_train_spec("llama3"), build_dataloader_fn=Loader, build_tokenizer_fn=None)
    torchtitan.train.train_spec_module.get_train_spec = lambda _: spec
    config, size = JobConfig(), rank_and_size()[1]
    config.model.name, config.model.flavor = "llama3", "debugmodel"
    config.training.steps, config.training.seq_len, config.training.max_norm = STEPS, 64, LIMIT
    config.training.mixed_precision_param, config.metrics.log_freq = "float32", 1
    config.optimizer.lr, config.lr_scheduler.warmup_steps, config.job.dump_folder = 1e-4, 0, tempfile.mkdtemp()
    shards = {"none": 1, "ddp": 1, "fsdp2": size, "fsdp2-tp": size // 2}[layout]
    parallelism = config.parallelism
    parallelism.data_parallel_shard_degree, parallelism.tensor_parallel_degree = shards, 1 + (layout == "fsdp2-tp")
    parallelism.data_parallel_replicate_degree = size if layout == "ddp" else 1
    config.training.local_batch_size = BATCH // (size if layout == "ddp" else shards)
    trainer = torchtitan.train.Trainer(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    generator = torch.Generator().manual_seed(2)
    for p in trainer.model_parts[0].parameters():  # the same weights in each layout
        whole = torch.randn(p.shape, generator=generator) * 0.05
        with torch.no_grad():
            p.copy_(distribute_tensor(whole, p.device_mesh, p.placements) if hasattr(p, "placements") else whole)
    before, after = [], Seen(layout)
    after.attach(trainer.optimizers.optimizers[0])
    log = trainer.metrics_processor.log

    def watched(step, average, largest, norm, **rest):
        before.append(norm)
        log(step, average, largest, norm, **rest)

    trainer.metrics_processor.log = watched
    trainer.train()
    # It divides the loss by the tokens of all ranks, and DDP then takes the mean over ranks: gradients are that much
    # smaller, with its own clipping too. FSDP adds up.
    return [norm * (size if layout == "ddp" else 1) for norm in before], after.norms


TRAINERS = {
    "Accelerate": with_accelerate,
    "Transformers": with_transformers,
    "Lightning": with_lightning,
    "torchtitan": with_torchtitan,
}


def child(trainer, layout):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before, after = TRAINERS[trainer](layout)
    if rank_and_size()[0] == 0:
        print("RESULT " + json.dumps([[float(n) for n in before], [float(n) for n in after]]))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def launched(trainer, layout, size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
    if size == 1 and trainer != "torchtitan":
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
    path = pathlib.Path(__file__).parent / "results" / "trainers.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in known if row["trainer"] not in asked.trainers]
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
    path.write_text(json.dumps({"method": __doc__, "limit": LIMIT, "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
