"""Arrays in .npy files that grow: rows are appended first, and the number of rows in the header is written last.

A process that dies in between leaves bytes behind the last row, which nobody reads. The header has a fixed length, so
that it is rewritten in place. No pickle: what is read is a line of text and plain numbers.
"""

import ast
import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError, StoreWriteError

_NAMES = {torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEAD = 128
_START = b"\x93NUMPY\x01\x00" + (_HEAD - 10).to_bytes(2, "little")


def header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of a file of such an array."""
    text = repr({"descr": _NAMES[dtype], "fortran_order": False, "shape": tuple(shape)})
    return _START + text.ljust(_HEAD - len(_START) - 1).encode() + b"\n"


def read_header(path: Path) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of an array; refuse a file that does not hold all of it."""
    try:
        with open(path, "rb") as file:
            head, size = file.read(_HEAD), os.fstat(file.fileno()).st_size
        if len(head) != _HEAD or not head.startswith(_START):
            raise ValueError("its first bytes are not those of a .npy file of this store")
        said = ast.literal_eval(head[len(_START) :].decode("latin1").strip())
        dtype, shape = _DTYPES[said["descr"]], said["shape"]
        if not all(type(n) is int and n >= 0 for n in shape) or not 1 <= len(shape) <= 2 or said["fortran_order"]:
            raise ValueError(f"its shape is {shape!r:.80}")
        held = (size - _HEAD) // max(1, _row_bytes(dtype, shape))
        if held < shape[0]:
            raise ValueError(f"it holds {held:,} of the {shape[0]:,} rows that its header promises")
    except (FileNotFoundError, ValueError, KeyError, SyntaxError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{path}: damaged: {error}. Move this file and its twin away (ids-* and rows-* of one name): the rest "
            "of the store can then be read, and `resume` says which ids are to be added again."
        ) from error
    return dtype, shape


def read_rows(path: Path, start: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return some rows of an array."""
    row = _row_bytes(dtype, shape)
    with open(path, "rb") as file:
        file.seek(_HEAD + start * row)
        found = bytearray(file.read((end - start) * row))
    return torch.frombuffer(found, dtype=dtype).view(-1, *shape[1:])


def append(files: list[tuple[Path, Tensor]], there: int) -> None:
    """Append rows to arrays that have `there` rows: all of them, or none if that fails."""
    try:
        for path, rows in files:
            memory = (ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr())  # not copied
            _write(path, _HEAD + there * _row_bytes(rows.dtype, rows.shape), memory)
        for path, rows in files:
            _write(path, 0, header(rows.dtype, (there + len(rows), *rows.shape[1:])))
    except OSError as error:
        for path, rows in files:
            _write(path, 0, header(rows.dtype, (there, *rows.shape[1:])))
            os.truncate(path, _HEAD + there * _row_bytes(rows.dtype, rows.shape))
        raise write_error(files[0][0].parent, error) from error


def publish(path: Path, content: bytes) -> bool:
    """Write a file that nobody sees before all of it is there; return False if there is one of this name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        temporary.touch()
        _write(temporary, 0, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if path.exists():
                return False
            os.replace(temporary, path)
        if os.name == "posix":  # let the name survive a crash of the machine
            descriptor = os.open(path.parent, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except OSError as error:
        raise write_error(path.parent, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return True


def write_error(folder: Path, error: OSError) -> StoreWriteError:
    """Return the error to raise where a folder cannot be written to."""
    return StoreWriteError(
        f"{folder}: cannot be written to: {error.strerror or error}. What was added before is unchanged. Make room, or "
        "use another folder and `merge` it later."
    )


def _row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * (shape[1] if len(shape) > 1 else 1)


def _write(path: Path, start: int, content: Any) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
