"""Nodes of the recorded graph: kind, number, edges and outputs."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..errors import ArgumentError
from .storage import is_fake, storage_of

_TORCH, _OURS = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))

# Ops that only move, copy or cast values: a parameter seen through them is still that parameter. Numbers above zero
# are in-place variants.
_RELAYOUT = re.compile(
    "(Alias|AsStrided|Chunk|Clone|Diagonal|Expand|Permute|ReshapeAlias|ReshapeCopy|Select|Slice|Split|SplitWithSizes"
    r"|Squeeze|T|ToCopy|Transpose|Unbind|Unfold|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward\d(_copy)?"
)

# Where a graph may be entered, and what a node sends gradients to: (node, which of its outputs), by input.
Output: TypeAlias = Tensor | GradientEdge
Edges: TypeAlias = tuple[tuple[Node | None, int], ...]


def walk(starts: Iterable[Output | Node], is_end: Callable[[Node], bool] | None = None) -> dict[Node, Edges]:
    """Return every node of the recorded graph below some outputs or nodes, and where each sends gradients.

    Args:
        starts: tensors, edges or nodes. A tensor that requires no gradient has no graph and is left out.
        is_end: the nodes below which the walk does not go; they are part of the result.

    Returns:
        For each node its ``next_functions``. The order depends on the structure alone: the starts, then what they
        use, and so on.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> [gradrein.graph.op(node) for node in gradrein.graph.walk([w * 3, w + 1])]
        ['MulBackward0', 'AddBackward0', 'AccumulateGrad']

    See Also:
        [`gradrein.graph.read`][]
    """
    edges_of: dict[Node, Edges] = dict.fromkeys(_entered(starts), ())
    queue = list(edges_of)
    for node in queue:  # it grows on the way
        edges = edges_of[node] = node.next_functions
        if is_end is not None and is_end(node):
            continue
        for used, _ in edges:
            if used is not None and used not in edges_of:
                edges_of[used] = ()
                queue.append(used)
    return edges_of


def _entered(starts: Iterable[Output | Node]) -> Iterator[Node]:
    for start in starts:
        if not isinstance(start, Output):
            yield start
        elif isinstance(start, GradientEdge):
            yield start.node
        elif start.requires_grad:
            yield start.grad_fn or edge_of(start).node


def op(node: Node) -> str:
    """Return torch's name for the node, without the namespace that some names have.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.op((w * 3).grad_fn)
        'MulBackward0'

    See Also:
        [`gradrein.graph.describe`][], [`gradrein.graph.read`][]
    """
    if is_custom(node):  # the same name, which torch 2.6 does not tell any more once the op's outputs are gone
        return type(node).__name__
    return node.name().rsplit("::", 1)[-1]


def is_leaf(node: Node) -> bool:
    """Return whether the node accumulates into a leaf's ``.grad``.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> [gradrein.graph.is_leaf(node) for node in gradrein.graph.read(w * 3).nodes]
        [False, True]

    See Also:
        [`gradrein.graph.leaf_tensor`][]
    """
    return type(node).__name__ == "AccumulateGrad"


def leaf_tensor(node: Node) -> Tensor:
    """Return the leaf that an ``AccumulateGrad`` node writes to.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.leaf_tensor(gradrein.graph.read(w * 3).nodes[-1]) is w
        True

    See Also:
        [`gradrein.graph.is_leaf`][]
    """
    variable: Tensor = node.variable  # type: ignore[attr-defined]
    return variable


def is_custom(node: Node) -> bool:
    """Return whether the node was created by a Python `torch.autograd.Function`.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.is_custom((w * 3).grad_fn)
        False

    See Also:
        [`gradrein.graph.op`][]
    """
    return isinstance(node, torch._C._FunctionBase)


def identity(node: Node) -> str | type:
    """Return what no other op shares: torch's name for its own and for those of `torch.library`, else the Function."""
    if not is_custom(node):
        return op(node)
    made_by: type = node._forward_cls  # type: ignore[attr-defined]
    return op(node) if made_by.__module__ == "torch._library.autograd" else made_by


def is_torchs_own(node: Node) -> bool:
    """Return whether torch wrote the backward of a Function; that of an op of `torch.library` is somebody else's."""
    module: str = node._forward_cls.__module__  # type: ignore[attr-defined]
    return module.startswith("torch.") and module != "torch._library.autograd"


def is_relayout(node: Node) -> bool:
    """Return whether the op only moves, copies or casts values, as a view, slice, clone or cast does.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.is_relayout(w.view(2, 1).grad_fn), gradrein.graph.is_relayout((w * 3).grad_fn)
        (True, False)

    See Also:
        [`gradrein.graph.parameter_uses`][]
    """
    return _RELAYOUT.fullmatch(op(node)) is not None


def sequence_nr(node: Node) -> int:
    """Return the node's sequence number in the thread that created it; leaves have the largest 64-bit number.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> first, second = w * 3, w * 4
        >>> gradrein.graph.sequence_nr(first.grad_fn) < gradrein.graph.sequence_nr(second.grad_fn)
        True

    See Also:
        [`gradrein.graph.current_sequence_nr`][]
    """
    return node._sequence_nr()


# An alias, not a function: the compiler cannot trace a frame here.
current_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the number that this thread's next node will get.

See Also:
    [`gradrein.graph.sequence_nr`][]
"""


def forward_source(node: Node) -> str | None:
    """Return where the forward pass made a node: "train.py, line 8: y = x.log()"; None outside anomaly mode.

    `torch.autograd.set_detect_anomaly` keeps the stack of each node. The innermost frame that is not torch's is meant.
    """
    metadata: Any = node.metadata  # a dict, whatever its annotation says
    for frame in reversed(list(metadata.get("traceback_") or ())):
        match = re.match(r'\s*File "(.*)", line (\d+), in .*\n?\s*(.*)', frame)
        if match and not match[1].startswith((_TORCH, _OURS)):
            return f"{os.path.basename(match[1])}, line {match[2]}" + (f": {match[3]}" if match[3] else "")
    return None


def output_metadata(node: Node) -> list[Any]:
    """Return torch's metadata of the op's outputs, one entry per output: as many gradients does the node take."""
    return node._input_metadata


def output_shapes(nodes: Iterable[Node]) -> dict[Node, list[tuple[int, ...]]]:
    """Return the shapes of the outputs of each op; that of a leaf is its own."""
    return {
        node: [tuple(leaf_tensor(node).shape)] if is_leaf(node) else [tuple(out.shape) for out in node._input_metadata]
        for node in nodes
    }


def edge_shape(edge: GradientEdge) -> tuple[int, ...]:
    """Return the shape of the value whose gradient arrives at this edge."""
    return output_shapes([edge.node])[edge.node][edge.output_nr]


def edge_of(output: Output) -> GradientEdge:
    """Return the edge at which the gradient of a tensor arrives; an edge is returned unchanged.

    Unlike torch's own function this also takes sparse and nested leaves, which cannot be viewed.

    Raises:
        ArgumentError: (a ValueError) The tensor requires no gradient.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.edge_of(w * 3).node.name()
        'MulBackward0'

    See Also:
        [`gradrein.graph.read`][]
    """
    return output if isinstance(output, GradientEdge) else _edge_of_tensor(output)


def _edge_of_tensor(tensor: Tensor) -> GradientEdge:
    node = tensor.grad_fn
    if node is not None and not is_custom(node):
        return GradientEdge(node, tensor.output_nr)
    if not tensor.requires_grad:
        raise ArgumentError("a tensor that requires no gradient has no edge in the recorded graph.")
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        viewable = tensor.layout in (torch.strided, torch.jagged) and not is_cpp_nested(tensor)
        alias = (tensor.view_as(tensor) if viewable else tensor.clone()).grad_fn
    assert alias is not None
    if node is None:
        accumulate = alias.next_functions[0][0]
        assert accumulate is not None
        return GradientEdge(accumulate, 0)
    if "ownership_token" not in GradientEdge._fields:
        return GradientEdge(node, tensor.output_nr)
    # A Python node does not keep its own graph alive; the alias made above does.
    return GradientEdge(node, tensor.output_nr, ownership_token=alias)


def is_cpp_nested(tensor: Tensor) -> bool:
    """Return whether this is a nested tensor of the older, strided layout, which has no shape."""
    return tensor.is_nested and tensor.layout == torch.strided


def nested_sizes(tensor: Tensor) -> list[list[int]]:
    """Return the shape of each component of a strided nested tensor."""
    sizes: list[list[int]] = tensor._nested_tensor_size().tolist()
    return sizes


def is_cpp_nested_edge(edge: GradientEdge) -> bool:
    """Return whether the gradient that arrives at this edge is a strided nested tensor."""
    return bool(edge.node._input_metadata[edge.output_nr].is_cpp_nested_tensor)


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor this one is a view of, or itself.

    Examples:
        >>> x = torch.zeros(4)
        >>> gradrein.graph.base_of(x[:2]) is x
        True

    See Also:
        [`gradrein.graph.memory_of`][]
    """
    base = tensor._base
    return tensor if base is None else base


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place."""
    return tensor._version


def memory_of(tensor: Tensor) -> int | None:
    """Return the address of the tensor's storage, or None if it has no storage of its own.

    Two tensors with the same result share memory: one is a view of the other, or was detached from it.

    Examples:
        >>> x = torch.zeros(4)
        >>> gradrein.graph.memory_of(x[2:]) == gradrein.graph.memory_of(x)
        True

    See Also:
        [`gradrein.graph.base_of`][]
    """
    if is_fake(tensor):
        return storage_of(tensor) if tensor.layout is torch.strided else None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # a wrapper around other tensors, or around nothing
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if tensor.layout != torch.strided or tensor.is_nested:
                return None
            return tensor.untyped_storage().data_ptr() or None
        except (
            Exception
        ):  # called on any live tensor: wrappers without storage, half-built or half-destroyed subclasses
            return None


def donates_buffers(node: Node) -> bool:
    """Return whether a compiled function's backward overwrites what it saved, so that it can run only once."""
    return op(node) == "CompiledFunctionBackward" and bool(node._forward_cls.metadata.bw_donated_idxs)  # type: ignore[attr-defined]


def is_ddp_sink(node: Node) -> bool:
    """Return whether DistributedDataParallel inserted the node, to synchronise after the pass."""
    return op(node) == "_DDPSinkBackward"


def is_distributed(node: Node) -> bool:
    """Return whether a node of a Python Function belongs to torch's distributed training."""
    defined_in: str = node._forward_cls.__module__  # type: ignore[attr-defined]
    return defined_in.startswith("torch.distributed")
