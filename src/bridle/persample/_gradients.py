"""The gradients of a batch as they are held, and the steps that all answers share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from .._torch.amp import no_autocast
from .._torch.dtensor import any_dtensor
from ._parameters import ParameterForms
from ._ranks import Handshake, SampleRanks
from ._scatter import Layout
from ._tensor_ranks import TensorRanks
from .ownership.find import Source
from .representations.base import SampleGrads
from .representations.held_versions import HeldVersions
from .representations.norms import Norms
from .representations.numerics import real_dtype


class BatchGradients:
    """The gradients of a batch, one per sample, each parameter's in the form that is cheapest to ask."""

    def __init__(
        self,
        samples: int,
        parameter_forms: ParameterForms,
        forms: dict[str, SampleGrads],
        *,
        ranks: SampleRanks,
        tensor: TensorRanks,
        memory_budget: int,
        scale: float,
        source: Source | None,
        eps: float,
        engine: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        self._samples, self._parameters, self._forms = samples, parameter_forms.held, forms
        self._leaves, self._gathered, self._ranks = parameter_forms.leaves, parameter_forms.gathered, ranks
        self._budget, self._scale, self._source, self._engine = memory_budget, scale, source, engine
        self._eps, self._tensor = eps, tensor
        self._watch = HeldVersions(forms)
        self._known: Norms | None = None

    def __len__(self) -> int:
        """Return the number of samples, or of groups."""
        return self._samples

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Answer a question, if all it needs is as it was."""
        self._watch.check()
        with self._gathered(), no_autocast():
            yield

    def _norms(self) -> Norms:
        if self._known is None:
            with self._asked():
                large = (torch.float64, torch.complex128)
                extreme = frozenset(name for name, p in self._parameters.items() if p.dtype in large)
                self._known = self._tensor.whole_norms(Norms(self._forms, self._samples, extreme))
        return self._known

    def _lengths(self) -> Tensor:
        """Return the norm of each sample's gradient on this rank, in float64."""
        return self._unscaled(self._norms().total)

    def _handshake(
        self,
        call: str,
        same: Mapping[str, float] | None = None,
        *,
        bad: int = 0,
        sparse: int = 0,
        ranks: SampleRanks | None = None,
        alike: Tensor | None = None,
    ) -> Handshake:
        used = [name in self._forms for name in self._parameters]
        settings = {"the scale of `scaler`": self._scale, **(same or {})}
        ranks = ranks or self._ranks
        numbers = alike.tolist() if alike is not None and ranks.copies else None
        return ranks.handshake(call, self._parameters, used, (self._samples, bad, sparse), settings, numbers)

    def _layouts(self) -> dict[str, Layout] | None:
        """Return how sums are laid out; None where every parameter is a plain tensor."""
        if not any_dtensor(self._parameters.values()):
            return None
        return {name: Layout(p, self._leaves[name]) for name, p in self._parameters.items()}

    def _unscaled(self, x: Tensor) -> Tensor:
        return x if self._scale == 1 else x / self._scale

    @cached_property
    def _dtype(self) -> torch.dtype:
        """The dtype of norms and products of all parameters: that of the widest."""
        dtypes = [real_dtype(dtype) for dtype in {p.dtype for p in self._parameters.values()}]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
