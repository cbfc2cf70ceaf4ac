"""A captured step that can be run: as it is, or compiled."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from .._torch import fx as torch_fx
from .._torch.storage import storage_of
from ..errors import GraphFreedError
from ..persample.queries.sums import accumulate

# Returns what the step returns, or None where its values are beyond what a captured step is right for. Then, and where
# an op raises, nothing was written and no random number drawn.
Runner: TypeAlias = Callable[[Sequence[Tensor]], list[Any] | None]


def make_runner(
    graph: fx.GraphModule,
    with_history: Sequence[bool],
    written: Sequence[int],
    inputs: Sequence[Tensor],
    function: Callable[..., Sequence[Any]],
) -> Runner:
    """Return what runs a captured step, and then writes what there is to write.

    Args:
        graph: the step as one graph.
        with_history: for each output of the step, whether it has a graph in the eager step.
        written: inputs to whose ``.grad`` it adds, once for each time.
        inputs: inputs to try it with.
        function: runs the graph: itself, or what it was compiled to.
    """
    is_random = any(torch_fx.is_random(node) for node in graph.graph.nodes)
    grad_mode = torch_fx.needs_grad_mode(graph)
    end = 1 + len(with_history)

    def compute(inputs: Sequence[Tensor]) -> Sequence[Any]:
        with torch_fx.as_recorded(grad_mode=grad_mode):
            return function(*(x.detach() for x in inputs) if grad_mode else inputs)

    borrowed = _find_borrowed(compute, inputs, end)

    def run(inputs: Sequence[Tensor]) -> list[Any] | None:
        restore = _random_state(inputs) if is_random else None
        is_usual = False
        try:
            outputs = compute(inputs)
            is_usual = bool(outputs[0])
        finally:
            if not is_usual and restore is not None:
                restore()
        if not is_usual:
            return None
        outputs = [x.clone() if i in borrowed else x for i, x in enumerate(outputs)]
        with torch.no_grad():
            for i, gradient in zip(written, outputs[end:], strict=True):
                accumulate([inputs[i]], [gradient])
        return [_without_graph(x) if had else x for x, had in zip(outputs[1:end], with_history, strict=True)]

    return run


def _find_borrowed(
    compute: Callable[[Sequence[Tensor]], Sequence[Any]], inputs: Sequence[Tensor], returned: int
) -> frozenset[int]:
    """Return the outputs that lie in memory that is not theirs alone: the graph's, an input's, another output's.

    What is written must be. What the step returns, `returned` outputs, may be a view of an input, as in the eager step.
    """
    restore = _random_state(inputs)
    first, second = compute(inputs), compute(inputs)
    restore()
    kept, given = ({storage_of(x) for x in some} for some in (first, inputs))
    places = [storage_of(x) for x in second]
    return frozenset(
        i
        for i, place in enumerate(places)
        if (place in kept and (i >= returned or place not in given)) or (i >= returned and places.count(place) > 1)
    )


def _random_state(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return what sets torch's generators back, on the CPU and on the devices of some tensors."""
    devices = {x.device for x in tensors if x.device.type != "cpu"}
    cpu = torch.get_rng_state()
    others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(cpu)
        for device, state in others:
            torch.get_device_module(device).set_rng_state(state, device)

    return restore


def _without_graph(x: Tensor) -> Tensor:
    with torch.enable_grad():
        output: Tensor = CompiledStepOutput.apply(torch.zeros((), requires_grad=True), x)  # type: ignore[no-untyped-call]
    return output


class CompiledStepOutput(torch.autograd.Function):
    """Stands where the eager step has a graph, so that a backward pass into it is an error and not a zero."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # noqa: ARG004
        raise GraphFreedError(
            "gradrein.compile: a backward pass reached a tensor that a compiled step returned. Outputs of a compiled "
            "step have no graph. Detach it in the step, or run the step without gradrein.compile.",
            (),
        )
