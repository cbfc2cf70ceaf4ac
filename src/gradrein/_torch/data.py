"""Data loading."""

from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator
from torch.utils.data.dataloader import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as _Workers
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as _Here

__all__ = ["DataLoaderIterator", "dataset_size"]


def dataset_size(iterator: DataLoaderIterator) -> int | None:
    """Return how many samples a loader draws from by index; None where batches do not come in the order of indices."""
    if type(iterator) not in (_Here, _Workers) or iterator._dataset_kind != DatasetKind.Map:
        return None
    if not getattr(iterator, "_in_order", True):  # workers may overtake each other
        return None
    try:
        return len(iterator._dataset)  # type: ignore[arg-type]  # a dataset by index has a length, or raises
    except Exception:  # whatever the dataset of a script does
        return None
