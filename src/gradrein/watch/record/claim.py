"""Claim a file for a new record: nothing that exists is ever overwritten."""

import os
from pathlib import Path

from ...errors import ArgumentError, RecordWriteError
from ..format.rank_files import RankInfo, free_name, rank_file
from .writer import why


def claim(record: Path, rank: RankInfo | None) -> Path:
    """Create the file for a record, in a folder that is made where it is missing. A name that is taken is numbered.

    Raises:
        ArgumentError: (a ValueError) there is something under that name that is not a file.
        RecordWriteError: (a ValueError and an OSError) the file cannot be created.
    """
    record = record.absolute()
    try:
        if record.exists() and not record.is_file():
            kind = "a folder" if record.is_dir() else "not a regular file"
            raise ArgumentError(f"`record` names the file to write; {record} is {kind}.")
        record.parent.mkdir(parents=True, exist_ok=True)
        while True:
            name = free_name(record, rank)
            file = name if rank is None else rank_file(name, rank.rank)
            if _create(file):
                return file
    except OSError as error:
        raise RecordWriteError(f"the record {record} cannot be written: {why(error)}.") from error


def _create(file: Path) -> bool:
    """Return whether the file is there and empty; not where another process was faster."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return file.is_file() and file.stat().st_size == 0
    return True
