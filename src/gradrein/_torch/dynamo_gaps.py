"""What Dynamo reads and does not guard: methods of classes, the environment, generators of a script's own."""

import operator
import os
import random
from collections.abc import Collection, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

_TORCH = os.path.dirname(torch.__file__)
# Names of what it takes for a constant, or compares in part.
_CONSTANTS = {
    "getenv": "the environment (`os.getenv`)",
    "environ": "the environment (`os.environ`)",
    "_version": "the version counter of a tensor (`_version`)",
}
# How a module is called: known to it, and not read.
_CALLS = ("__call__", "__getattr__", "_call_impl")


class Method(NamedTuple):
    """A method that was read.

    Attributes:
        owner: the class it was looked up in.
        name: its name there.
        found: the function that was found.
        code: its code, which reloading replaces in place.
    """

    owner: type
    name: str
    found: Any
    code: CodeType | None


def why_unguarded() -> str:
    """Return why a change of what was just read could go unnoticed, if it could. To be called by a backend."""
    output = _output()
    if not hasattr(output, "resolve_source_value"):
        return f"torch {torch.__version__} does not tell which objects were read (no `resolve_source_value`)"
    generator: Any = random.random.__self__  # type: ignore[attr-defined]  # the one behind the functions of the module
    if any(getattr(function, "__self__", None) is not generator for function, *_ in output.random_calls):
        return "it draws from a `random.Random` of its own"
    codes = [code for code in output.tracing_context.traced_code if not code.co_filename.startswith(_TORCH)]
    names = {name for code in codes for name in code.co_names}
    return next((f"it reads {what}" for name, what in _CONSTANTS.items() if name in names), "")


def why_otherwise(graph: fx.Graph) -> str:
    """Return why a graph of what is called with gradients recorded does not do what the code it was read from does."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    if any(type(target).__name__.startswith("numpy_") for target in targets):
        return "it computes with NumPy, which would be left to torch, in other types"
    modes = [node.args[0] for node in graph.nodes if node.target is torch._C._set_grad_enabled]
    if modes and not modes[-1]:
        return "it leaves gradients switched off"
    names = (str(getattr(target, "__name__", "")) for target in targets if target is not torch._C._set_grad_enabled)
    changed = next((name for name in names if name.startswith(("set_", "_set_"))), "")
    return f"it changes a setting of torch (`{changed}`)" if changed else ""


def keeps(kind: type) -> bool:
    """Return whether an object of a class, made in what was just read, outlives it. To be called by a backend."""
    made = getattr(_output().side_effects, "id_to_variable", {}).values()
    return any(getattr(variable, "value_type", None) is kind for variable in made)


def methods_read() -> list[Method]:
    """Return the methods that were just read. To be called by a backend."""
    output = _output()
    codes = set(output.tracing_context.traced_code)
    sources = {guard.originating_source for guard in output.guards if guard.name}
    values = [output.resolve_source_value(source) for source in sources]
    owners = {value if isinstance(value, type) else type(value) for value in values}
    of_tensors = [Method(Tensor, name, *_look_up(Tensor, name)) for name in _tensor_methods(output.graph)]
    return [*of_tensors, *(method for owner in owners for method in _methods_of(owner, codes))]


def are_replaced(methods: Iterable[Method]) -> bool:
    """Return whether another method would be found now."""
    return any(_look_up(owner, name) != (found, code) for owner, name, found, code in methods)


def _output() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def _tensor_methods(graph: fx.Graph) -> set[str]:
    """Return the names of the methods of tensors that a graph calls, operators among them."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_method"}
    names = {getattr(node.target, "__name__", "") for node in graph.nodes if node.op == "call_function"}
    return called | {f"__{name}__" for name in names if hasattr(operator, name)}


def _methods_of(owner: type, codes: Collection[CodeType]) -> Iterable[Method]:
    for name in {name for base in owner.__mro__ for name in vars(base)}:
        written = next(vars(base)[name] for base in owner.__mro__ if name in vars(base))
        function = getattr(written, "__func__", getattr(written, "fget", written))
        if getattr(function, "__code__", None) in codes or (name in _CALLS and issubclass(owner, nn.Module)):
            yield Method(owner, name, *_look_up(owner, name))


def _look_up(owner: type, name: str) -> tuple[Any, CodeType | None]:
    found = getattr(owner, name, None)
    found = getattr(found, "__func__", found)  # a method of the class is bound anew each time
    return found, getattr(found, "__code__", None)
