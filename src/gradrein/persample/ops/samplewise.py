"""Python Functions whose backward treats each row of a batch alone: declared by who knows, or known here by name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.autograd.graph import Node

from ..._torch.nodes import identity
from ..._validate import count
from ...errors import ArgumentTypeError
from ..layout import UNREACHED, Owners

if TYPE_CHECKING:
    from .table import Step


# The dimension whose indices stay apart; which tensors among the arguments have rows, the others being shared (None if
# all have); and how many dimensions those with rows have at least: an input with fewer is shared, an output is that of
# another Function of this name.
Samplewise: TypeAlias = tuple[int, tuple[int, ...] | None, int]

# By the Function itself, or by its qualified name: those of other packages, whose source was read. Run by Triton's
# interpreter: Liger 0.8.2 and 0.8.5, fla 0.5.2 and 0.6.0, mamba 2.3.2 (of SelectiveScanFn, whose kernel is CUDA, the
# wrapper). Others of Liger are not here: the backward of its SwiGLU, RMS norm, rotation and cross entropy overwrites
# what it has saved or is given.
_DECLARED: dict[type | str, Samplewise] = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction": (0, None, 1),
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative": (0, None, 1),
    # (batch, steps, heads, width). What version 1 of flash-attn called so has no batch dimension.
    "flash_attn.flash_attn_interface.FlashAttnFunc": (0, (0, 1, 2), 4),
    "flash_attn.flash_attn_interface.FlashAttnKVPackedFunc": (0, (0, 1), 4),
    "flash_attn.flash_attn_interface.FlashAttnQKVPackedFunc": (0, (0,), 4),
    "xformers.ops.fmha._fMHA": (0, (0, 1, 2), 4),
    "bitsandbytes.autograd._functions.MatMul4Bit": (0, (0,), 2),
    "bitsandbytes.autograd._functions.MatMul8bitLt": (0, (0,), 2),
    "bitsandbytes.autograd._functions.MatMul8bitFp": (0, (0,), 2),
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction": (0, (0,), 2),
    "liger_kernel.ops.group_norm.LigerGroupNormFunction": (0, (0,), 3),
    "liger_kernel.ops.softmax.LigerSoftmaxFunction": (0, (0,), 2),
    "liger_kernel.ops.relu_squared.LigerReLUSquaredFunction": (0, None, 2),
    # Weights have at most two dimensions, all else begins with (batch, ...). With cu_seqlens the batch is one row.
    "mamba_ssm.ops.selective_scan_interface.SelectiveScanFn": (0, None, 3),
    "mamba_ssm.ops.triton.ssd_combined.MambaChunkScanCombinedFn": (0, None, 3),
    "mamba_ssm.ops.triton.ssd_combined.MambaSplitConv1dScanCombinedFn": (0, None, 3),
    "fla.ops.gla.chunk.ChunkGLAFunction": (0, None, 3),
    "fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction": (0, None, 3),
}


def declare_samplewise(
    function: type[torch.autograd.Function], *, dim: int = 0, inputs: Sequence[int] | None = None
) -> None:
    """Declare that the backward of a `torch.autograd.Function` treats each row along a dimension alone.

    The gradient of a row of an input then depends on the gradient at the same row of the outputs, and is linear in it.
    `per_sample` proves through such a Function which sample owns which element. Otherwise it differentiates each loss
    alone. A declaration that is wrong gives wrong gradients; `PerSample.audit` finds that on live data. A backward
    that changes the gradient it is given, or what it has saved, must not be declared. Data that the Function keeps is
    not looked at for rows that several samples use.

    Known already, by their names: the GELU of Bloom and the square root of RecurrentGemma in transformers, the dense
    attention of flash-attn and xformers, the 4-bit and 8-bit products of bitsandbytes, layer norm, group norm and
    softmax of Liger, the scans of mamba, gated linear attention and gated delta rule of fla. SwiGLU, RMS norm, rotation
    and cross entropy of Liger overwrite what they are given: each loss is differentiated alone, which is right, and
    slow.

    Args:
        function: your Function.
        dim: the dimension of inputs and outputs that holds the rows.
        inputs: which of its tensor arguments have rows, by position; the others, such as weights, are shared by all.
            All by default.

    Raises:
        ArgumentTypeError: `function` is not a Function, or `inputs` not a list.
        ArgumentError: `dim` or one of `inputs` is no position.

    Examples:
        >>> import gradrein, torch
        >>> class Doubled(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         return 2 * g
        >>> gradrein.declare_samplewise(Doubled)
        >>> model = torch.nn.Linear(3, 2)
        >>> ps = gradrein.per_sample(Doubled.apply(model(torch.randn(4, 3))).sum(1), model)
        >>> print(ps.plan().splitlines()[0])
        4 samples, told apart: proved from the structure of the graph
        >>> _ = ps.audit()  # on live data, in a test

    See Also:
        [`gradrein.per_sample`][], [`gradrein.register_rule`][]
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise ArgumentTypeError(
            "declare_samplewise: expected a torch.autograd.Function, as in declare_samplewise(Scale, dim=0); found "
            f"{function!r:.40}."
        )
    if inputs is not None and not isinstance(inputs, list | tuple):
        raise ArgumentTypeError(
            f"declare_samplewise: `inputs` is a list of positions such as [0]; found {inputs!r:.40}."
        )
    rows = None if inputs is None else tuple(count(position, "inputs", 0) for position in inputs)
    _DECLARED[function] = count(dim, "dim", 0), rows, 1


def samplewise(node: Node) -> Samplewise | None:
    """Return what was declared of the Function that made a node."""
    made_by = identity(node)
    if isinstance(made_by, str):
        return None
    return _DECLARED.get(made_by) or _DECLARED.get(f"{made_by.__module__}.{made_by.__qualname__}")


def declared() -> tuple[tuple[type | str, Samplewise], ...]:
    """Return all declarations: what is proved rests on them."""
    return tuple(_DECLARED.items())


def by_rows(step: "Step", known: Samplewise) -> Owners:
    """Return the owners of an input: those of the same row of the outputs."""
    dim, inputs, least = known
    owners = Owners.all(UNREACHED, step.shape)
    for out in step.outs:
        if out.is_empty:
            continue
        dims = min(len(out.shape), len(step.shape))
        fits = max(least, dim + 1) <= dims and out.shape[dim] == step.shape[dim]
        if not fits or (inputs is not None and step.position not in inputs):
            return step.mixed()
        line = out.line(dim).ids
        sizes = [-1 if i == dim else 1 for i in range(len(step.shape))]
        owners = owners.merged(Owners(line.view(sizes), step.shape))
    return owners
