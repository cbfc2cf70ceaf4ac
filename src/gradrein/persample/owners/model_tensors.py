"""What is no data: parameters and buffers."""

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ... import graph
from ..._torch.dtensor import stored_shard
from .. import tracing


class ModelTensors:
    """What is no data: parameters and buffers. Looked up only when something might be."""

    def __init__(self, parameters: dict[str, Tensor], model: nn.Module | None, rows: int) -> None:
        self._parameters, self._model, self.rows = parameters, model, rows

    @cached_property
    def _storages(self) -> frozenset[int | None]:
        others = [] if self._model is None else [*self._model.parameters(), *self._model.buffers()]
        return frozenset(graph.memory_of(stored_shard(tensor)) for tensor in (*self._parameters.values(), *others))

    @cached_property
    def _ids(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._parameters.items()}

    def name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter; None if it is none of those that were passed."""
        return self._ids.get(id(tensor))

    def is_data(self, tensor: Tensor) -> bool:
        """Return whether a tensor is neither a parameter nor a buffer, nor a part or a copy of one."""
        tensor = tensor if isinstance(tensor, nn.Parameter) else stored_shard(tensor)
        if tensor.numel() == 0 or isinstance(tensor, nn.Parameter) or graph.memory_of(tensor) in self._storages:
            return False
        value = tracing.constant(tensor)
        buffers = [] if self._model is None or value is None else self._model.buffers()
        return not any(one.shape == tensor.shape and torch.equal(one.to(tensor), tensor) for one in buffers)

    def is_input(self, node: Node) -> bool:
        """Return whether a leaf is an input whose gradient was asked for, rather than a parameter."""
        return graph.is_leaf(node) and self.is_data(graph.leaf_tensor(node))

    def may_hold_samples(self, tensor: Tensor) -> bool:
        """Return whether a tensor has as many rows as there are samples, or a multiple, or has samples second."""
        shape = tensor.shape
        return self.rows in shape[:2] or (len(shape) > 0 and self.rows > 0 and shape[0] % self.rows == 0)
