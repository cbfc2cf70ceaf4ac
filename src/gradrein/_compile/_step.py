"""The way in: a step, read once for every form it takes."""

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from .._torch import dynamo
from .._torch import fx as torch_fx
from .._torch.pytree import flatten
from .._torch.saved import has_pack_hooks
from ..errors import ArgumentError, ArgumentTypeError
from ..persample import tracing
from ._capture import RunEagerly
from ._entry import Entry
from ._stand_in import StandIn, run_query

P = ParamSpec("P")
R = TypeVar("R")
_WRITES = ("clip_", "weighted_")
# Tracing is a state of the whole process: another thread that called a compiled step meanwhile would be traced too.
_ONE_AT_A_TIME = threading.RLock()
# Forms of a call that were found to stay eager; beyond so many nothing is read any more.
_FORMS_AT_MOST = 16


def compile(  # noqa: A001
    step: Callable[P, R],
    model: nn.Module,
    *,
    backend: Literal["fastest", "inductor", "captured"] = "fastest",
) -> "CompiledStep[P, R]":
    """Compile a step that computes per-sample gradients: forward pass, backward pass and results become one graph.

    The compiled step returns the same numbers and changes ``.grad`` and buffers like the eager step. It is captured
    again when a guard of Dynamo fails: another shape, dtype, mode, or Python value that it reads. Like
    `torch.compile`, it is as sound as these guards. What cannot be captured stays eager; `CompiledStep.explain` says
    what and why.

    Args:
        step: a function that computes losses, calls `per_sample` and makes any query except `stats`, `stream`,
            `audit` and `plan`. It returns any nested structure of tensors. Leave ``zero_grad`` and the optimizer's
            step outside.
        model: the model.
        backend: "inductor" compiles the captured graph; "captured" runs it op by op, bitwise equal to the eager step;
            "fastest" times both and the eager step on the first calls, and keeps the fastest.

    Returns:
        The compiled step. Call it like `step`.

    Raises:
        ArgumentTypeError: `step` is not a function or `model` is not a module.
        ArgumentError: unknown backend.

    Examples:
        >>> import torch, gradrein
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> def step(x):
        ...     return gradrein.per_sample(model(x).square(), model).clip_(1.0)
        >>> step = gradrein.compile(step, model)
        >>> norms = step(torch.randn(4, 2))

    See Also:
        [`gradrein.per_sample`][], [`gradrein.kernel_status`][]
    """
    if not callable(step):
        raise ArgumentTypeError(f"compile: `step` must be a function, found {type(step).__name__}.")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"compile: `model` must be a module, found {type(model).__name__}.")
    if backend not in ("fastest", "inductor", "captured"):
        raise ArgumentError(f"compile: backend must be 'fastest', 'inductor' or 'captured', found {backend!r}.")
    return CompiledStep(step, model, backend)


class CompiledStep(Generic[P, R]):
    """A step that runs as one graph where that is sound, and eagerly everywhere else. Made by `compile`."""

    def __init__(self, step: Callable[P, R], model: nn.Module, backend: str) -> None:
        self._step, self._model, self._backend = step, model, backend
        self._name = getattr(step, "__name__", type(step).__name__)
        self._entries: list[Entry] = []
        self._eager_forms: dict[Any, str] = {}
        self._last = threading.local()
        self._holds_compiled = any(dynamo.is_compiled(module) for module in model.modules())
        self._read, self._cached = dynamo.read(_as_read(step), self._make_entry)
        self._failures: tuple[type[Exception], ...] = (RunEagerly, *dynamo.failures())
        dynamo.as_one_node(run_query)
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step."""
        form = self._form(args, kwargs) if self._eager_forms else None
        if form in self._eager_forms or len(self._eager_forms) >= _FORMS_AT_MOST or self._stays_eager:
            return self._eager(*args, **kwargs)
        self._last.entry, start = None, time.perf_counter()
        drawn = random.getstate()  # Dynamo draws before it calls the graph
        result: R
        try:
            with _ONE_AT_A_TIME:
                result = self._call(*args, **kwargs)
        except self._failures as error:
            random.setstate(drawn)
            return self._instead(error, args, kwargs)
        entry = self._last.entry
        if entry is not None and entry.ran is not None:
            entry.timed(entry.ran, time.perf_counter() - start)
        return result

    def _call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a graph that fits this call, and read the step where there is none."""
        result: R
        try:
            result = self._cached(*args, **kwargs)
        except RunEagerly:
            if self._last.entry is not None:
                raise
            with dynamo.reading():
                result = self._read(*args, **kwargs)
        return result

    def explain(self) -> str:
        """Return what was captured for which form of the step, how it runs, and what stays eager and why."""
        lines = [f"`{self._name}`, backend {self._backend!r}"]
        lines += [f"  {entry.describe()}" for entry in self._entries]
        known = {entry.reason for entry in self._entries}
        lines += [f"  eager: {why}" for why in dict.fromkeys(self._eager_forms.values()) if why not in known]
        if self._stays_eager:
            lines.append(f"  eager: {self._stays_eager}")
        if len(lines) == 1:
            lines.append("  not called yet")
        return "\n".join(lines)

    @property
    def _stays_eager(self) -> str:
        """Why every call is eager, if it is."""
        if not torch_fx.RECORDS_WHAT_RUNS:
            return f"torch {torch.__version__} records other ops than it runs (no `autograd_would_have_decomposed`)"
        if dist.is_available() and dist.is_initialized():
            return "a process group is initialised, and steps over ranks are not captured"
        return "hooks are to pack what it saves" if has_pack_hooks() else ""

    def _eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._holds_compiled:
            return self._step(*args, **kwargs)
        with dynamo.uncompiled():  # per_sample cannot look into compiled regions
            return self._step(*args, **kwargs)

    def _instead(self, error: Exception, args: Any, kwargs: Any) -> R:
        """Run the step eagerly, and remember why if that is for good."""
        start = time.perf_counter()
        result = self._eager(*args, **kwargs)
        entry = self._last.entry
        if entry is not None:
            entry.was_eager = True
            if entry.way == "eager":
                entry.timed("eager", time.perf_counter() - start)
            reason = entry.reason
        else:
            reason = "" if isinstance(error, RunEagerly) else dynamo.reason(error)  # reading may be off for now
        if reason:
            self._eager_forms[self._form(args, kwargs)] = reason
        return result

    def _form(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Return what can cheaply be told about a call: to stay eager is right for all that look alike."""
        leaves = flatten((args, kwargs))[0]
        tensors = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in leaves]
        return (self._model.training, torch.is_grad_enabled(), *tensors)

    def _make_entry(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Make what Dynamo is to call in place of a step that it has read."""
        queries = {node.args[0] for node in graph.graph.nodes if node.target is run_query} - {"begin"}
        entry = Entry(graph, self._model, self._backend, _why_not(graph, queries))
        self._entries.append(entry)

        def call(*inputs: Any) -> Any:
            self._last.entry = entry
            return entry(*inputs)

        return call


def _why_not(graph: fx.GraphModule, queries: set[Any]) -> str:
    """Return why a step that was read cannot be captured, as far as that can be told at once."""
    if not queries:
        return "it does not ask per_sample for anything"
    if queries.intersection(_WRITES) and dynamo.touches_grad():
        return "it looks at `.grad`, or sets it; leave zero_grad and the optimizer outside of the step"
    if any("checkpoint" in str(node.target) for node in graph.graph.nodes):
        return "it holds a checkpoint, which would save no memory in one graph"
    return ""


def _as_read(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for Dynamo to read. It has code of its own, with which Dynamo keeps the graphs."""
    is_read, missing, stand_ins, stand_in = torch.compiler.is_dynamo_compiling, RunEagerly, tracing.stand_ins, StandIn

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_read():
            raise missing
        stand_ins.append(stand_in)
        result = step(*args, **kwargs)
        stand_ins.pop()
        return result

    # Dynamo looks the globals of all other functions up in the module of that name, which code run by `exec` has not.
    scope = getattr(step, "__globals__", run.__globals__)
    return FunctionType(run.__code__.replace(), scope, "run", None, run.__closure__)
