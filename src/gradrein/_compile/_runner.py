"""A captured step that can be run: as it is, or compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import fx as torch_fx
from .._torch.storage import storage_of
from ..errors import GraphFreedError
from ..persample.accumulate import accumulate
from ._capture import Captured


class UnusualValuesError(Exception):
    """Values are beyond what a captured step is right for. Nothing was written."""


class Runner:
    """Runs a captured step and then writes what it has to write."""

    def __init__(self, captured: Captured, function: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> None:
        self._captured, self._function = captured, function
        self._grad_mode = torch_fx.needs_grad_mode(captured.graph)
        self._borrowed = self._find_borrowed(inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Return what the step returns.

        Raises:
            UnusualValuesError: it has to be run eagerly.
            Exception: whatever an op raises. Nothing was written, and no random number drawn.
        """
        captured = self._captured
        state = RandomState(inputs) if captured.is_random else None
        try:
            found = self._pure(inputs)
            if not bool(found[0]):
                raise UnusualValuesError
        except Exception:
            if state is not None:
                state.restore()
            raise
        own = [x.clone() if i in self._borrowed else x for i, x in enumerate(found)]
        outputs, values, gradients = captured.split(own)
        with torch.no_grad():
            for i, value in zip(captured.changed, values, strict=True):
                inputs[i].copy_(value)
            for i, gradient in zip(captured.written, gradients, strict=True):
                accumulate(inputs[i], gradient)
        found = [_without_graph(x) if had else x for x, had in zip(outputs, captured.with_history, strict=True)]
        for i, number in captured.same.items():
            found[i] = inputs[number]
        return found

    def _pure(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        if self._grad_mode:
            inputs = [x.detach() for x in inputs]
        with torch_fx.as_recorded(grad_mode=self._grad_mode):
            return self._function(*inputs)

    def _find_borrowed(self, inputs: Sequence[Tensor]) -> frozenset[int]:
        """Return the outputs that lie in memory that is not theirs alone: the graph's, an input's, another output's.

        What is written must be. What the step returns may be a view of an input, as in the eager step.
        """
        state = RandomState(inputs)
        first, second = self._pure(inputs), self._pure(inputs)
        state.restore()
        kept, given = ({storage_of(x) for x in some} for some in (first, inputs))
        places = [storage_of(x) for x in second]
        returned = 1 + len(self._captured.with_history)
        return frozenset(
            i
            for i, place in enumerate(places)
            if (place in kept and (i >= returned or place not in given)) or (i >= returned and places.count(place) > 1)
        )


class RandomState:
    """The state of torch's generators, on the CPU and on the devices of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        devices = {x.device for x in tensors if x.device.type != "cpu"}
        self._cpu = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self._cpu)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


def _without_graph(x: Tensor) -> Tensor:
    with torch.enable_grad():
        found: Tensor = CompiledStepOutput.apply(torch.zeros((), requires_grad=True), x)  # type: ignore[no-untyped-call]
    return found


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
