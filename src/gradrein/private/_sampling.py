"""Batches as they are accounted for: every sample is in a batch with the same chance, apart from all others."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..errors import ArgumentTypeError, PrivacyError
from ._accounting import steps_in_epoch
from ._random import Secure, Seeded


class Parts:
    """The indices of each physical batch, for a loader that may fetch ahead.

    Args:
        samples: how many there are.
        batch_size: how many a logical batch has, on average or exactly.
        largest: how many a physical batch may have, on this rank.
        shuffled: draw batches of a fixed size, each sample in one of them in each epoch.
        source: random numbers, the same on all ranks.
        rank: this one, and how many there are: they share each batch.

    Attributes:
        waiting: of each batch not handed out yet, how many samples count, and whether it completes a logical batch.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        largest: int | None,
        shuffled: bool,
        source: Seeded | Secure,
        rank: tuple[int, int],
    ) -> None:
        self.samples, self.batch_size, self.largest, self.shuffled = samples, batch_size, largest, shuffled
        self.rate = batch_size / samples
        self.in_epoch = steps_in_epoch(self.rate)
        self.source, self._rank = source, rank
        self.begin(0)

    def begin(self, step: int) -> deque[tuple[int, bool]]:
        """Go on from a step, with the next loop over the loader."""
        self._step, self.waiting = step, deque[tuple[int, bool]]()
        return self.waiting

    def __iter__(self) -> Iterator[list[int]]:
        (rank, ranks), waiting = self._rank, self.waiting
        for step in range(self._step, self._step - self._step % self.in_epoch + self.in_epoch):
            chosen = self._drawn(step)
            mine, most = chosen[rank::ranks].tolist(), -(-len(chosen) // ranks)  # all ranks take as many parts
            size = self.largest or max(1, most)
            for start in range(0, max(1, most), size):
                indices = mine[start : start + size]
                waiting.append((len(indices), start + size >= most))
                yield indices or [0]  # not every model takes an empty batch: this sample does not count

    def _drawn(self, step: int) -> Tensor:
        if not self.shuffled:
            return (self.source.uniform(step, self.samples) < self.rate).nonzero().squeeze(1)
        number = step % self.in_epoch
        order = self.source.uniform(step - number, self.samples).argsort()
        return order[number * self.batch_size : (number + 1) * self.batch_size]


class Loader:
    """The batches of an epoch each time it is iterated: from its beginning, or from where a loop or a state left it."""

    def __init__(
        self, theirs: DataLoader[Any], parts: Parts, epoch: Callable[[DataLoader[Any]], Iterator[Any]]
    ) -> None:
        names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
        names += ["prefetch_factor", "persistent_workers"] if theirs.num_workers else []
        kept: dict[str, Any] = {name: getattr(theirs, name) for name in names}
        # With a generator of its own it leaves those of training as they are.
        self._loader: DataLoader[Any] = DataLoader(
            theirs.dataset, batch_sampler=parts, generator=torch.Generator(), **kept
        )
        self.dataset, self.max_physical_batch, self._in_epoch = theirs.dataset, parts.largest, parts.in_epoch
        self._epoch: Any = weakref.WeakMethod(epoch)  # in a cycle, torch's persistent workers take seconds to end

    def __len__(self) -> int:
        if self.max_physical_batch is not None:
            raise TypeError("with max_physical_batch the number of batches depends on what is drawn")
        return self._in_epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()(self._loader)  # type: ignore[no-any-return]


def check_loader(loader: Any) -> None:
    """Refuse a loader whose batches cannot be drawn anew."""
    if not isinstance(loader, DataLoader):
        raise ArgumentTypeError(f"Private: `loader` must be a torch DataLoader, found {type(loader).__name__}.")
    data, sampler = loader.dataset, loader.sampler
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        _refuse("the dataset is iterable or has no length", "pass one with __getitem__ and __len__")
    if loader.batch_size is None:
        _refuse("the loader has a batch sampler, or batch_size=None", "pass DataLoader(dataset, batch_size=...)")
    if type(sampler) not in (SequentialSampler, RandomSampler):
        _refuse(
            f"the loader draws with {type(sampler).__name__}, and samples have to be equally likely",
            "weight the losses instead, which clipping bounds; ranks share each batch by themselves",
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(data)):  # type: ignore[arg-type]
        _refuse("the loader draws with replacement, or a number of samples", "leave both out")
    if loader.drop_last:
        _refuse("the loader has drop_last=True, and no batch is the last one: sizes vary", "leave it out")
    if not getattr(loader, "in_order", True):
        _refuse("the loader has in_order=False, so it is not known which batch comes", "leave it out")
    if loader.batch_size > len(data):  # type: ignore[arg-type, operator]
        _refuse(f"a batch of {loader.batch_size} is larger than the dataset", "pass a smaller batch size")


def _refuse(what: str, instead: str) -> None:
    raise PrivacyError(
        f"Private: {what}. Batches are drawn anew, as epsilon is accounted for: each sample with the same chance, "
        f"apart from all others. To go on, {instead}."
    )
