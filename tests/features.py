"""Features of torch that tests need, and that not every torch has that is supported."""

import datetime
from functools import cache

import torch
import torch.distributed as dist

from gradrein._kernels import exchange_table
from gradrein._torch import saved
from gradrein._torch.fx import RECORDS_WHAT_RUNS


@cache
def averages_over_gloo():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=9))
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    try:
        group.allreduce([torch.ones(1)], options).wait()
    except RuntimeError:
        return False
    return True


def views_of_empty_dtensors():
    from torch.distributed.tensor._ops._view_ops import view_groups

    try:
        return bool(view_groups((0, 3, 4), (0, 4)))
    except IndexError:
        return False


def masks_in_every_dtype():
    """An older torch uses the mask that it made for an embedding of another dtype."""
    from torch.distributed.tensor import placement_types

    return hasattr(placement_types, "_MaskPartial")


FEATURES = {
    "DLPack exchange table": lambda: exchange_table() is not None,
    "GraphExecGroup": lambda: hasattr(torch.utils.checkpoint, "GraphExecGroup"),
    "SavedTensor.data": lambda: saved.READS_HANDLES,
    "Tensor.grad_dtype": lambda: hasattr(torch.Tensor, "grad_dtype"),
    "Muon": lambda: hasattr(torch.optim, "Muon"),
    "averages over gloo": averages_over_gloo,
    "autograd_would_have_decomposed": lambda: RECORDS_WHAT_RUNS,
    "compiler that traces context managers": lambda: hasattr(torch._dynamo.config, "enable_trace_contextlib"),
    "dicts for torch.autograd.grad": lambda: "dict[" in str(torch.autograd.grad.__annotations__["inputs"]),
    "fully_shard on the CPU": lambda: hasattr(torch.cpu.Stream, "record_event"),
    "masks of embeddings in every dtype": masks_in_every_dtype,
    "ownership_token of edges": lambda: "ownership_token" in torch.autograd.graph.GradientEdge._fields,
    "trace_autograd_ops": lambda: hasattr(torch._dynamo.config, "trace_autograd_ops"),
    "views of empty DTensors": views_of_empty_dtensors,
}
