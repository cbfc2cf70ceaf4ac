"""Who says what was found when several processes were watched: a process of its own, forked from rank 0.

A rank that fails takes the others with it: torchrun ends them by a signal, after which they can say nothing. The
reporter is in a session of its own, so it outlives them; it sees by their files and process ids that they are done,
waits no longer than `PATIENCE` for those that are not, then reads the records, says what it found and writes the page.
It never touches the program.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from ._page import write_page
from ._ranks import Place, header_of, joined_name, rank_file
from ._run import Run, read
from ._text import as_text

__all__ = ["await_reporter", "start_reporter"]

PATIENCE = 10.0  # seconds that are given to other ranks once rank 0 has ended
_PAUSE = 0.1


def start_reporter(record: Path, here: Place) -> int | None:
    """Fork the reporter; returns a file descriptor to await it by, None where there can be none."""
    if not hasattr(os, "fork"):
        return None
    parent = os.getpid()
    ours, its = os.pipe()
    try:
        child = os.fork()
    except OSError:  # no more processes: the program goes on without a report
        return None
    if child:
        os.close(its)
        os.waitpid(child, 0)  # only a go-between, so that the reporter is nobody's child that a script might wait for
        return ours
    try:
        os.setsid()
        if os.fork() == 0:
            _attend(record, here, parent)
    finally:
        os._exit(0)


def await_reporter(descriptor: int) -> None:
    """Wait until it is done; not for ever, since a program must be able to end."""
    select.select([descriptor], [], [], PATIENCE + 20)


def _attend(record: Path, here: Place, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # whoever reads the program's output must not wait for this process
    files = [rank_file(record, rank) for rank in range(here.world)]
    while _is_alive(parent) and not _is_over(files[0], here, parent):
        time.sleep(_PAUSE)
    if header_of(files[0]).get("launch") != here.launch:
        return  # rank 0 ended before it began
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not all(_is_over(file, here) for file in files[1:]):
        time.sleep(_PAUSE)
    try:
        found = _report(read(files[0]))
    except Exception as error:
        found = f"bridle: no report ({type(error).__name__}: {error}). To try again: bridle report {files[0]}"
    print(f"\n{found}", file=sys.stderr, flush=True)


def _report(run: Run) -> str:
    """Write the page; returns what to say."""
    if not any(one.steps for one in run.ranks):
        return "bridle: no optimizer step was seen, so there is nothing to say."
    page = joined_name(run.path).with_suffix(".html")
    write_page(page, [run])
    return f"{as_text(run)}\nThe page: {page}"


def _is_over(file: Path, here: Place, process: int | None = None) -> bool:
    """Has this rank completed its record, or is its process gone?"""
    header = header_of(file)
    if header.get("launch") != here.launch or (process is not None and header["process"][1] != process):
        return False
    host, number = header["process"]
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 4096))
        last = opened.read().rstrip(b"\n").rpartition(b"\n")[2]
    return last.startswith(b'{"ended"') or (host == socket.gethostname() and not _is_alive(number))


def _is_alive(process: int) -> bool:
    """Does it run? One that has ended and whose end nobody has yet noticed does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # no such table of processes here
        return True
