"""What stands in for a `PerSample` while Dynamo reads a step: each query becomes one node of its graph."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import graph
from .._torch import dynamo
from .._torch.storage import is_fake
from ..errors import GraphFreedError
from ..persample import tracing
from ..persample.representations.numerics import real_dtype


def run_query(
    query: str,
    settings: tuple[tuple[str, Any], ...],
    names: tuple[str, ...],
    options: tuple[Any, ...],
    losses: Tensor,
    parameters: list[Tensor],
    others: list[Tensor],
) -> list[Tensor]:
    """Query per-sample gradients.

    Args:
        query: the method of `PerSample`; "begin" where it is made.
        settings: its arguments that are no tensors.
        names: the names of the parameters.
        options: what `per_sample` was told.
        losses: what is differentiated.
        parameters: those whose gradients are wanted.
        others: the arguments of the method that are tensors.

    Returns:
        The answer as a list of tensors; those without values while the step is only read.

    Raises:
        GraphFreedError: it is called after the step.
    """
    if tracing.local.tracer is not None:
        return tracing.local.tracer.answer(query, settings, names, options, losses, parameters, others)
    if not is_fake(losses):
        raise GraphFreedError(
            f"gradrein.compile: `{query}` was called on per-sample gradients that a compiled step has kept, and "
            "their graph was not. Call it in the step, or run it without gradrein.compile."
        )
    return _shapes(query, losses, parameters)


def _shapes(query: str, losses: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return tensors of the shapes and dtypes that the answer has, given that the losses depend on every parameter."""
    samples = losses.shape[0]
    dtype = max((real_dtype(p.dtype) for p in parameters), key=lambda dtype: torch.finfo(dtype).bits)
    if query in ("each", "grads"):
        used = {id(graph.leaf_tensor(node)) for node in graph.walk([losses]) if graph.is_leaf(node)}
        if any(id(parameter) not in used for parameter in parameters):
            raise NotImplementedError(
                "the losses do not depend on some parameter, which a result by name would leave out"
            )
    if query == "each":
        return [losses.new_empty(samples, dtype=real_dtype(p.dtype)) for p in parameters]
    if query == "grads":
        return [losses.new_empty(samples, *p.shape, dtype=p.dtype) for p in parameters]
    if query == "gram":
        return [losses.new_empty(samples, samples, dtype=dtype)]
    if query in ("begin", "weighted_"):
        return [losses.new_empty(())]
    return [losses.new_empty(samples, dtype=dtype)]


class StandIn:
    """Takes the queries of a `PerSample`. Dynamo reads through it; nothing here is ever run."""

    def __init__(self, losses: Tensor, parameters: Any, refused: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        for name, value in zip(("sample_groups", "process_group", "scaler"), refused, strict=True):
            if value is not None:
                dynamo.stop(f"per_sample was given `{name}`")
        if losses.dim() == 0 or not losses.requires_grad or losses.shape[0] < 2:
            dynamo.stop("per_sample was not given at least two losses with a graph")
        named: dict[str, Tensor] = {}
        for name, tensor in _pairs(parameters):
            if tensor.requires_grad:
                named[name] = tensor
        if not named:
            dynamo.stop("there is no parameter that needs a gradient")
        self._losses, self._options = losses, options
        self._names, self._parameters = tuple(named.keys()), list(named.values())
        self._query("begin")  # the answers are about the losses as they are now

    def __len__(self) -> int:
        return self._losses.shape[0]

    def norms(self, *, per_parameter: bool = False, gathered: bool = False) -> Tensor | dict[str, Tensor]:
        if gathered:
            dynamo.stop("norms of all ranks were asked for")
        if per_parameter:
            return dict(zip(self._names, self._query("each"), strict=True))
        return self._query("norms")[0]

    def grads(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._query("grads"), strict=True))

    def weighted_(self, weights: Any) -> None:
        given = weights if isinstance(weights, Tensor) else weights(self.norms())
        self._query("weighted_", (), [given])

    def clip_(self, max_norm: Any, **settings: Any) -> Tensor:
        if isinstance(max_norm, Tensor):
            return self._query("clip_", tuple(settings.items()), [max_norm])[0]
        return self._query("clip_", (("max_norm", max_norm), *settings.items()))[0]

    def dot(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._along("dot", direction)

    def cosine(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._along("cosine", direction)

    def gram(self) -> Tensor:
        return self._query("gram")[0]

    def __getattr__(self, name: str) -> NoReturn:
        dynamo.stop(f"`{name}` hands out text, numbers of Python, one gradient at a time, or what it was made of")
        raise NotImplementedError

    def _along(self, query: str, direction: Mapping[str, Tensor] | None) -> Tensor:
        if direction is None:
            return self._query(query)[0]
        settings = (("direction", tuple(direction.keys())),)
        return self._query(query, settings, list(direction.values()))[0]

    def _query(
        self, query: str, settings: tuple[tuple[str, Any], ...] = (), others: Iterable[Tensor] = ()
    ) -> list[Tensor]:
        return run_query(query, settings, self._names, self._options, self._losses, self._parameters, list(others))


def _pairs(parameters: Any) -> list[tuple[str, Tensor]]:
    """Return names and tensors as `per_sample` does; what else it takes, and what it refuses, is left to it."""
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    if isinstance(parameters, Tensor):
        return [("0", parameters)]
    if not isinstance(parameters, Mapping):
        dynamo.stop("per_sample was given its parameters without names; pass a model, a mapping or one tensor")
    return [(str(name), tensor) for name, tensor in parameters.items()]
