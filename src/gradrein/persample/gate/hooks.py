"""Hooks that may change gradients on their way through a graph are refused, or every loss is differentiated alone.

torch numbers all hooks that are registered from Python, those of modules and optimizers included. Where there has been
none, no graph has one. Otherwise every node is searched, at every step: hooks come and go while a graph stays of the
same form.
"""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.autograd.graph import GradientEdge

from ... import graph
from ..._torch import fsdp
from ..._torch.hooks import has_hooks, hooks_registered
from ..._torch.signature import Scan
from ...errors import UnsupportedOperationError
from ..tracing import structure


def is_hooked(scan: Scan, parameters: Mapping[str, Tensor], *, sharded: bool, allowed: bool) -> bool:
    """Return whether there are hooks in a graph or on parameters, other than those of `fully_shard`.

    Args:
        scan: the graph.
        parameters: what is asked about.
        sharded: whether `fully_shard` holds the parameters, and sets hooks of its own.
        allowed: whether there may be hooks.

    Raises:
        UnsupportedOperationError: there is a hook, and that was not allowed.
    """
    if not hooks_registered():
        return False
    hooked = next((f"`{name}`" for name, leaf in parameters.items() if leaf._backward_hooks), "")
    with structure():  # also while a step is traced, in which nothing else has values
        if not hooked and _has_hooks(scan, sharded):
            hooked = "a value or an op that the losses depend on"
    if hooked and not allowed:
        raise UnsupportedOperationError(
            f"per_sample: a hook is registered on {hooked}, such as by register_hook or register_full_backward_hook. "
            "It may change gradients or mix samples. Remove it: handle.remove(). Or pass allow_opaque=True: each loss "
            "is then differentiated alone, in one backward pass per sample, each of which runs the hook.",
            "",
            hooked.strip("`") if hooked.startswith("`") else "",
        )
    return bool(hooked)


def _has_hooks(scan: Scan, sharded: bool) -> bool:
    nodes = [node for i, node in enumerate(scan.nodes) if i not in scan.leaves]
    if not sharded:
        with structure():  # what is sent to find hooks is no part of a traced step
            return has_hooks(nodes)
    with fsdp.searched():
        return has_hooks(nodes, fsdp.is_own_hook)


def as_at_the_call(value: GradientEdge) -> Callable[[], None]:
    """Return what refuses to run the graph below a value once a hook was registered there after this call."""
    before = hooks_registered()

    def refuse_new_hooks() -> None:
        if hooks_registered() == before:
            return
        for node in graph.walk([value]):
            if graph.leaf_tensor(node)._backward_hooks if graph.is_leaf(node) else has_hooks([node]):
                raise UnsupportedOperationError(
                    f"per_sample: a hook was registered on a parameter, or on what `{graph.op(node)}` makes of one, "
                    "since the call. Register it before per_sample, or query before you register it.",
                    graph.op(node),
                )

    return refuse_new_hooks
