"""Read records."""

import os
from pathlib import Path

from ...errors import RecordError
from ..format.rank_files import header_of, rank_files
from .merge import merge_ranks
from .reader import RecordReader
from .run import Run


def read_run(path: str | os.PathLike[str], optimizer: int | None = None) -> Run:
    """Read the record of a run. Given the file of one rank, also read those of the other ranks beside it.

    Args:
        path: The file. Its last line may be incomplete, if the run was killed while writing it. Lines with missing or
            wrongly typed keys are left out, and `warnings` of the run says so.
        optimizer: Which optimizer, by number. None: the one with the most steps.

    Returns:
        The steps of that optimizer, as columns; several ranks are merged into one run.

    Raises:
        RecordError: (a ValueError) The file is not a record, has another version, or is damaged in the middle.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with gradrein.Monitor(optimizer=optimizer) as monitor:
        ...     (weight.square().sum() / 2).backward()
        ...     _ = optimizer.step()
        >>> gradrein.watch.read_run(monitor.path).norm
        [5.0]

    See Also:
        [`gradrein.watch.Run`][], [`gradrein.watch.read_report`][]
    """
    return read_runs(path, optimizer)[0]


def read_runs(path: str | os.PathLike[str], optimizer: int | None = None) -> list[Run]:
    """Read the record as `read_run` does, of all optimizers or of one; the one with the most steps comes first."""
    file = RecordReader(Path(path))
    files = [file, *_files_of_other_ranks(file)]
    if optimizer is not None and optimizer not in file.optimizers:
        known = ", ".join(map(str, file.optimizers))
        raise RecordError(f"{path} has no optimizer {optimizer}; it has {known}.")
    chosen = file.by_steps() if optimizer is None else [optimizer]
    if "rank" not in file.header:
        return [file.run(opt) for opt in chosen]
    return [merge_ranks(sorted((f.run(opt) for f in files), key=lambda run: run.rank)) for opt in chosen]


def _files_of_other_ranks(file: RecordReader) -> list[RecordReader]:
    if "rank" not in file.header:
        return []
    launch, rank = file.header["launch"], file.header["rank"]
    beside = rank_files(file.path)
    return [RecordReader(path) for r, path in beside.items() if r != rank and header_of(path).get("launch") == launch]
