"""Clipping over many ranks in one process, with real arithmetic: torch's `LocalTensorMode`."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradrein

local_tensor = pytest.importorskip("torch.distributed._local_tensor", reason="only in newer torch")
pytestmark = pytest.mark.skipif(not hasattr(local_tensor, "local_tensor_mode"), reason="only in newer torch")

EVEN, UNEVEN = [(128, 3), (64,), (192, 2)], [(101, 3), (7,), (64, 2)]  # with 64 ranks some hold nothing
MESHES = {"line": lambda n: (n,), "grid": lambda n: (n // 4, 4)}
LAYOUTS = {
    "sharded": ("line", [Shard(0)], EVEN),
    "uneven": ("line", [Shard(0)], UNEVEN),
    "copies": ("line", [Replicate()], EVEN),
    "hybrid": ("grid", [Replicate(), Shard(0)], UNEVEN),
    "two dimensions": ("grid", [Shard(0), Shard(0)], UNEVEN),
    "partial": ("line", [Partial()], EVEN),
}


@pytest.fixture(params=[8, 64])
def ranks(request):
    dist.init_process_group("fake", rank=0, world_size=request.param)
    with local_tensor.LocalTensorMode(request.param):
        yield request.param
    dist.destroy_process_group()


def whole(tensor):
    """Return the full tensor, which all ranks must see alike."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.reconcile() if isinstance(full, local_tensor.LocalTensor) else full


def parameters(layout, ranks):
    mesh_of, placements, shapes = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", MESHES[mesh_of](ranks))
    torch.manual_seed(0)
    full, ps = [torch.randn(shape) for shape in shapes], []
    for g in full:
        partial = placements[0].is_partial()
        kinds = [Replicate()] if partial else placements
        p = torch.nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, kinds))
        grad = DTensor.from_local(g / ranks, mesh, placements) if partial else distribute_tensor(g, mesh, kinds)
        p.grad = grad.clone()  # or ranks would hold copies in one memory
        ps.append(p)
    return ps, full


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_clip_grad_norm(layout, p, ranks):
    ps, full = parameters(layout, ranks)
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in full]), p)
    norm = gradrein.clip_grad_norm_(ps, 0.5, p)
    torch.testing.assert_close(whole(norm), expected)
    for q, g in zip(ps, full, strict=True):
        torch.testing.assert_close(whole(q.grad), g * (0.5 / expected))


@pytest.mark.parametrize("layout", ["sharded", "uneven", "hybrid"])
@pytest.mark.parametrize("policy", [gradrein.by_norm(0.5, per_parameter=True), gradrein.by_norm(0.5)], ids=str)
def test_clip(layout, policy, ranks):
    ps, full = parameters(layout, ranks)
    twins = [torch.nn.Parameter(torch.zeros_like(g)) for g in full]
    for q, g in zip(twins, full, strict=True):
        q.grad = g.clone()
    gradrein.clip_(ps, policy, nonfinite="propagate")
    gradrein.clip_(twins, policy, nonfinite="propagate")
    for q, twin in zip(ps, twins, strict=True):
        torch.testing.assert_close(whole(q.grad), whole(twin.grad))


def test_a_value_limit(ranks):
    ps, full = parameters("uneven", ranks)
    gradrein.clip_grad_value_(ps, 0.3)
    for q, g in zip(ps, full, strict=True):
        torch.testing.assert_close(whole(q.grad), g.clamp(-0.3, 0.3))
