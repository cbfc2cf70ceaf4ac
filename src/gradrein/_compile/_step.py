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

from .._torch import dynamo, dynamo_gaps, trees
from .._torch import fx as torch_fx
from .._torch.modes import has_function_modes
from .._torch.saved import has_pack_hooks
from ..errors import ArgumentError, ArgumentTypeError
from ..persample import Stats, tracing
from ._entry import Entry, Redo
from ._stand_in import StandIn, ask

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
    again for other shapes, dtypes, modes, or Python values that it reads. What cannot be captured soundly stays
    eager; `CompiledStep.explain` says what and why.

    Args:
        step: a function that computes losses, calls `per_sample` and makes any query except `stream`, `audit` and
            `plan`. It returns any nested structure of tensors. Leave ``zero_grad`` and the optimizer's step outside.
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
        self._draws = self._has_stats = False
        self._grad_mode = True
        self._holds_compiled = any(dynamo.is_compiled(module) for module in model.modules())
        function = _as_read(step)
        functions = (step, *(type(module).forward for module in model.modules()))
        self._is_unreadable = any(dynamo.loses_globals(one, function.__globals__) for one in functions)
        self._read, self._cached = dynamo.read(function, self._make_entry)
        self._failures: tuple[type[Exception], ...] = (Redo, _NotRead, *dynamo.failures())
        dynamo.as_one_node(ask)
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step."""
        form = self._form(args, kwargs) if self._eager_forms else None
        if form in self._eager_forms or len(self._eager_forms) >= _FORMS_AT_MOST or self._stays_eager:
            return self._eager(*args, **kwargs)
        self._last.entry, start = None, time.perf_counter()
        drawn = random.getstate() if self._draws else None
        found: R
        try:
            with _ONE_AT_A_TIME:
                try:
                    found = self._cached(*args, **kwargs)
                except _NotRead:
                    drawn, self._grad_mode = random.getstate(), torch.is_grad_enabled()
                    with dynamo.reading():
                        found = self._read(*args, **kwargs)
        except self._failures as error:
            if drawn is not None:
                random.setstate(drawn)
            return self._instead(error, args, kwargs)
        entry = self._last.entry
        if entry is not None and entry.ran is not None:
            entry.timed(entry.ran, time.perf_counter() - start)
        return _on_host(found) if self._has_stats else found

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

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled: a function keeps the model that it was written with."""
        raise ArgumentTypeError(
            f"compile: the compiled step `{self._name}` cannot be copied or pickled. Copy the model, write a step of "
            "the copy, and compile that."
        )

    @property
    def _stays_eager(self) -> str:
        """Why every call is eager, if it is."""
        if not torch_fx.RECORDS_WHAT_RUNS:
            return f"torch {torch.__version__} records other ops than it runs (no `autograd_would_have_decomposed`)"
        if dist.is_available() and dist.is_initialized():
            return "a process group is initialised, and steps over ranks are not captured"
        if self._is_unreadable:
            return "the globals of the step or of a module are not those of the module of that name"
        if has_pack_hooks():
            return "hooks are to pack what it saves"
        if has_function_modes():
            return "a `TorchFunctionMode` is active"
        return ""

    def _eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._holds_compiled:
            return self._step(*args, **kwargs)
        with dynamo.uncompiled():  # per_sample cannot look into compiled regions
            return self._step(*args, **kwargs)

    def _instead(self, error: Exception, args: Any, kwargs: Any) -> R:
        """Run the step eagerly, and remember why if that is for good."""
        start = time.perf_counter()
        found = self._eager(*args, **kwargs)
        if isinstance(error, Redo):
            entry = error.entry
            entry.was_eager = True
            if entry.way == "eager":
                entry.timed("eager", time.perf_counter() - start)
            reason = entry.reason
        else:
            reason = "" if isinstance(error, _NotRead) else dynamo.reason(error)  # reading may be switched off for now
        if reason:
            self._eager_forms[self._form(args, kwargs)] = reason
        return found

    def _form(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Return what can cheaply be told about a call: to stay eager is right for all that look alike."""
        leaves = trees.flatten((args, kwargs))[0]
        tensors = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in leaves]
        return (self._model.training, torch.is_grad_enabled(), *tensors)

    def _make_entry(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Make what Dynamo is to call in place of a step that it has read."""
        asked = {node.args[0] for node in graph.graph.nodes if node.target is ask} - {"begin"}
        why_not = _why_not(graph, asked, self._grad_mode)
        entry = Entry(graph, self._model, self._name, self._backend, why_not)
        self._has_stats |= "stats" in asked
        self._draws |= "RandomValueSource" in dynamo.sources(graph)
        self._entries.append(entry)

        def call(*inputs: Any) -> Any:
            self._last.entry = entry
            return entry(*inputs)

        return call


def _why_not(graph: fx.GraphModule, asked: set[Any], grad_mode: bool) -> str:
    """Return why a step that was read cannot be captured, as far as that can be told at once."""
    if not asked:
        return "it does not ask per_sample for anything"
    if asked.intersection(_WRITES) and dynamo.touches_grad():
        return "it looks at `.grad`, or sets it; leave zero_grad and the optimizer outside of the step"
    if any("checkpoint" in str(node.target) for node in graph.graph.nodes):
        return "it holds a checkpoint, which would save no memory in one graph"
    if not grad_mode:  # a graph is traced with gradients recorded wherever the step does not switch them off
        return "it is called where gradients are not recorded (`torch.no_grad`), and records them inside"
    if dynamo_gaps.keeps(StandIn):
        return "it keeps what per_sample returned, to be asked after the step"
    return dynamo_gaps.why_unguarded() or dynamo_gaps.why_otherwise(graph.graph)


class _NotRead(Exception):  # noqa: N818
    """No graph of the step fits this call."""


def _as_read(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for Dynamo to read, with graphs of its own."""
    is_read, missing, flags, stand_in = torch.compiler.is_dynamo_compiling, _NotRead, tracing.flags, StandIn

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_read():
            raise missing
        flags.stand_in = stand_in
        found = step(*args, **kwargs)
        flags.stand_in = None
        return found

    # Graphs are kept with the code, which all steps would share. The globals of the step are sure to be found where
    # they are those of the function that is read.
    scope = getattr(step, "__globals__", run.__globals__)
    return FunctionType(run.__code__.replace(), scope, "run", None, run.__closure__)


def _on_host(found: R) -> R:
    """Return statistics as numbers."""
    leaves, rebuild = trees.flatten(found)
    numbers: R = rebuild([_numbers(leaf) if isinstance(leaf, Stats) else leaf for leaf in leaves])
    return numbers


def _numbers(stats: Stats) -> Stats:
    values: list[Any] = list(vars(stats).values())
    return Stats(*torch.stack(values).tolist()) if isinstance(values[0], Tensor) else stats
