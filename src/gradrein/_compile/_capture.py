"""From a graph that Dynamo read to one graph of ATen ops: forward pass, pruned backward pass, rules, answers.

The trace runs on tensors without values, so that nothing in the graph can be a number of the step it was made in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
from ._runner import Runner, make_runner


class RunEagerly(Exception):  # noqa: N818
    """The step is to be run eagerly, where there is a reason for good. Nothing was written."""


def capture(
    step: fx.GraphModule, inputs: Sequence[Tensor], model: nn.Module
) -> tuple[fx.GraphModule, Callable[[Callable[..., Any]], Runner]]:
    """Trace a step as one graph, which returns a flag, what the step returns, and what it adds to ``.grad``.

    Returns:
        The graph, and a function that makes a runner of it, or of what it was compiled to.

    Raises:
        RunEagerly: it reads values, or its owners do not follow from structure.
    """
    try:
        return _capture(step, inputs, model)
    except GradreinError as error:
        raise RunEagerly(str(error).split("\n")[0]) from error
    except RuntimeError as error:  # torch's, about a value that was to be read
        raise RunEagerly(_in_words(error)) from error


def _capture(step: fx.GraphModule, inputs: Sequence[Tensor], model: nn.Module) -> tuple[fx.GraphModule, Any]:
    mode = torch_fx.fake_mode()
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    held = {id(x) for x in (*model.parameters(), *model.buffers())}
    history: tuple[bool, ...] = ()
    written: tuple[int, ...] = ()

    def run(*given: Tensor) -> list[Tensor]:
        nonlocal history, written
        before = [_layout(x) for x in given]
        tracer = _Tracer(given, [fake for x, fake in zip(inputs, given, strict=True) if id(x) in held])
        with tracer.active():
            outputs = list(step(*given))
        if [_layout(x) for x in given] != before:
            raise RunEagerly("it changes the shape, the memory or requires_grad of an input")
        number = {id(x): i for i, x in enumerate(given)}
        history = tuple(isinstance(out, Tensor) and out.requires_grad for out in outputs)
        written = tuple(number[id(parameter)] for parameter, _ in tracer.written)
        return [tracer.flag(), *outputs, *(g for _, g in tracer.written)]

    with mode:
        traced = torch_fx.trace(run, fakes)
    if torch_fx.updates_statistics(traced):
        raise RunEagerly("it updates the running statistics of batch normalisation")
    if torch_fx.writes_to_inputs(traced):
        raise RunEagerly("it changes a tensor in place that it was given, or a buffer")
    torch_fx.prune(traced)
    _refuse_fakes(traced)
    return traced, partial(make_runner, traced, history, written, inputs)


class _Tracer:
    """Collects conditions and what is to be written, and answers the queries of a step."""

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        self._recorder = torch_fx.tracer_in_use()
        self._held = held  # what the model holds, without values
        self._conditions = [torch.ones((), dtype=torch.bool, device=given[0].device)]
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
        model = nn.Module()
        model._parameters.update(named)  # type: ignore[arg-type]
        others = [x for x in self._held if all(x is not parameter for parameter in named.values())]
        model._buffers.update((str(i), x) for i, x in enumerate(others))
        ps = per_sample(
            losses,
            model,
            memory_budget=budget,
            retain_graph=retain_graph,
            allow_coupling=allow_coupling,
            allow_opaque=allow_opaque,
        )
        if ps._source is not PROVED:
            how = "" if ps._source is None else f": owners are {ps._source}"
            raise RunEagerly(f"the owner of each row does not follow from the structure of the graph{how}")
        return ps


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
