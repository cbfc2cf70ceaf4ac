"""From a graph that Dynamo read to one graph of ATen ops: forward pass, pruned backward pass, rules, answers.

The trace runs on tensors without values, so that nothing in the graph can be a number of the step it was made in.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import graph
from .._torch import fx as torch_fx
from .._torch.nodes import identity
from .._torch.storage import is_fake, storage_of
from ..errors import GradreinError
from ..persample import PerSample, ops, per_sample, tracing
from ..persample.cuts import PROVED


class RunEagerly(Exception):  # noqa: N818
    """The step is to be run eagerly, where there is a reason for good. Nothing was written."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A step as one graph.

    The graph returns one flag that says whether the rest may be used, what the step returns, and what it adds to
    ``.grad``.

    Attributes:
        graph: the graph.
        with_history: for each output of the step, whether it has a graph in the eager step.
        written: inputs to whose ``.grad`` it adds, once for each time.
        is_random: whether it draws random numbers.
        needs_grad_mode: whether one of its ops has to run with gradients recorded.
    """

    graph: fx.GraphModule
    with_history: tuple[bool, ...]
    written: tuple[int, ...]
    is_random: bool
    needs_grad_mode: bool


def capture(step: fx.GraphModule, inputs: Sequence[Tensor], model: nn.Module) -> Captured:
    """Trace a step.

    Raises:
        RunEagerly: it reads values, or its owners do not follow from structure.
    """
    try:
        return _capture(step, inputs, model)
    except GradreinError as error:
        raise RunEagerly(str(error).split("\n")[0]) from error
    except RuntimeError as error:  # torch's, about a value that was to be read
        raise RunEagerly(_in_words(error)) from error


def _capture(step: fx.GraphModule, inputs: Sequence[Tensor], model: nn.Module) -> Captured:
    _refuse_writes(step, inputs)
    mode = torch_fx.fake_mode()
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    seen: dict[str, Any] = {}

    def run(*given: Tensor) -> list[Tensor]:
        tracer = _Tracer(given, _Held(model, inputs, given))
        with tracer.active():
            outputs = list(step(*given))
        number = {id(x): i for i, x in enumerate(given)}
        seen["history"] = tuple(isinstance(out, Tensor) and out.requires_grad for out in outputs)
        seen["written"] = tuple(number[id(parameter)] for parameter, _ in tracer.written)
        return [tracer.flag(), *outputs, *(g for _, g in tracer.written)]

    with mode:
        traced = torch_fx.trace(run, fakes)
    _refuse_fakes(traced)
    is_random = any(torch_fx.is_random(node) for node in traced.graph.nodes)
    grad_mode = torch_fx.needs_grad_mode(traced)
    return Captured(traced, seen["history"], seen["written"], is_random, grad_mode)


class _Tracer:
    """Collects conditions and what is to be written, and answers the queries of a step."""

    def __init__(self, given: Sequence[Tensor], held: "_Held") -> None:
        self._recorder = torch_fx.tracer_in_use()
        self._held, self._conditions = held, [torch.ones((), dtype=torch.bool, device=given[0].device)]
        self.written: list[tuple[Tensor, Tensor]] = []
        self._made: dict[tuple[Any, ...], tuple[Tensor, int, PerSample]] = {}

    def assume(self, condition: Tensor) -> None:
        self._conditions.append(condition)

    def add_to_grad(self, parameter: Tensor, gradient: Tensor) -> None:
        self.written.append((parameter, gradient))

    def structure(self) -> AbstractContextManager[None]:
        return torch_fx.without_tracing()

    def constant(self, tensor: Tensor) -> Tensor | None:
        return torch_fx.computed(tensor, self._recorder) if is_fake(tensor) else tensor

    def flag(self) -> Tensor:
        """Return whether everything held that was assumed."""
        device = self._conditions[0].device
        return torch.stack([one.to(device) for one in self._conditions]).all()

    @contextmanager
    def active(self) -> Iterator[None]:
        tracing.local.tracer = self
        try:
            yield
        finally:
            tracing.local.tracer = None

    def answer(
        self,
        query: str,
        settings: tuple[tuple[str, Any], ...],
        names: tuple[str, ...],
        options: tuple[Any, ...],
        losses: Tensor,
        parameters: list[Tensor],
        others: list[Tensor],
    ) -> list[Tensor]:
        # Made once for the same losses; they are kept, so that their id is.
        key = (id(losses), names, options, tuple(map(id, parameters)))
        if key not in self._made:
            made = self._per_sample(losses, dict(zip(names, parameters, strict=True)), options)
            self._made[key] = losses, losses._version, made
        _, version, ps = self._made[key]
        if losses._version != version:
            raise RunEagerly("the losses are changed in place after per_sample was called")
        given = dict(settings)
        if query == "begin":
            return [losses.new_zeros(())]
        if query == "each":
            return list(ps.norms(per_parameter=True).values())
        if query == "grads":
            return list(ps.grads().values())
        if query == "weighted_":
            ps.weighted_(others[0])
            return [losses.new_zeros(())]
        if query == "clip_" and others:
            given["max_norm"] = others[0]
        if "direction" in given:
            given["direction"] = dict(zip(given["direction"], others, strict=True))
        result: Tensor = getattr(ps, query)(**given)
        return [result]

    def _per_sample(self, losses: Tensor, named: dict[str, Tensor], options: tuple[Any, ...]) -> PerSample:
        budget, retain_graph, allow_coupling, allow_opaque = options
        own = ops.registered()
        foreign = [graph.op(node) for node in graph.walk([losses]) if identity(node) in own]
        if foreign:
            raise RunEagerly(f"`{foreign[0]}` has a registered rule, which may read anything")
        ps = per_sample(
            losses,
            self._held.with_parameters(named),
            memory_budget=budget,
            retain_graph=retain_graph,
            allow_coupling=allow_coupling,
            allow_opaque=allow_opaque,
        )
        if ps._source is not PROVED:
            how = "" if ps._source is None else f": owners are {ps._source}"
            raise RunEagerly(f"the owner of each row does not follow from the structure of the graph{how}")
        return ps


class _Held(nn.Module):
    """The model as the trace knows it: its parameters and buffers without values."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        super().__init__()
        fake = {id(real): one for real, one in zip(inputs, given, strict=True)}
        self._others = [[fake[id(x)] for x in some if id(x) in fake] for some in (model.parameters(), model.buffers())]
        self._named: dict[str, Tensor] = {}

    def with_parameters(self, named: dict[str, Tensor]) -> "_Held":
        """Return the model, with these as its parameters by name."""
        self._named = named
        return self

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(self._named.items())

    def parameters(self, recurse: bool = True) -> Iterator[Any]:  # noqa: ARG002
        return iter(self._others[0])

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:  # noqa: ARG002
        return iter(self._others[1])


def _refuse_writes(step: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """Refuse a step that changes its inputs, buffers among them, found by running it without values."""
    with torch_fx.fake_mode() as mode, torch_fx.Writes() as writes:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        before = [_layout(x) for x in fakes]
        step(*fakes)
    if [_layout(x) for x in fakes] != before:
        raise RunEagerly("it changes the shape, the memory or requires_grad of an input")
    if writes.updates_statistics:
        raise RunEagerly("it updates the running statistics of batch normalisation")
    if any(storage_of(x) in writes.storages for x in fakes):
        raise RunEagerly("it changes a tensor in place that it was given, or a buffer")


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.requires_grad, storage_of(x)


def _refuse_fakes(traced: fx.GraphModule) -> None:
    """Refuse a graph that holds a tensor without values: something was computed where nothing may be."""
    held = [getattr(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"]
    if any(isinstance(value, Tensor) and is_fake(value) for value in held):
        raise RunEagerly("a value of the step was needed to find owners")


def _in_words(error: Exception) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split())
    if "DataDependent" in kind or "DynamicOutputShape" in kind or "GuardOnDataDependent" in kind:
        return f"it reads values of tensors, or makes shapes of them ({text[:120]})"
    return f"{kind}: {text[:200]}"
