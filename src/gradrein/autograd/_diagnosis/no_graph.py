"""An output without a graph: what is known about the cause."""

import re

import torch
from torch import Tensor

from ... import graph
from ...errors import NoGraphError
from .._engine_call import EngineCall
from .context import ErrorContext, bullet_list

_UNKNOWN = (
    "no live object shows why: it was computed under no_grad, or from values that were "
    "detached (also by `.item()`, `.numpy()`, `.data`, `torch.tensor(...)`), or from inputs of which none "
    "requires grad"
)


def diagnose(text: str, call: EngineCall) -> NoGraphError:
    """List the known causes that leave an output without a graph."""
    match = re.search(r"element (\d+) of tensors", text)
    output = call.outputs[int(match[1]) if match else 0]
    assert isinstance(output, Tensor), "an edge is a graph"
    context = ErrorContext(())
    causes = tuple(_causes(output, context)) or (*_frozen_models(), _UNKNOWN)
    return NoGraphError(
        f"{text}\n{context.tensor_label(output)} has no recorded graph:\n{bullet_list(causes)}\n"
        "Setting requires_grad on it would hide this error and train nothing: no parameter is connected to it.",
        causes,
    )


def _causes(output: Tensor, context: ErrorContext) -> list[str]:
    causes = []
    if not (output.is_floating_point() or output.is_complex()):
        causes.append(
            f"its dtype is {output.dtype}, and only floating point and complex values have gradients "
            "(comparisons, argmax and casts to integers end a graph)"
        )
    if output.is_inference():
        causes.append("it was made under torch.inference_mode(): run the forward pass outside of it")
    if not torch.is_grad_enabled():
        causes.append("gradients are disabled here (no_grad, set_grad_enabled(False)), perhaps there as well")
    source = _detached_from(output)
    if source is not None:
        causes.append(f"it was detached from {context.tensor_label(source)}: same memory, no history")
    return causes


def _detached_from(output: Tensor) -> Tensor | None:
    memory = graph.memory_of(output)
    if memory is None:
        return None
    return next((t for t in graph.live_tensors() if t.requires_grad and graph.memory_of(t) == memory), None)


def _frozen_models() -> list[str]:
    """List the models without a trainable parameter; whether the output came from one is not known."""
    frozen = [
        type(model).__name__
        for model in graph.live_models()
        if (flags := [p.requires_grad for p in model.parameters()]) and not any(flags)
    ]
    return [f"every parameter of {name} is frozen: if {name} computed it, this is why" for name in frozen]
