"""The file of a record: whole lines or nothing, and never into another file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class RecordFile:
    """Append lines, each with one system call, so that a killed process leaves whole lines behind.

    No descriptor is kept: the program that is observed may close those that it did not open, and get the number for a
    file of its own. It may also delete or replace the file, so each time it is looked whether it is the same.

    Args:
        path: The file; created where there is none, else continued.

    Attributes:
        size: Its length in bytes.

    Raises:
        OSError: (also from every method) the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        self._remember()

    def _remember(self) -> None:
        state = os.stat(self._path)
        self._identity, self.size = (state.st_dev, state.st_ino), state.st_size

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open it; refuse one that was moved or deleted, or another in its place."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise OSError("the file was moved or deleted while it was written") from None
        try:
            state = os.fstat(descriptor)
            if (state.st_dev, state.st_ino) != self._identity:
                raise OSError("the file was replaced by another while it was written")
            yield descriptor
        finally:
            os.close(descriptor)

    def append(self, data: bytes) -> None:
        """Write all of it, or none."""
        with self.opened() as descriptor:
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                os.ftruncate(descriptor, self.size)  # a line cut short would spoil the next
                raise
        self.size += len(data)

    def read(self) -> bytes:
        """Return the content."""
        with self.opened() as descriptor:
            return os.pread(descriptor, self.size, 0)

    def rewrite(self, data: bytes) -> None:
        """Replace the file by one with this content, at once."""
        new = self._path.with_name(f"{self._path.name}.thinner")
        try:
            new.write_bytes(data)
            os.replace(new, self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._remember()
