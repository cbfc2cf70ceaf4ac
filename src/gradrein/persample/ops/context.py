"""One use of a value by an op that sees data: what a rule is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from .. import engine
from ..layout.samples import NotSeparableError, SampleLayout


@dataclass(eq=False)
class RuleContext:
    """One use of a parameter, or of a value made from parameters alone, by one op of the recorded graph.

    Attributes:
        op: what torch calls the op, such as ``AddmmBackward0``.
        node: the op, as torch recorded it.
        position: which of its inputs the value is, as an index into ``node.next_functions``.
        shape: shape of the value.
        gradients: gradient of the sum of all losses at each output of the op; None where there is none.
        layouts: for each output, which sample owns which element.
        gradient: the first of the gradients.
        layout: the first of the layouts.
        samples: how many samples there are.
        allow_coupling: whether the user accepts losses that depend on other samples.
    """

    op: str
    node: Node
    position: int
    shape: tuple[int, ...]
    gradients: tuple[Tensor | None, ...]
    layouts: tuple[SampleLayout, ...]
    gradient: Tensor
    layout: SampleLayout
    samples: int
    allow_coupling: bool = False
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)  # shared by the uses of one op

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self._value.dtype

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros as the value is: of its dtype, on its device."""
        return torch.zeros(shape, dtype=self.dtype, device=self._value.device)

    @property
    def _value(self) -> Tensor | graph.OutputInfo:
        below, output_nr = self.node.next_functions[self.position]
        assert below is not None
        return graph.leaf_tensor(below) if graph.is_leaf(below) else graph.describe(below)[output_nr]

    def saved(self, name: str) -> Any:
        """Return what the op saved under torch's name for it, such as ``mat1`` or ``input``."""
        if name not in self._cache:
            try:
                value = getattr(self.node, f"_saved_{name}")
            except RuntimeError as error:
                engine.raise_explained(f"what `{self.op}` saved as `{name}`", error)
            if isinstance(value, Tensor):
                if value.layout is not torch.strided or value.is_nested:
                    raise NotSeparableError  # rules count on rows; torch's own backward knows what to do
                value = value.detach()
            self._cache[name] = value
        return self._cache[name]

    def run(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Run the op's backward with other gradients at its outputs; return what the value gets."""
        with torch.no_grad():
            answer = engine.call(self.node, gradients)[self.position]
        if answer is None:
            return self.zeros(*self.shape)
        if answer.is_sparse:
            answer = answer.to_dense()
        return answer.sum_to_size(self.shape)

    def scaled(self, weights: Tensor) -> list[Tensor | None]:
        """Return the gradients at the outputs with each sample's part multiplied by its weight."""
        out: list[Tensor | None] = []
        for gradient, layout in zip(self.gradients, self.layouts, strict=True):
            if gradient is None:
                out.append(None)
                continue
            w = weights.to(gradient)
            if layout.block is not None:
                cut = gradient.reshape(-1, layout.samples, layout.block) * w[:, None]
                out.append(cut.view(gradient.shape))
            else:
                owner = layout.owner_of_each(gradient.numel(), gradient.device).view(gradient.shape)
                out.append(gradient * torch.where(owner >= 0, w[owner.clamp(min=0)], 0))
        return out
