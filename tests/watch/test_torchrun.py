"""`torchrun ... -m gradrein watch train.py`: the whole way, with real processes."""

import sys
from pathlib import Path

import pytest
import torch

import gradrein
from gradrein.watch import read_report, read_run

from .processes import run_process

TRAIN = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, which = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
model = fully_shard(net) if kind == "sharded" else DistributedDataParallel(net)
beside = torch.nn.Linear(1, 1)  # which nobody has wrapped
parameters = [*model.named_parameters(), *(beside.named_parameters("beside") if kind == "troubled" else ())]
optimizer = torch.optim.SGD(parameters, lr=0.1)
data = torch.Generator().manual_seed(0 if kind == "sharded" else rank)
for step in range(40):
    x = torch.randn(16, 8, generator=data)
    if kind == "killed" and rank == which and step == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    y = model(x)
    if kind == "troubled":
        y = beside(y)
    (y - x[:, :1]).square().mean().backward()
    optimizer.step()
if rank == 0:
    print("trained", flush=True)
dist.barrier()  # or one leaves while another still talks, and gloo ends that one
dist.destroy_process_group()
# gloo's threads outlive the group; one that drops its last tensor while Python ends aborts the process (pytorch 190489)
time.sleep(0.5)
"""


def torchrun(folder, *arguments):
    (folder / "train.py").write_text(TRAIN)
    here = str(Path(gradrein.__file__).parents[1])
    env = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": here}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gradrein", "watch"]
    return run_process([*launch, *arguments], cwd=folder, env=env)


def test_ranks_that_train_together(tmp_path):
    done = torchrun(tmp_path, "train.py", "together", "0")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # as an older torch says
    assert said == ["trained"]
    assert done.stderr.count("train.gradrein.rank0.jsonl") == 2  # how to report: before the script runs, and after
    records = {"train.gradrein.rank0.jsonl", "train.gradrein.rank1.jsonl"}
    assert {file.name for file in tmp_path.iterdir()} == {"train.py", *records}
    report = read_report(tmp_path / "train.gradrein.rank0.jsonl")
    assert "rank_norms" not in {finding.name for finding in report.findings}
    assert "SGD, 40 steps recorded on each of 2 ranks" in str(report)
    run = read_run(tmp_path / "train.gradrein.rank0.jsonl")
    assert run.ranks[0].norms == run.ranks[1].norms
    assert run.ranks[0].loss != run.ranks[1].loss


def test_a_gradient_that_was_left_out_is_named(tmp_path):
    done = torchrun(tmp_path, "train.py", "troubled", "1")
    assert done.returncode == 0, done.stderr
    said = read_report(tmp_path / "train.gradrein.rank0.jsonl").details()
    assert "the gradient of beside.weight and of 1 more is not the same on all ranks, first at step 0" in said


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_is_killed_leaves_its_record_and_a_report(tmp_path, which):
    done = torchrun(tmp_path, "--record", "run.jsonl", "train.py", "killed", str(which))
    assert done.returncode != 0
    said = f"Rank {which} stopped early: its record breaks off after 25 steps"
    assert "run.rank0.jsonl" in done.stderr  # how to report is said before anything can fail
    report = read_report(tmp_path / "run.rank0.jsonl")
    assert any(warning.startswith(said) for warning in report.warnings)
    run = report.run
    assert run.ranks[which].steps == list(range(25))


@pytest.mark.needs("fully_shard on the CPU")
def test_shards_are_clipped_and_recorded_as_one_process_does(tmp_path):
    done = torchrun(tmp_path, "--record", "run.jsonl", "--clip", "0.5", "train.py", "sharded", "0")
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with gradrein.Monitor(net, record=tmp_path / "alone.jsonl", clip=0.5) as monitor:
        for _ in range(40):
            x = torch.randn(16, 8, generator=data)
            optimizer.zero_grad()
            (net(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
    run, alone = read_run(tmp_path / "run.rank1.jsonl"), read_run(monitor.path)
    assert run.norm == pytest.approx(alone.norm, rel=1e-4)
    assert run.clip == pytest.approx(alone.clip, rel=1e-4)
    assert min(run.clip) < 1
    for found, true in zip(run.norms, alone.norms, strict=True):
        assert found == pytest.approx(true, rel=1e-3)
