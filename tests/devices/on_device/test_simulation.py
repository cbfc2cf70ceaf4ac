"""The device itself: what it counts, and that it can fail."""

import pytest
import torch
from calls import MODELS, losses_of, made
from plugin import assert_same
from simulated import DEVICE, KIND
from torch import nn


def test_reads_and_launches_are_counted(counted, device):
    with counted() as counts:
        x = torch.ones(3, device=device)
        (x + x).sum().item()
        x.view(3, 1)
    assert counts.launches == {"fill_": 1, "add": 1, "sum": 1, "_local_scalar_dense": 1}
    assert dict(counts.reads) == {("_local_scalar_dense", "outside of gradrein"): 1}


def test_reads_can_be_forbidden(no_host_reads, device):
    x = torch.ones(3, device=device)
    with no_host_reads(), pytest.raises(AssertionError, match="the host reads from the device: _local_scalar_dense"):
        bool(x.sum() > 2)


def test_copies_to_and_from_the_host_are_reads(counted, device):
    with counted() as counts:
        torch.tensor([1.0, 2.0], device=device).tolist()
    assert [what for what, _ in counts.reads] == ["copy from the host", "copy to the host"]


def test_tensors_of_the_host_are_refused(device):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device) + torch.ones(3)
    assert (torch.ones(3, device=device) + torch.tensor(1.0)).tolist() == [2.0] * 3  # as on every device


@pytest.mark.parametrize("count", [1, 110, 111, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multi_tensor_ops_launch_as_cuda_does(counted, count, dtype, device):
    tensors = [torch.ones(4, 4, dtype=dtype, device=device) for _ in range(count)]
    kernels = -(-count // 110)
    with counted() as counts:
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_norm(tensors, 2)
        torch._foreach_norm(tensors, 3)
        torch._foreach_mul_(tensors, [torch.ones((), device=device) for _ in tensors])
    assert counts.launches["_foreach_mul_"] == kernels + count
    assert counts.launches["_foreach_norm"] == kernels + 1 + count


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_host(name):
    build, batch = MODELS[name]

    def run():
        model = build()
        losses_of(model, *batch()).sum().backward()
        return [p.grad for p in model.parameters()]

    assert_same(run, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(KIND != "cuda", reason="nodes of CUDA alone")
def test_graphs_hold_the_nodes_of_cuda(attention):
    def ops(out):
        nodes, todo = {}, [out.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in nodes:
                nodes[node] = node.name().removesuffix("Backward0")
                todo += [below for below, _ in node.next_functions]
        return {*nodes.values()}

    expected = {"flash": "Flash", "efficient": "Efficient", "cudnn": "Cudnn"}
    model, x, _ = made("GPT with RMS norm")
    found = ops(model(x))
    assert "FusedRmsNorm" in found
    assert attention == "plain" or f"ScaledDotProduct{expected[attention]}Attention" in found
    assert "CudnnRnn" in ops(made("LSTM")[0](torch.randn(2, 3, 6, device=DEVICE)))
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()).to(DEVICE)
    assert {"CudnnBatchNorm", "NativeDropout"} <= ops(norm(torch.randn(8, 4, 3, device=DEVICE)))
