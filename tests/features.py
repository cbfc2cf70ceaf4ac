"""Features of torch that tests need, and that not every torch has that is supported."""

import torch

from bridle._kernels.cpu import exchange_table
from bridle._torch import saved
from bridle._torch.amp import takes_grad_scale
from bridle._torch.fx import RECORDS_WHAT_RUNS

FEATURES = {
    "DLPack exchange table": lambda: exchange_table() is not None,
    "GraphExecGroup": lambda: hasattr(torch.utils.checkpoint, "GraphExecGroup"),
    "SavedTensor.data": lambda: saved.READS_HANDLES,
    "Tensor.grad_dtype": lambda: hasattr(torch.Tensor, "grad_dtype"),
    "autograd_would_have_decomposed": lambda: RECORDS_WHAT_RUNS,
    "compiler that traces context managers": lambda: hasattr(torch._dynamo.config, "enable_trace_contextlib"),
    "dicts for torch.autograd.grad": lambda: "dict[" in str(torch.autograd.grad.__annotations__["inputs"]),
    "fully_shard on the CPU": lambda: hasattr(torch.cpu.Stream, "record_event"),
    "fused Adagrad on the CPU": lambda: takes_grad_scale(torch.optim.Adagrad([torch.zeros(1)], fused=True)),
    "trace_autograd_ops": lambda: hasattr(torch._dynamo.config, "trace_autograd_ops"),
}
