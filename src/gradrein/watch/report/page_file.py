"""Write a page, at once or not at all, and never over something else."""

import os
from pathlib import Path

from ...errors import RecordWriteError

_SIGN = b'<meta name="generator" content="gradrein">'


def sign() -> str:
    """Return what marks a page as ours, for its head."""
    return _SIGN.decode()


def write_file(path: str | os.PathLike[str], text: str, *, only_ours: bool = False) -> None:
    """Write the page into a new file that then takes its place.

    Args:
        path: The page.
        text: Its content.
        only_ours: Replace an existing file only if it is a page of ours: nobody named this one.

    Raises:
        RecordWriteError: (a ValueError and an OSError) it cannot be written there.
    """
    page = Path(path)
    new = page.with_name(f"{page.name}.{os.getpid()}.new")
    try:
        _require_replaceable(page, only_ours)
        try:
            new.write_text(text, encoding="utf-8", errors="replace")
            os.replace(new, page)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, RecordWriteError):
            raise
        raise RecordWriteError(f"the page {page} cannot be written: {error.strerror or error}.") from error


def _require_replaceable(page: Path, only_ours: bool) -> None:
    if not os.path.lexists(page):
        return
    kind = "a symbolic link" if page.is_symlink() else "a folder" if page.is_dir() else "not a regular file"
    if page.is_symlink() or not page.is_file():
        raise RecordWriteError(f"the page {page} cannot be written: it is {kind}. Name another with -o.")
    if only_ours:
        with page.open("rb") as file:
            if _SIGN not in file.read(1000):
                raise RecordWriteError(
                    f"the page {page} is not written: a file with that name exists, and it is not a page of gradrein. "
                    "Name another with -o."
                )
