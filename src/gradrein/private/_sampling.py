"""Batches as they are accounted for: every sample is in a batch with the same chance, apart from all others."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..errors import ArgumentTypeError, PrivacyError
from ._accounting import steps_in_epoch
from ._random import Source


class Part(NamedTuple):
    """What a batch of the loader is of a logical batch.

    Attributes:
        size: how many samples of it count.
        last: whether the logical batch is complete with it.
        after: the state of random numbers from which the next logical batch is drawn.
    """

    size: int
    last: bool
    after: Tensor


class Parts:
    """The indices of each physical batch, for a loader that may fetch ahead; `waiting` has those not handed out yet.

    Args:
        samples: how many there are.
        batch_size: how many a logical batch has, on average or exactly.
        largest: how many a physical batch may have, on this rank.
        shuffled: draw batches of a fixed size, each sample in one of them.
        source: random numbers, the same on all ranks.
        rank: this one, and how many there are: they share each batch.
    """

    def __init__(
        self, samples: int, batch_size: int, largest: int | None, shuffled: bool, source: Source, rank: tuple[int, int]
    ) -> None:
        self.samples, self.batch_size, self.largest, self.shuffled = samples, batch_size, largest, shuffled
        self.rate = batch_size / samples
        self.in_epoch = steps_in_epoch(self.rate)
        self.waiting: deque[Part] = deque()
        self.left = 0
        self._source, self._rank = source, rank

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = self._rank
        for chosen, after in self._shuffled() if self.shuffled else self._poisson():
            mine, most = chosen[rank::ranks].tolist(), -(-len(chosen) // ranks)  # all ranks take as many parts
            size = self.largest or max(1, most)
            for start in range(0, max(1, most), size):
                indices = mine[start : start + size]
                self.waiting.append(Part(len(indices), start + size >= most, after))
                yield indices or [0]  # not every model takes an empty batch: this sample does not count

    def _poisson(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.left):
            yield (self._source.uniform(self.samples) < self.rate).nonzero().squeeze(1), self._source.state()

    def _shuffled(self) -> Iterator[tuple[Tensor, Tensor]]:
        before = self._source.state()
        batches = torch.split(self._source.uniform(self.samples).argsort(), self.batch_size)
        after = self._source.state()
        for number in range(self.in_epoch - self.left, self.in_epoch):  # within an epoch, the same order again
            yield batches[number], after if number == self.in_epoch - 1 else before


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
        self.dataset, self._parts, self._epoch = theirs.dataset, parts, epoch

    def __len__(self) -> int:
        if self._parts.largest is not None:
            raise TypeError("with max_physical_batch the number of batches depends on what is drawn")
        return self._parts.in_epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch(self._loader)


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
