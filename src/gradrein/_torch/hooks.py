"""Hooks on nodes: registered by us, counted, and searched for."""

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .modes import unprofiled

_own_hooks = 0
# While a hook of our own is registered and not yet counted, nobody is to count. A finalizer may come in between.
_counting = threading.RLock()


def node_hooks(register: Callable[..., RemovableHandle]) -> list[Callable[..., Any]]:
    """Return the hooks of a node, by its `register_prehook` or `register_hook`.

    torch cannot list them, but the handle of a new one refers to the dict that holds them all.
    """
    global _own_hooks
    with _counting:
        handle = register(id)
        _own_hooks += 1
    handle.remove()
    hooks: Any = handle.hooks_dict_ref()
    return list(hooks.values())


def register_prehooks(nodes: Iterable[Node], make: Callable[[Node], Callable[..., Any]]) -> list[RemovableHandle]:
    """Register hooks of our own on nodes, which `hooks_registered` does not count."""
    global _own_hooks
    with _counting:
        handles = [node.register_prehook(make(node)) for node in nodes]
        _own_hooks += len(handles)
    return handles


def hooks_registered() -> int:
    """Return how many hooks were registered from Python so far, by others than this package."""
    with _counting:
        return RemovableHandle.next_id - _own_hooks


IsKnown: TypeAlias = Callable[[FrameType], bool]
# torch's text for an output of a custom Function that is no tensor, or has no gradient: there can be no hook.
_NO_OUTPUT = "was_default_constructed"


class _Witness(Tensor):
    """A gradient that no op may be given while it is sent. Later it is zeros."""

    is_sent = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, _Witness) and value.is_sent for value in tree_leaves((args, kwargs))):
            raise RuntimeError
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _Watch:
    """A profiler that stops what a function written in C calls in Python.

    Its state is not in variables of the function that sets it: Python 3.10 puts back those of every function that it
    has told a profiler about.

    Attributes:
        runs: how often the function was called.
    """

    def __init__(self, run: Any, is_known: IsKnown) -> None:
        self._run, self._is_known = run, is_known
        self.runs = 0
        self._is_running = False
        self._known: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if self._known is not None:
            if event == "return" and frame is self._known:
                self._known = None
        elif event == "c_call":
            self._is_running = called == self._run
            self.runs += self._is_running
        elif event == "call":
            if self._is_running:  # else a signal has come, and its handler is to run
                if not self._is_known(frame):
                    raise RuntimeError("a hook is about to run")
                self._known = frame
        elif event != "return":
            self._is_running = False


def has_hooks(nodes: Iterable[Node], is_known: IsKnown = lambda _: False) -> bool:
    """Return whether a hook was registered on one of these nodes, or on an output of its op.

    torch cannot list the hooks of a tensor. A gradient is sent to each output and no further. Python functions that the
    engine calls then are stopped before they begin, so that hooks neither run nor can hide. One that is written in C
    runs, and is known by what it did with the gradient: it handed it to an op, kept it, or returned another.

    Args:
        nodes: the nodes.
        is_known: given the frame of a Python function that begins, returns whether that is a hook which does not count
            and may run.
    """
    nodes = list(nodes)
    if any(node_hooks(node.register_prehook) or node_hooks(node.register_hook) for node in nodes):
        return True
    zeros: dict[tuple[Any, ...], Tensor] = {}
    sent: dict[tuple[Any, ...], _Witness] = {}
    witnesses = []
    for node in nodes:
        for i, out in enumerate(node._input_metadata):
            key = shape, dtype, device = tuple(out.shape), out.dtype, out.device
            if key not in sent:
                if (dtype, device) not in zeros:
                    zeros[dtype, device] = torch.zeros((), dtype=dtype, device=device)
                sent[key] = zeros[dtype, device].expand(shape).as_subclass(_Witness)
            witnesses.append((GradientEdge(node, i), sent[key]))
    return unprofiled(lambda: _is_stopped(witnesses, is_known))


def _is_stopped(witnesses: Sequence[tuple[GradientEdge, _Witness]], is_known: IsKnown) -> bool:
    """Send each gradient to its edge; return whether anything was called there, or something else came back."""
    engine = torch.autograd.Variable._execution_engine
    run = getattr(engine, "engine", engine).run_backward  # nobody who watches backward passes is to see this one
    watch = _Watch(run, is_known)
    collects = gc.isenabled()
    gc.disable()  # finalizers are to run
    try:
        for _, witness in witnesses:
            witness.is_sent = True
        with torch.autograd.set_multithreading_enabled(False):  # hooks are called in this thread, on every device
            sys.setprofile(watch)
            for sending in witnesses:
                edge, witness = sending
                holders = sys.getrefcount(sending[1])  # Python 3.14 does not always count a variable that is passed
                try:
                    sent = run((edge,), (witness,), True, False, (edge,), allow_unreachable=True, accumulate_grad=False)
                except RuntimeError as error:
                    if _NO_OUTPUT in str(error):
                        continue
                    raise
                if sent[0] is not witness:
                    return True
                del sent
                if sys.getrefcount(sending[1]) != holders:
                    return True
        return watch.runs != len(witnesses)  # a Python that does not tell of every run would not tell of hooks either
    except Exception:  # ours, the witness's, or of a hook that is written in C
        return True
    finally:
        sys.setprofile(None)
        for _, witness in witnesses:  # a hook may have kept it
            witness.is_sent = False
        if collects:
            gc.enable()
