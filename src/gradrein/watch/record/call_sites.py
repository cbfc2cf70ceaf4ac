"""Where the script makes optimizers and calls `backward` and `step`, and the names it uses: for advice that says so."""

import contextlib
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..format.schema import Line
from .loss_graph import describe_loss

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})


class CallSites:
    """Writes the place of the first backward pass, and of each optimizer where it is made and where it first steps.

    Args:
        write: Writes a line of the record.
    """

    def __init__(self, write: Callable[[Line], None]) -> None:
        self._write = write
        self._frame_seen = False

    def on_backward(self, tensors: Any) -> None:
        """Note the first backward pass, and how its loss is put together."""
        if not self._frame_seen:
            self._frame_seen = True
            self._note("backward", None, more=lambda: {"loss_graph": describe_loss(tensors)})

    def on_step(self, optimizer: torch.optim.Optimizer, opt: int) -> None:
        """Note the first step of an optimizer, and where it was made."""
        self._note("step", optimizer, opt)
        with contextlib.suppress(Exception):  # as below
            if (made := _made(_caller(sys._getframe(1)), optimizer)) is not None:
                self._write({**made, "opt": opt})

    def _note(
        self,
        site: str,
        optimizer: torch.optim.Optimizer | None,
        opt: int | None = None,
        more: Callable[[], Line] = dict,
    ) -> None:
        with contextlib.suppress(Exception):  # what a script's objects do when looked at is not ours to suffer from
            frame = _caller(sys._getframe(2))
            if frame is not None:
                self._write({**_line(site, frame, optimizer, opt), **more()})


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the first frame that is neither ours nor torch's."""
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame = frame.f_back
    return frame


def _line(site: str, frame: FrameType, optimizer: torch.optim.Optimizer | None, opt: int | None) -> Line:
    file, number = frame.f_code.co_filename, frame.f_lineno
    found: Line = {"site": site, "file": file, "line": number, "text": _text(file, number), "after": 0}
    if _is_installed(file):
        found["library"] = str(frame.f_globals.get("__name__", "")).split(".")[0]
    if opt is not None and optimizer is not None:
        spaces = (frame.f_locals, frame.f_globals)
        found.update(opt=opt, names={"optimizer": _name(spaces, optimizer)})
    return found


def _made(frame: FrameType | None, optimizer: torch.optim.Optimizer) -> Line | None:
    """Return where an optimizer was made: looked for under its name in each function that is running."""
    while frame is not None:
        file = frame.f_code.co_filename
        name = None if _is_installed(file) else _name((frame.f_locals, frame.f_globals), optimizer)
        if name is not None and (line := _assignment(file, name)) is not None:
            found: Line = {"site": "made", "file": file, "line": line, "text": _text(file, line)}
            return {**found, "names": {"optimizer": name}, "after": 0}
        frame = frame.f_back
    return None


def _assignment(file: str, name: str) -> int | None:
    """Return the line that assigns to a name, such as "opt" or "self.opt"; None where there is not exactly one."""
    assigns = re.compile(rf"\s*{re.escape(name)}\s*(:[^=]+)?=[^=]")
    found = [i for i, text in enumerate(linecache.getlines(file), start=1) if assigns.match(text)]
    return found[0] if len(found) == 1 else None


def _text(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()[:200]


def _is_installed(file: str) -> bool:
    return file.startswith((*_INSTALLED, _OURS, _TORCH)) or "site-packages" in file


def _name(spaces: tuple[Mapping[str, Any], ...], optimizer: torch.optim.Optimizer) -> str | None:
    """Return the script's name for an optimizer: a variable, or an attribute of `self`."""
    for space in spaces:
        for name, value in list(space.items()):
            if value is optimizer:
                return name
    attributes = vars(spaces[0].get("self")) if hasattr(spaces[0].get("self"), "__dict__") else {}
    return next((f"self.{name}" for name, value in list(attributes.items()) if value is optimizer), None)
