"""The arguments of one engine run; its own file because both the engine and the diagnoses need them."""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

Output: TypeAlias = Tensor | GradientEdge


@dataclass(frozen=True, eq=False)
class Inputs:
    """Where gradients are wanted.

    Attributes:
        values: tensors or edges; empty means every leaf.
        names: their names, if they came with names; the result is then a dict.
    """

    values: tuple[Output, ...] = ()
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class EngineCall:
    """One run of the engine.

    Attributes:
        outputs: where it starts.
        inputs: where it ends.
        grads: the gradient of each output.
        retain_graph: keep what the nodes saved.
        create_graph: make the result differentiable.
        accumulate: add to ``.grad`` rather than return.
        allow_unused: return None for an input that no output depends on.
        freed_before: nodes of this thread with a lower sequence number were made before the last run that
            freed its graph; None if there was none.
    """

    outputs: tuple[Output, ...]
    inputs: Inputs
    grads: tuple[Tensor | None, ...] = ()
    retain_graph: bool = False
    create_graph: bool = False
    accumulate: bool = False
    allow_unused: bool = False
    freed_before: int | None = None
