"""An error that one rank alone has in `per_sample` stops the others too, rather than have them wait for it.

The ranks of a tensor-parallel mesh send each other a message anyway, in which they agree on what they have recorded. A
rank that fails before takes part with its error. Where samples lie on the other dimension of the mesh, one more message
tells those ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import graph
from .._distributed.agreement import Agreement
from .._torch.dtensor import is_dtensor
from . import _tensor_agreement
from ._arguments import read_parameters
from ._parameters import ParameterForms, parameter_forms
from ._ranks import SampleRanks, ranks_of
from ._tensor_ranks import TensorRanks, ranks_of_mesh

_WHAT = "per-sample gradients"


class Others:
    """The ranks that wait for this one.

    Attributes:
        tensor: those with the same samples; None while they are not known.
        samples: those with other samples; None while they are not known.
        are_told: whether the first have been told, or are about to be.
    """

    tensor: TensorRanks | None = None
    samples: SampleRanks | None = None
    are_told = False

    def tell(self, error: Exception | None) -> None:
        """Tell those with other samples of an error of this rank, or hear that none of them has one."""
        if self.tensor is not None and self.tensor.groups and self.samples is not None and self.samples.groups:
            agreement = Agreement(_WHAT, "per_sample")
            agreement.tell(self.samples.messages(), error)
            if error is None:
                agreement.finish()


@contextmanager
def stop_together(losses: object, parameters: Any, group: Any) -> Iterator[Others]:
    """Tell an error that is raised while this is active to all ranks that wait for this one.

    Args:
        losses: the argument of `per_sample`, which may be anything.
        parameters: likewise.
        group: likewise, its `process_group`.

    Yields:
        The ranks, to be filled in as they become known.
    """
    others = Others()
    try:
        yield others
    except Exception as error:
        if dist.is_available() and dist.is_initialized():
            with suppress(Exception):  # the error that is told about is the one to raise
                _tell(others, losses, parameters, group, error)
        raise
    others.tell(None)


def _tell(others: Others, losses: object, parameters: Any, group: Any, error: Exception) -> None:
    if not others.are_told:
        where = _readable(parameters)
        leaves = {} if where is None else where.leaves
        others.tensor = others.tensor or _tensor_ranks(leaves, losses)
        with suppress(Exception):
            others.samples = others.samples or ranks_of(
                parameters, where and where.mesh, group, others.tensor.device, None, others.tensor.groups
            )
        with nullcontext() if where is None or not others.tensor.groups else where.gathered():
            _tensor_agreement.tell(others.tensor, error)
    others.tell(error)


def _readable(parameters: Any) -> ParameterForms | None:
    with suppress(Exception):
        return parameter_forms(read_parameters(parameters))
    return None


def _tensor_ranks(leaves: dict[str, Tensor], losses: object) -> TensorRanks:
    """Return the ranks of the first mesh among parameters or, where those cannot be read, in the graph."""
    found: list[Any] = [leaf for leaf in leaves.values() if is_dtensor(leaf)]
    if not found and isinstance(losses, Tensor):
        ends = [graph.leaf_tensor(node) for node in graph.walk([losses]) if graph.is_leaf(node)]
        found = [leaf for leaf in ends if is_dtensor(leaf)]
    if not found:
        return TensorRanks()
    return ranks_of_mesh(found[0].device_mesh, torch.device(found[0].device))
