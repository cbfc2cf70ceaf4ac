"""One graph that Dynamo read, and what was made of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias

from torch import Tensor, fx, nn

from .._torch import fx as torch_fx
from .._torch.storage import storage_of
from .._warn import warn
from ..persample import ops
from ._capture import RunEagerly, capture
from ._runner import Runner

Way: TypeAlias = Literal["eager", "captured", "compiled"]
# How often each way is timed before the fastest is kept.
_ROUNDS = 5
# Inductor takes about a minute on two cores for so many ops; beyond, it has to be asked for by name.
_OPS_AT_MOST = 2000


@dataclass(eq=False)
class Entry:
    """What Dynamo calls in place of a step when its guards hold.

    Attributes:
        step: the graph that Dynamo read.
        model: the model.
        backend: which ways to run it there are: "fastest", "inductor" or "captured".
        reason: why the step stays eager for good, once that is so.
        way: how the next call is to be run.
        seconds: how long calls took, in each way.
        took: how many seconds it took to capture and compile.
        note: why the captured graph was not compiled, if that failed.
        label: the shapes of inputs other than parameters.
        ran: how the last call was run, if it was not left to the eager step.
        was_eager: whether an eager call has returned.
        graph: the step as one graph, once it was captured.
    """

    step: fx.GraphModule
    model: nn.Module
    backend: str
    reason: str = ""
    way: Way = "eager"
    seconds: dict[Way, list[float]] = field(default_factory=dict)
    took: float = 0.0
    note: str = ""
    label: str = ""
    ran: Way | None = None
    was_eager: bool = False
    graph: fx.GraphModule | None = None
    _runners: dict[Way, Runner] = field(default_factory=dict)
    _data: list[int] = field(default_factory=list)
    _leaves: list[int] = field(default_factory=list)
    _sharing: tuple[Any, ...] = ()
    _rules: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, *inputs: Any) -> Any:
        """Run the step in the way that is due, or leave it to the eager one."""
        self.ran = None
        if self.reason or not self.was_eager:  # the first call is eager: it raises what there is to be raised
            raise RunEagerly
        if not self._runners:
            self._prepare(inputs)
        self._refuse(inputs)
        if self.way == "eager":
            raise RunEagerly
        try:
            outputs = self._runners[self.way](inputs)
        except Exception:  # the eager step says in the user's terms what is wrong
            raise RunEagerly from None
        if outputs is None:
            raise RunEagerly
        self.ran = self.way
        return outputs

    def timed(self, way: Way, seconds: float) -> None:
        """Note how long a call took, and decide how the next one is run."""
        if self.backend != "fastest" or not self._runners or (way != "eager" and self.ran is None):
            return
        self.seconds.setdefault(way, []).append(seconds)
        ways: list[Way] = ["eager", *self._runners]
        counts = {one: len(self.seconds.get(one, ())) for one in ways}
        self.way = min(ways, key=lambda one: counts[one])
        if counts[self.way] >= _ROUNDS:
            self.way = min(ways, key=lambda one: median(self.seconds[one]))
            self.backend = "chosen"
            self._runners = {one: runner for one, runner in self._runners.items() if one == self.way}
            self.reason = "the eager step was the fastest" if self.way == "eager" else ""

    def describe(self) -> str:
        """Return in one line what was captured, and how it runs."""
        what = self.label or "a form that was called once"
        if self.reason and not self.took:
            return f"{what}: eager: {self.reason}"
        if not self.took:
            return f"{what}: read, to be captured at the next call"
        timings = self.seconds.items()
        times = ", ".join(f"{way} {1e3 * median(seconds):.2f} ms" for way, seconds in timings if seconds)
        state = f"eager: {self.reason}" if self.reason else f"{self.way}"
        if self.backend == "fastest":
            state = "being timed"
        details = [f"{_count_ops(self.graph)} ops", f"ready after {self.took:.1f} s", times, self.note]
        return f"{what}: {state} ({'; '.join(part for part in details if part)})"

    def _prepare(self, inputs: Sequence[Any]) -> None:
        start = time.perf_counter()
        self._data = [i for i, x in enumerate(inputs) if not isinstance(x, nn.Parameter)]
        self._leaves = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        self.label = ", ".join(str(tuple(inputs[i].shape)) for i in self._data[:4] if isinstance(inputs[i], Tensor))
        try:
            self._capture(inputs)
        except RunEagerly as error:
            self.reason = str(error)
            raise
        except Exception as error:  # an eager step is always right
            self.reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise RunEagerly from None
        self.took = time.perf_counter() - start

    def _capture(self, inputs: Sequence[Any]) -> None:
        if not all(isinstance(x, Tensor) for x in inputs):
            raise RunEagerly("it is given numbers that change from call to call")
        self._refuse(inputs, first=True)
        memory = {storage_of(x) for x in inputs if isinstance(x, nn.Parameter)}
        if any(storage_of(inputs[i]) in memory for i in self._data):
            raise RunEagerly("an input shares its memory with a parameter")
        self._rules = ops.registered()
        self.graph, make_runner = capture(self.step, inputs, self.model)
        self._sharing = self._shared_memory(inputs)
        runners: dict[Way, Runner] = {"captured": make_runner(self.graph)}
        if self.backend != "captured":
            self.note = self._why_uncompiled(self.graph)
        if self.backend != "captured" and not self.note:
            try:
                runners["compiled"] = make_runner(torch_fx.compiled(self.graph, inputs))
            except Exception as error:
                self.note = f"{type(error).__name__}: {error}".split("\n")[0]
                warn(f"gradrein.compile: the captured step runs uncompiled: {self.note}.")
        self.way = "compiled" if "compiled" in runners else "captured"
        self._runners = {self.way: runners[self.way]} if self.backend == "inductor" else runners

    def _why_uncompiled(self, graph: fx.GraphModule) -> str:
        """Return why a captured graph is not to be compiled; empty if it is."""
        if torch_fx.loses_workspace(graph):
            return "uncompiled, since inductor does not hand on what a recurrent layer keeps for the layer below it"
        if self.backend == "fastest" and _count_ops(graph) > _OPS_AT_MOST:
            return f"uncompiled, since more than {_OPS_AT_MOST} ops take minutes; backend='inductor' compiles them"
        return ""

    def _refuse(self, inputs: Sequence[Any], *, first: bool = False) -> None:
        """Leave to the eager step what changes gradients or couples samples, and is no guard of Dynamo's."""
        for i in self._leaves:
            x = inputs[i]
            if x.grad_fn is not None or x._backward_hooks:
                raise RunEagerly
        if not first and (self._shared_memory(inputs) != self._sharing or ops.registered() != self._rules):
            raise RunEagerly

    def _shared_memory(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return how inputs, parameters among them, share memory; nothing if each has its own."""
        places = [storage_of(x) for x in inputs]
        if len(set(places)) == len(places):
            return ()
        offsets = (x.storage_offset() for x in inputs)
        return tuple((places.index(place), offset) for place, offset in zip(places, offsets, strict=True))


def _count_ops(graph: fx.GraphModule | None) -> int:
    return 0 if graph is None else sum(node.op == "call_function" for node in graph.graph.nodes)
