"""Tests on values: read at once, or while a step is traced collected into one flag that is read at its end.

A traced step has no values. It takes the branch that nearly every step takes, and its tracer collects the conditions
under which that is right. Where one of them does not hold, what was traced must not be used.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Tensor])


class Tracer(Protocol):
    """What traces a step."""

    def assume(self, condition: Tensor) -> None:
        """Collect a condition under which what is traced is right."""

    def add_to_grad(self, parameter: Tensor, gradient: Tensor) -> None:
        """Collect what is to be added to the ``.grad`` of a parameter."""

    def structure(self) -> AbstractContextManager[None]:
        """Return a context that is not traced: for tensors that follow from the structure of a graph alone."""

    def constant(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a traced tensor that depends on no input; None if it does."""

    def answer(self, query: str, *args: Any) -> list[Tensor]:
        """Answer a query of a step that is traced."""


class _State(threading.local):
    tracer: Tracer | None = None


local = _State()
# While Dynamo reads the Python of a step: what makes a stand-in for a `PerSample`. It could not read a thread-local.
stand_ins: list[Callable[..., Any]] = []


def is_traced() -> bool:
    """Return whether values are not there to be read."""
    return local.tracer is not None


def all_hold(condition: Tensor | bool) -> bool:
    """Return whether a condition holds for every element, which it nearly always does."""
    if isinstance(condition, bool):
        return condition
    if local.tracer is None:
        return bool(condition.all())
    local.tracer.assume(condition.all())
    return True


def structure() -> AbstractContextManager[None]:
    """Return a context for tensors that follow from the structure of a graph alone, and may be read."""
    return nullcontext() if local.tracer is None else local.tracer.structure()


def constant(tensor: Tensor) -> Tensor | None:
    """Return a tensor whose values may be read, or None where they differ from step to step and are not there."""
    return tensor if local.tracer is None else local.tracer.constant(tensor)


def as_one_op(function: F, fake_impl: Callable[..., Tensor], arguments: str) -> F:
    """Return a function that a traced step holds as one op, to be run as it is written.

    A loop would be as many kernels to compile, which takes minutes, and those of torch are no slower.

    Args:
        function: computes a new tensor, and reads no values.
        fake_impl: computes an empty, contiguous tensor of the same shape from the same arguments.
        arguments: those of the function, as in the schema of an op.
    """
    return function if local.tracer is None else _op(function, fake_impl, arguments)


@functools.cache
def _op(function: Any, fake_impl: Callable[..., Tensor], arguments: str) -> Any:
    def run(*args: Any) -> Tensor:
        made: Tensor = function(*args)
        return made.contiguous()  # as `fake_impl` says

    schema = f"({arguments}) -> Tensor"
    op = torch.library.custom_op(f"gradrein::{function.__name__}", run, mutates_args=(), schema=schema)
    op.register_fake(fake_impl)
    return op
