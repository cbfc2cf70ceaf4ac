"""Parameters that a backward pass would leave without a gradient."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import graph
from ..errors import OpaqueGraphError


def unreached(loss: Tensor | GradientEdge | Iterable[Tensor | GradientEdge], model: nn.Module) -> list[str]:
    """Return the names of the parameters that `loss.backward()` would leave without a gradient.

    Distributed data parallel waits for a gradient of every parameter and fails on those that get none: ask
    before the first backward. Frozen parameters are not listed.

    Args:
        loss: what backward would be called on; several if it is called on several.
        model: the model whose parameters are meant.

    Returns:
        The names, in the order of `model.named_parameters()`.

    Raises:
        OpaqueGraphError: if parameters are missing and the graph holds a reentrant checkpoint, inside of
            which nobody can look before it runs.

    Example:
        >>> import torch, bridle
        >>> model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "idle": torch.nn.Linear(2, 1)})
        >>> bridle.unreached(model["used"](torch.ones(1, 2)).sum(), model)
        ['idle.weight', 'idle.bias']
    """
    read = graph.read(loss)
    reached = {id(leaf) for leaf in read.leaves}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached]
    if missing and any(graph.op(node) == "CheckpointFunctionBackward" for node in read.nodes):
        raise OpaqueGraphError(
            f"unreached: {len(missing)} parameters, the first of them {missing[0]}, are not in the graph, "
            "but it holds a reentrant checkpoint, which hides what it uses. Checkpoint with "
            "use_reentrant=False."
        )
    return missing
