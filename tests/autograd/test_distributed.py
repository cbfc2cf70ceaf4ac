"""Two processes under DistributedDataParallel: observing a pass does not change its communication."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrein
from gradrein.autograd import replay
from gradrein.errors import BackwardError, NonFiniteGradientError

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def build(log):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)

    def count(state, bucket):
        log.append(tuple(bucket.buffer().shape))
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, count)
    return ddp


def steps(rank, backward):
    """Two steps, because the buckets are laid out anew after the first."""
    log = []
    ddp = build(log)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        ddp.zero_grad()
        backward(ddp(torch.randn(5, 3)).square().mean(), ddp)
    return log, [p.grad.clone() for p in ddp.parameters()]


def checked(loss, model):
    with gradrein.detect_nonfinite(model):
        loss.backward()


def unchanged_communication(rank):
    plain_log, plain = steps(rank, lambda loss, model: loss.backward())
    for backward in (gradrein.trace, checked):
        log, grads = steps(rank, backward)
        assert log == plain_log
        assert len(log) > 2  # more than one bucket per step
        assert all(map(torch.equal, grads, plain))


def one_process_goes_wrong(rank):
    ddp = build([])
    x = torch.ones(5, 3)
    with torch.no_grad():
        ddp.module[2].bias.zero_()
        ddp.module[2].weight.zero_()
    loss = ddp(x).abs().sqrt().sum() if rank == 1 else ddp(x).sum()
    with pytest.raises(NonFiniteGradientError) as info, gradrein.detect_nonfinite(ddp.module):
        loss.backward()
    if rank == 1:
        assert (info.value.node, info.value.module) == ("SqrtBackward0", "2")
    else:
        assert "another process" in str(info.value)


def replay_communicates_nothing(rank):
    log = []
    ddp = build(log)
    loss, parameters = ddp(torch.full((5, 3), rank + 1.0)).sum(), list(ddp.parameters())
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, replay(loss, parameters), expected))
    assert log == []
    loss.backward()


def sharded_models_are_checked(rank):
    mesh = init_device_mesh("cpu", (2,))
    for make_nan in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        out = model(torch.ones(5, 4))
        if not make_nan:
            with gradrein.detect_nonfinite(model):
                out.sum().backward()
            continue
        loss = (out * 0).sqrt().sum() if rank == 1 else out.sum()
        with (
            pytest.raises(NonFiniteGradientError, match="in place of backward") as info,
            gradrein.detect_nonfinite(model),
        ):
            loss.backward()
        assert "2.weight" in info.value.offenders
        with pytest.raises(BackwardError):
            replay(model(torch.ones(5, 4)).sum(), list(model.parameters()))


def sharded_models_are_traced(rank):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    trace = gradrein.trace((model(torch.ones(5, 4)) * 0).sqrt().sum(), model)
    first = next(node for node in trace.nodes if node.outgoing is not None and node.outgoing.nonfinite)
    assert first.op == "SqrtBackward0"


def _process(rank, store, scenarios):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for scenario in scenarios:
        scenario(rank)
        dist.barrier()
    dist.destroy_process_group()  # not after a failure: it would abort, and hide what failed
    os._exit(0)  # threads of torch may abort a process that shuts down its interpreter


# One pair of processes for several scenarios: starting them takes longer than anything they do.
SCENARIOS = [
    [unchanged_communication, one_process_goes_wrong, replay_communicates_nothing],
    pytest.param(
        [sharded_models_are_checked, sharded_models_are_traced], marks=pytest.mark.needs("fully_shard on the CPU")
    ),
]


@pytest.mark.parametrize("scenarios", SCENARIOS, ids=["ddp", "fully_shard"])
def test_two_processes(scenarios, tmp_path):
    mp.spawn(_process, (str(tmp_path / "store"), scenarios), nprocs=2)
