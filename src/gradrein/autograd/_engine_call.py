"""The arguments of one engine run; its own file because both the engine and the diagnoses need them."""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

Output: TypeAlias = Tensor | GradientEdge


@dataclass(frozen=True, eq=False)
class EngineCall:
    """One run of the engine.

    Attributes:
        outputs: where it starts.
        inputs: where gradients are wanted; empty means every leaf.
        grads: the gradient of each output.
        retain_graph: keep what the nodes saved.
        create_graph: make the result differentiable.
        accumulate: add to ``.grad`` rather than return.
        allow_unused: return None for an input that no output depends on.
        names: the names of the inputs, if they came with names.
        freed_before: nodes of this thread with a lower sequence number were made before the last run that
            freed its graph; None if there was none.
    """

    outputs: tuple[Output, ...]
    inputs: tuple[Output, ...]
    grads: tuple[Tensor | None, ...] = ()
    retain_graph: bool = False
    create_graph: bool = False
    accumulate: bool = False
    allow_unused: bool = False
    names: tuple[str, ...] | None = None
    freed_before: int | None = None
