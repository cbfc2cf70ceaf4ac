"""An output without a graph: the cause, found by looking."""

import re

import torch
from torch import Tensor

from .. import graph
from ..errors import NoGraphError
from ..graph._live import tensors_of
from ._run import Run
from ._words import Scene, indent

_UNSEEN = (
    "nothing that is still alive tells why: it was computed under no_grad, or from values that were "
    "detached (also by `.item()`, `.numpy()`, `.data`, `torch.tensor(...)`), or from inputs of which none "
    "requires grad"
)


def explain(text: str, run: Run) -> NoGraphError:
    """Say which of the things that leave an output without a graph is the case."""
    match = re.search(r"element (\d+) of tensors", text)
    output = run.outputs[int(match[1]) if match else 0]
    assert isinstance(output, Tensor), "an edge is a graph"
    scene = Scene(())
    causes = tuple(_causes(output, scene)) or (*_suspects(), _UNSEEN)
    return NoGraphError(
        f"{text}\n{scene.describe(output)} has no recorded graph:\n{indent(causes)}\n"
        "Setting requires_grad on it would silence this error and train nothing: no parameter is behind it.",
        causes,
    )


def _causes(output: Tensor, scene: Scene) -> list[str]:
    found = []
    if not (output.is_floating_point() or output.is_complex()):
        found.append(
            f"its dtype is {output.dtype}, and only floating point and complex values have gradients "
            "(comparisons, argmax and casts to integers end a graph)"
        )
    if output.is_inference():
        found.append("it was made under torch.inference_mode(): run the forward pass outside of it")
    if not torch.is_grad_enabled():
        found.append("gradients are switched off here (no_grad, set_grad_enabled(False)), perhaps there as well")
    source = _detached_from(output)
    if source is not None:
        found.append(f"it was detached from {scene.describe(source)}: same memory, no history")
    return found


def _detached_from(output: Tensor) -> Tensor | None:
    memory = graph.memory_of(output)
    if memory is None:
        return None
    return next((t for t in graph.live_tensors() if t.requires_grad and graph.memory_of(t) == memory), None)


def _suspects() -> list[str]:
    """Name the models that are frozen from top to bottom; whether the output came from one is not known."""
    frozen = [
        type(model).__name__
        for model in graph.live_models()
        if (flags := [p.requires_grad for _, p in tensors_of(model, "_parameters")]) and not any(flags)
    ]
    return [f"every parameter of {name} is frozen: if {name} computed it, this is why" for name in frozen]
