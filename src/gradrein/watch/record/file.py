"""The file of a record: whole lines or nothing, and never into another file."""

import os
from pathlib import Path

try:
    from fcntl import F_DUPFD_CLOEXEC, fcntl
except ImportError:  # no such thing on this system
    fcntl = None  # type: ignore[assignment]


class RecordFile:
    """Append lines, each with one system call, so that a killed process leaves whole lines behind.

    The program that is observed may delete the file, or close descriptors that it did not open and get this one's
    number for a file of its own. So the descriptor is checked before each use.

    Args:
        path: The file; created where there is none, else continued.

    Attributes:
        size: Its length in bytes.

    Raises:
        OSError: (also from every method but `close`) the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._open()

    def _open(self) -> None:
        self._descriptor = _above_the_streams(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))
        state = os.fstat(self._descriptor)
        self._identity = (state.st_dev, state.st_ino)
        self.size = state.st_size

    def append(self, data: bytes) -> None:
        """Write all of it, or none."""
        descriptor, rest = self._checked(), memoryview(data)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, self.size)  # a line cut short would spoil the next
            raise
        self.size += len(data)

    def rewrite(self, data: bytes) -> None:
        """Replace the file by one with this content, at once."""
        self.require_at_its_path()
        new = self._path.with_name(f"{self._path.name}.thinner")
        try:
            new.write_bytes(data)
            os.replace(new, self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self.close()
        self._open()

    def read(self) -> bytes:
        """Return the content."""
        return os.pread(self._checked(), self.size, 0)

    def require_at_its_path(self) -> None:
        """Refuse a file that was moved, or another in its place."""
        self._checked()
        try:
            state = os.stat(self._path)
        except FileNotFoundError:
            raise OSError("the file was moved while it was written") from None
        if (state.st_dev, state.st_ino) != self._identity:
            raise OSError("the file was replaced by another while it was written")

    def close(self) -> None:
        """Close the descriptor, unless it is no longer this file's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._state(descriptor) is not None:
            os.close(descriptor)

    def _checked(self) -> int:
        state = None if self._descriptor is None else self._state(self._descriptor)
        if self._descriptor is None or state is None:
            raise OSError("the program has closed its file descriptor")
        if state.st_nlink == 0:
            raise OSError("the file was deleted while it was written")
        return self._descriptor

    def _state(self, descriptor: int) -> os.stat_result | None:
        """Return the state of this file; None where the descriptor is closed, or another file's."""
        try:
            state = os.fstat(descriptor)
        except OSError:
            return None
        return state if (state.st_dev, state.st_ino) == self._identity else None


def _above_the_streams(descriptor: int) -> int:
    """Leave 0 to 2 alone: in a program started without standard streams, what is printed would go into the record."""
    if descriptor > 2 or fcntl is None:
        return descriptor
    moved = fcntl(descriptor, F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved
