"""Dynamo: reads the Python of a function into a graph, with guards on everything that the function read.

It is slow to import, so that this is left to the first call.
"""

import functools
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.fx import GraphModule
from torch.fx.node import has_side_effect

_P = ParamSpec("_P")
_T = TypeVar("_T")
Backend: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that `torch.compile` does not look into: what it calls runs as it is, as in an eager step."""
    eager: Callable[_P, _T] = _disable_dynamo(function)  # imports Dynamo when it is called

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling():
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def as_one_node(function: Callable[..., Any]) -> None:
    """Let Dynamo record calls of a function as they are, and keep them all."""
    torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    has_side_effect(function)


def read(function: Callable[..., Any], backend: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a function that reads this one where no graph of it fits, and one that then calls it as it is."""
    import torch._dynamo

    whole = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return whole, torch._dynamo.run(function)


@contextmanager
def reading() -> Generator[None, None, None]:
    """While open, recurrent layers are read too, and hooks on modules that come or go mean another graph.

    What draws numbers from NumPy is not read: they would come from the generator of torch.
    """
    from torch._dynamo import config

    patches = {"allow_rnn": True, "skip_nnmodule_hook_guards": False, "use_numpy_random_stream": True}
    with config.patch(patches), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what it cannot read: that comes as an error as well
        yield


def failures() -> tuple[type[Exception], ...]:
    """Return the errors with which it gives up."""
    from torch._dynamo import exc

    # Older torch has no error of its own for too many forms.
    # An assertion of its own fails where a parameter has changed its dtype and kept its gradient.
    return exc.TorchDynamoException, getattr(exc, "FailOnRecompileLimitHit", exc.TorchDynamoException), AssertionError


def stop(why: str) -> None:
    """Give up, when called from what is being read."""
    torch._dynamo.graph_break(msg=why)


def reason(error: Exception) -> str:
    """Return in one line why it gave up."""
    text = str(error)
    said = re.search(r"(?s)Explanation: (.*?)\n\s*(Hint|Developer)", text)
    ours = re.search(r"message `(.*?)`", text)
    if "graph_break" in text and ours is not None:
        return ours[1]
    first = text.strip().split("\n")[0] if text.strip() else type(error).__name__
    more = f" ({' '.join(said[1].split())})" if said is not None else ""
    where = re.findall(r'File "([^"]*)", line (\d+), in', text)
    place = f", at {where[-1][0].rsplit('/', 1)[-1]}:{where[-1][1]}" if where else ""
    return f"{first}{more}{place}"


def touches_grad() -> bool:
    """Return whether what was just read looks at the ``.grad`` of a tensor, or sets it. To be called by a backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    if any(re.search(r"\._?grad\b", guard.name) for guard in output.guards):
        return True
    return any("grad" in names for names in output.side_effects.store_attr_mutations.values())


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled by torch.compile, as a whole or in place."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def uncompiled() -> Any:
    """Return a context in which compiled functions run as they were written."""
    return torch.compiler.set_stance("force_eager")
