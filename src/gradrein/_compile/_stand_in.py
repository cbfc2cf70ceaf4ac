"""What stands in for a `PerSample` while Dynamo reads a step: each question becomes one node of its graph."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import graph
from .._torch import dynamo
from .._torch.storage import is_fake
from ..errors import GraphFreedError
from ..persample import Stats
from ..persample.representations.numerics import real_dtype

# The answer to a question: set while a graph with such questions is being traced.
Answer = Callable[..., list[Tensor]]


class _Asked(threading.local):
    """Who answers questions in this thread, if anybody does."""

    answer: Answer | None = None


asked = _Asked()


def ask(
    question: str,
    settings: tuple[tuple[str, Any], ...],
    names: tuple[str, ...],
    options: tuple[Any, ...],
    losses: Tensor,
    parameters: list[Tensor],
    others: list[Tensor],
) -> list[Tensor]:
    """Ask about per-sample gradients.

    Args:
        question: the method of `PerSample`; "begin" where it is made.
        settings: its arguments that are no tensors.
        names: the names of the parameters.
        options: what `per_sample` was told.
        losses: what is differentiated.
        parameters: what is asked about.
        others: the arguments of the method that are tensors.

    Returns:
        The answer as a list of tensors; those without values while the step is only read.

    Raises:
        GraphFreedError: it is asked after the step.
    """
    if asked.answer is not None:
        return asked.answer(question, settings, names, options, losses, parameters, others)
    if not is_fake(losses):
        raise GraphFreedError(
            f"gradrein.compile: `{question}` was asked of per-sample gradients that a compiled step has kept, and "
            "their graph was not. Ask in the step, or run it without gradrein.compile."
        )
    return _shapes(question, losses, parameters)


def _shapes(question: str, losses: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return tensors of the shapes and dtypes that the answer has, given that the losses depend on every parameter."""
    samples = losses.shape[0]
    dtype = max((real_dtype(p.dtype) for p in parameters), key=lambda dtype: torch.finfo(dtype).bits)
    if question in ("each", "grads"):
        used = {id(graph.leaf_tensor(node)) for node in graph.walk([losses]) if graph.is_leaf(node)}
        if any(id(parameter) not in used for parameter in parameters):
            raise NotImplementedError(
                "the losses do not depend on some parameter, which a result by name would leave out"
            )
    if question == "each":
        return [losses.new_empty(samples, dtype=real_dtype(p.dtype)) for p in parameters]
    if question == "grads":
        return [losses.new_empty(samples, *p.shape, dtype=p.dtype) for p in parameters]
    if question == "gram":
        return [losses.new_empty(samples, samples, dtype=dtype)]
    if question == "stats":
        return [losses.new_empty((), dtype=torch.float64) for _ in range(7)]
    if question in ("begin", "weighted_"):
        return [losses.new_empty(())]
    return [losses.new_empty(samples, dtype=dtype)]


class StandIn:
    """Asks what a `PerSample` would be asked. Dynamo reads through it; nothing here is ever run."""

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
        self._ask("begin")  # the answers are about the losses as they are now

    def __len__(self) -> int:
        return self._losses.shape[0]

    def norms(self, *, per_parameter: bool = False, gathered: bool = False) -> Tensor | dict[str, Tensor]:
        if gathered:
            dynamo.stop("norms of all ranks were asked for")
        if per_parameter:
            return dict(zip(self._names, self._ask("each"), strict=True))
        return self._ask("norms")[0]

    def grads(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._ask("grads"), strict=True))

    def weighted_(self, weights: Any) -> None:
        found = weights if isinstance(weights, Tensor) else weights(self.norms())
        self._ask("weighted_", (), [found])

    def clip_(self, max_norm: Any, **settings: Any) -> Tensor:
        if settings.get("generator") is not None:
            dynamo.stop("clip_ was given a generator")
        if isinstance(max_norm, Tensor):
            if settings.get("noise_multiplier"):
                dynamo.stop("clip_ was given a threshold that is a tensor, and noise, whose size follows from it")
            return self._ask("clip_", tuple(settings.items()), [max_norm])[0]
        return self._ask("clip_", (("max_norm", max_norm), *settings.items()))[0]

    def dot(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._along("dot", direction)

    def cosine(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._along("cosine", direction)

    def gram(self) -> Tensor:
        return self._ask("gram")[0]

    def stats(self, *, gathered: bool = False) -> Stats:
        if gathered:
            dynamo.stop("statistics of all ranks were asked for")
        # Tensors where there will be numbers, once the step is over.
        return Stats(*self._ask("stats"))  # type: ignore[arg-type]

    def stream(self, *_: Any, **__: Any) -> NoReturn:
        dynamo.stop("stream hands out gradients one by one")
        raise NotImplementedError

    def audit(self, *_: Any, **__: Any) -> NoReturn:
        dynamo.stop("an audit reads values")
        raise NotImplementedError

    def plan(self) -> NoReturn:
        dynamo.stop("plan returns text")
        raise NotImplementedError

    def _along(self, question: str, direction: Mapping[str, Tensor] | None) -> Tensor:
        if direction is None:
            return self._ask(question)[0]
        settings = (("direction", tuple(direction.keys())),)
        return self._ask(question, settings, list(direction.values()))[0]

    def _ask(
        self, question: str, settings: tuple[tuple[str, Any], ...] = (), others: Iterable[Tensor] = ()
    ) -> list[Tensor]:
        return ask(question, settings, self._names, self._options, self._losses, self._parameters, list(others))


def _pairs(parameters: Any) -> list[tuple[str, Tensor]]:
    """Return names and tensors as `per_sample` does; what it refuses is left to it."""
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    if isinstance(parameters, Tensor):
        return [("0", parameters)]
    if isinstance(parameters, Mapping):
        pairs = list(parameters.items())
    else:
        pairs = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(parameters)]
    for i, (_, tensor) in enumerate(pairs):
        if not isinstance(tensor, Tensor) or any(tensor is other for _, other in pairs[:i]):
            dynamo.stop("a parameter is no tensor, or is passed twice")
    return [(str(name), tensor) for name, tensor in pairs]
