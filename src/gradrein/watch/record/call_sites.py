"""Where the script makes optimizers and calls `backward` and `step`, and the names it uses: for advice that says so."""

import contextlib
import linecache
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..format.schema import Line
from .loss_graph import describe_loss

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})


def backward_sites(tensors: Any) -> list[Line]:
    """Return a line about the backward pass that is being called, and how its loss is put together."""
    with contextlib.suppress(Exception):  # what a script's objects do when looked at is not ours to suffer from
        if (frame := _caller(sys._getframe(1))) is not None:
            return [{**_line("backward", frame), "loss_graph": describe_loss(tensors)}]
    return []


def step_sites(optimizer: torch.optim.Optimizer, opt: int) -> list[Line]:
    """Return lines about the step that is being taken, and where its optimizer was made, as far as that is found."""
    found: list[Line] = []
    with contextlib.suppress(Exception):  # as above
        if (frame := _caller(sys._getframe(1))) is not None:
            names = {"optimizer": _name((frame.f_locals, frame.f_globals), optimizer)}
            found.append({**_line("step", frame), "opt": opt, "names": names})
        if (made := _made(frame, optimizer)) is not None:
            found.append({**made, "opt": opt})
    return found


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the first frame that is neither ours nor torch's."""
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame = frame.f_back
    return frame


def _line(site: str, frame: FrameType) -> Line:
    file, number = frame.f_code.co_filename, frame.f_lineno
    found: Line = {"site": site, "file": file, "line": number, "text": _text(file, number), "after": 0}
    if _is_installed(file):
        found["library"] = str(frame.f_globals.get("__name__", "")).split(".")[0]
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
