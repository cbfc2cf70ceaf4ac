"""Answers that read: norms, gradients, inner products, statistics."""

from collections.abc import Iterator, Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from .._torch.dynamo import untraced
from .._torch.modes import default_modes
from .._validate import count
from ..errors import ArgumentError
from ._arguments import read_direction
from ._gradients import BatchGradients
from ._gram_ranks import gram_rows
from ._noise_stats import Stats, numbers_of
from ._ranks import Handshake, SampleRanks
from ._reduce import add_up, local_sums
from ._tensor_uses import batched, shard_of
from .representations.numerics import double, real_dtype, row_norms


class ReadAnswers(BatchGradients):
    """Queries that change nothing."""

    @overload
    def norms(self, *, per_parameter: Literal[False] = False, gathered: bool = False) -> Tensor: ...
    @overload
    def norms(self, *, per_parameter: Literal[True], gathered: bool = False) -> dict[str, Tensor]: ...
    @untraced
    def norms(self, *, per_parameter: bool = False, gathered: bool = False) -> Tensor | dict[str, Tensor]:
        """Return the norm of each sample's gradient.

        Args:
            per_parameter: return one tensor for each parameter instead.
            gathered: return the norms of the samples on all ranks, in rank order. Every rank has to call this.

        Returns:
            A tensor of shape (samples,), or a dict of them. Parameters that no loss depends on are left out.
        """
        if not gathered:
            return self._norms_of(per_parameter, gathered)
        with self._asked("norms", self._ranks, lengths=True):
            return self._norms_of(per_parameter, gathered)

    def _norms_of(self, per_parameter: bool, gathered: bool) -> Tensor | dict[str, Tensor]:
        if per_parameter:
            lengths = {name: self._unscaled(length) for name, length in self._norms().each.items()}
            lengths = self._of_all_ranks(lengths) if gathered else lengths
            dtypes = {name: real_dtype(self._parameters[name].dtype) for name in lengths}
            return {name: length.to(dtypes[name], copy=True) for name, length in lengths.items()}
        length = self._lengths()
        if gathered:
            self._handshake("norms")
            length = self._ranks.gather(length, self._ranks.order(self._samples))
        return length.to(self._dtype, copy=True)  # the caller may change it, and the next answer needs it

    @untraced
    def grads(self) -> dict[str, Tensor]:
        """Return every sample's gradient: name -> (samples, *shape)."""
        return {name: block for name, _, block in self.stream()}

    def stream(self, *, samples: int | None = None) -> Iterator[tuple[str, slice, Tensor]]:
        """Return an iterator over the gradients, parameter by parameter; only one block is in memory at a time.

        Args:
            samples: at most this many samples per block; all by default.

        Returns:
            For each block the parameter's name, which samples, and their gradients: (samples, *shape).
        """
        return self._blocks(max(1, self._samples) if samples is None else count(samples, "samples"))

    def _blocks(self, step: int) -> Iterator[tuple[str, slice, Tensor]]:
        with self._gathered():
            for name, form in self._forms.items():
                for start in range(0, max(1, self._samples), step):
                    self._watch.check()
                    part = slice(start, min(start + step, self._samples))
                    with default_modes():  # not while the caller has the block
                        block = self._unscaled(form.dense(part)).to(self._parameters[name].dtype)
                    yield name, part, batched(block, self._leaves[name])

    @untraced
    def dot(self, direction: Mapping[str, Tensor] | None = None, *, gathered: bool = False) -> Tensor:
        """Return the inner product of each sample's gradient with a direction.

        A complex parameter counts as its real and imaginary parts: the product is the real part of ``conj(g) * v``.

        Args:
            direction: name -> tensor of the parameter's shape; missing names count as zero. By default the
                mean gradient.
            gathered: return the results for the samples on all ranks, in rank order, and use the mean over all of
                them. Every rank has to call this, with the same direction.
        """
        with self._asked("dot", self._ranks if gathered else self._ranks.alone()):
            return self._of_samples(self._dot(self._direction("dot", direction, gathered)), gathered)

    @untraced
    def cosine(self, direction: Mapping[str, Tensor] | None = None, *, gathered: bool = False) -> Tensor:
        """Return the cosine between each sample's gradient and a direction, by default the mean gradient.

        Args:
            direction: as for `dot`.
            gathered: as for `dot`.
        """
        with self._asked("cosine", self._ranks if gathered else self._ranks.alone()):
            return self._of_samples(self._cosine(self._direction("cosine", direction, gathered)), gathered)

    @untraced
    def gram(self, *, gathered: bool = False) -> Tensor:
        """Return the inner products between all samples' gradients: (samples, samples).

        Args:
            gathered: for the samples on all ranks, in rank order. Gradients are materialised and sent, a few
                samples of one parameter at a time. Every rank has to call this.
        """
        ranks = self._ranks if gathered else self._ranks.alone()
        with self._asked("gram", ranks):
            agreed = self._handshake("gram", ranks=ranks)
            if ranks.groups:
                order = self._ranks.order(self._samples)
                parts = gram_rows(self._forms, self._leaves, agreed.used, self._ranks, order)
            else:
                order = None
                parts = {name: form.gram() for name, form in self._forms.items()}
            width = self._samples if order is None else sum(order.samples)
            total = self._tensor.total(parts, torch.zeros(self._samples, width, dtype=torch.float64))
            total = total if order is None else self._ranks.gather(total, order)
        return self._unscaled(self._unscaled(total)).to(self._dtype)

    @untraced
    def stats(self, *, gathered: bool = False) -> Stats:
        """Return statistics of the gradients: size, agreement, and the batch size that would pay off.

        All of them are NaN if the gradient of a sample is NaN or infinite.

        Args:
            gathered: over the samples on all ranks. Every rank has to call this.

        Raises:
            ArgumentError: there are fewer than two samples.
        """
        return Stats(*self._stats(self._ranks if gathered else self._ranks.alone()).tolist())

    def _stats(self, ranks: SampleRanks) -> Tensor:
        with self._asked("stats", ranks):
            agreed = self._handshake("stats", ranks=ranks)
            lengths, n = self._lengths(), agreed.total
            if n < 2:
                raise ArgumentError(f"stats: at least two samples are needed, found {n}.")
            mean = self._mean(agreed, ranks)
            order = ranks.order(self._samples)
            lengths, cosines = ranks.gather(torch.stack([lengths, self._cosine(mean)], 1), order).T
            return numbers_of(lengths, cosines, [self._length(mean)] if mean else [])

    def _dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the inner products in float64; a direction of any size is brought to a size that can be multiplied."""
        parts = {}
        with self._asked():
            for name, v in direction.items():
                if name in self._forms:
                    exact = double(v)
                    size = row_norms(exact[None])[0]
                    size = size.where((size > 0) & (size < torch.inf), 1)
                    parts[name] = self._forms[name].dot(exact / size) * size
            total = self._tensor.total(parts, torch.zeros(self._samples, dtype=torch.float64))
        return self._unscaled(total)

    def _cosine(self, direction: Mapping[str, Tensor]) -> Tensor:
        length = self._length(direction)
        unit = {name: double(v) / length.where(length > 0, 1) for name, v in direction.items()}
        own = self._lengths()
        return self._dot(unit) / own.where(own > 0, 1)

    def _direction(self, call: str, direction: Mapping[str, Tensor] | None, gathered: bool) -> dict[str, Tensor]:
        """Return a direction as parameters lie here; without one the mean gradient, of all ranks if asked so."""
        ranks = self._ranks if gathered else self._ranks.alone()
        if direction is None:
            return self._mean(self._handshake(call, ranks=ranks), ranks)
        whole = read_direction(direction, self._parameters)
        found = {name: shard_of(v, self._leaves[name]) for name, v in whole.items()}
        if ranks.groups or ranks.copies:
            lengths = [row_norms(double(v)[None]) for v in whole.values()] or [torch.zeros(1, dtype=torch.float64)]
            same = {"the length of `direction`": float(row_norms(torch.cat(lengths)[None]))}
            self._handshake(call, same, ranks=ranks)
        return found

    def _of_samples(self, values: Tensor, gathered: bool) -> Tensor:
        """Return one number per sample, of all ranks if asked so."""
        ranks = self._ranks if gathered else self._ranks.alone()
        return (ranks.gather(values, ranks.order(self._samples)) if ranks.groups else values).to(self._dtype)

    def _length(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of a direction, given as parameters lie here."""
        each = self._tensor.lengths({name: row_norms(double(v)[None]) for name, v in direction.items()})
        return row_norms(torch.stack(list(each.values()), 1))[0] if each else torch.ones((), dtype=torch.float64)

    def _mean(self, agreed: Handshake, ranks: SampleRanks) -> dict[str, Tensor]:
        weights = torch.full((self._samples,), 1 / max(1, agreed.total), dtype=torch.float64)

        def weigh(name: str) -> Tensor:
            total = self._forms[name].weighted(weights)
            return self._unscaled(total.to_dense() if total.is_sparse else total)

        with self._asked():
            sums = local_sums(self._leaves, self._parameters, agreed.used, self._forms.keys(), weigh)
            return dict(add_up(sums, ranks))

    def _of_all_ranks(self, lengths: dict[str, Tensor]) -> dict[str, Tensor]:
        agreed = self._handshake("norms of each parameter")
        names = [name for name, used in zip(self._parameters, agreed.used, strict=True) if used]
        each = torch.zeros(self._samples, len(names), dtype=torch.float64, device=self._ranks.device)
        for i, name in enumerate(names):
            each[:, i] = lengths.get(name, 0)
        order = self._ranks.order(self._samples)
        return dict(zip(names, self._ranks.gather(each, order).T, strict=True)) if names else {}
