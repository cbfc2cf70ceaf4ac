"""Parameters that a backward pass would leave without a gradient."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import graph
from .._torch.checkpoint import is_reentrant
from ..errors import UnsupportedOperationError
from ._arguments import as_outputs, check_is_loss, check_model


def find_unused_parameters(
    loss: Tensor | GradientEdge | Iterable[Tensor | GradientEdge], model: nn.Module
) -> list[str]:
    """Return the names of the parameters that `loss.backward()` would leave without a gradient.

    `DistributedDataParallel` waits for a gradient of every parameter and fails on those that get none. Call
    this function before the first backward. Frozen parameters are not listed.

    Args:
        loss: one or several tensors or edges that backward would be called on.
        model: the model whose parameters to check.

    Returns:
        The names, in the order of `model.named_parameters()`.

    Raises:
        UnsupportedOperationError: parameters are missing and the graph contains a reentrant checkpoint, whose
            inside is not recorded before it runs.

    Examples:
        >>> import torch, gradrein
        >>> model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "idle": torch.nn.Linear(2, 1)})
        >>> gradrein.autograd.find_unused_parameters(model["used"](torch.ones(1, 2)).sum(), model)
        ['idle.weight', 'idle.bias']

    See Also:
        [`gradrein.backward`][], [`gradrein.errors.UnusedInputError`][]
    """
    caller = "autograd.find_unused_parameters"
    outputs = (loss,) if isinstance(loss, nn.Module) else as_outputs(loss)
    for output in outputs:
        if not isinstance(output, GradientEdge):
            check_is_loss(output, caller)
    check_model(model, caller)
    recorded = graph.read(outputs)
    reached = {id(leaf) for leaf in recorded.leaves}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached]
    checkpoint = next((node for node in recorded.nodes if is_reentrant(node)), None)
    if missing and checkpoint is not None:
        raise UnsupportedOperationError(
            f"find_unused_parameters: {len(missing)} parameters, the first of them {missing[0]}, are not in the graph, "
            "but the graph contains a reentrant checkpoint, which hides the parameters it uses. Checkpoint with "
            "use_reentrant=False.",
            op=graph.op(checkpoint),
        )
    return missing
