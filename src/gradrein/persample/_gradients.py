"""The gradients of a batch as they are held, and the steps that all answers share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._torch.dtensor import any_dtensor
from .._torch.modes import default_modes
from ..errors import RankError
from ._parameters import ParameterForms
from ._ranks import Handshake, SampleRanks
from ._scatter import Layout
from ._tensor_ranks import TensorRanks
from .cuts.find import Source
from .representations.base import SampleGrads
from .representations.held_versions import HeldVersions
from .representations.norms import Norms
from .representations.numerics import real_dtype


@dataclass
class Owed:
    """What the other ranks wait for while this one answers a question.

    Attributes:
        call: the question.
        ranks: those that are about to agree on it; None once they have.
        lengths: whether they are about to exchange norms of shards.
    """

    call: str
    ranks: SampleRanks | None
    lengths: bool


class BatchGradients:
    """The gradients of a batch, one per sample, each parameter's in the form that is cheapest to compute with."""

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
        self._owed: Owed | None = None

    def __len__(self) -> int:
        """Return the number of samples, or of groups."""
        return self._samples

    @contextmanager
    def _asked(self, call: str = "", ranks: SampleRanks | None = None, *, lengths: bool = False) -> Iterator[None]:
        """Answer a question, if all it needs is as it was. An error of this rank is told to those who wait for it.

        Args:
            call: the question, where other ranks are asked.
            ranks: those it is agreed on with.
            lengths: whether norms of shards are exchanged before.
        """
        if self._owed is not None:  # a part of another question
            self._watch.check()
            yield
            return
        with self._gathered(), default_modes():
            self._owed = owed = Owed(call, ranks, lengths and self._known is None)
            try:
                self._watch.check()
                yield
            except Exception as error:
                self._tell(owed, error)
                raise
            finally:
                self._owed = None

    def _tell(self, owed: Owed, error: Exception) -> None:
        """Take part with an error in the messages that the others wait for."""
        if isinstance(error, RankError) and error.__cause__ is not None:
            return  # a rank is gone or late: the others have waited as long
        with suppress(RankError):
            if owed.lengths:
                nothing = torch.zeros(self._samples, dtype=torch.float64)
                self._tensor.lengths(dict.fromkeys(self._forms, nothing), error)
        with suppress(RankError):
            if owed.ranks is not None:
                owed.ranks.tell(owed.call, error)

    def _norms(self) -> Norms:
        if self._known is None:
            with self._asked("norms", lengths=True):
                large = (torch.float64, torch.complex128)
                extreme = frozenset(name for name, p in self._parameters.items() if p.dtype in large)
                norms = Norms(self._forms, self._samples, extreme)
                if self._owed is not None:
                    self._owed.lengths = False
                self._known = self._tensor.whole_norms(norms)
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
        if self._owed is not None:  # what is raised from here on, all ranks raise
            self._owed.ranks = None
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
