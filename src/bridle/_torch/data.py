"""Data loading."""

from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = ["DataLoaderIterator"]
