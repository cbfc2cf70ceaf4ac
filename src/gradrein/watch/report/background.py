"""Report on several processes from one of its own, forked from rank 0.

When a rank fails, torchrun ends the others by a signal, and none of them can report any more. The reporter is in a
session of its own, so it outlives them. It learns from their files and process ids that they are done, waits at most
`PATIENCE` seconds for the others, then reads the records, prints the report and writes the page. It never touches the
program.
"""

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from ...errors import RecordWriteError
from ..format.rank_files import RankInfo, header_of, rank_file, run_file
from .html import write_page
from .report import Report, read_report
from .text import to_text

PATIENCE = 10.0  # seconds to wait for other ranks once rank 0 has ended
_PAUSE = 0.1


def start_reporter(record: Path, rank: RankInfo) -> int | None:
    """Fork the reporter. Return a file descriptor to await it by, None where there can be none."""
    if not hasattr(os, "fork"):
        return None
    parent = os.getpid()
    ours, its = os.pipe()
    try:
        child = os.fork()
    except OSError:  # no more processes: the program runs without a report
        return None
    if child:
        os.close(its)
        os.waitpid(child, 0)  # only an intermediate: a script that waits for its children must not find the reporter
        return ours
    try:
        os.setsid()
        if os.fork() == 0:
            _attend(record, rank, parent)
    finally:
        os._exit(0)


def await_reporter(descriptor: int) -> None:
    """Wait until it is done, for a bounded time: a program must be able to end."""
    select.select([descriptor], [], [], PATIENCE + 20)


def _attend(record: Path, rank: RankInfo, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # whoever reads the program's output must not wait for this process
    files = [rank_file(record, r) for r in range(rank.world)]
    while _is_alive(parent) and not _is_over(files[0], rank, parent):
        time.sleep(_PAUSE)
    if header_of(files[0]).get("launch") != rank.launch:
        return  # rank 0 ended before it began
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not all(_is_over(file, rank) for file in files[1:]):
        time.sleep(_PAUSE)
    try:
        found = _publish(read_report(files[0]))
    except Exception as error:
        found = f"gradrein: no report ({type(error).__name__}: {error}). To try again: gradrein report {files[0]}"
    print(f"\n{found}", file=sys.stderr, flush=True)


def _publish(report: Report) -> str:
    """Write the page; return what to print."""
    run = report.run
    if not any(one.steps for one in run.ranks):
        return "gradrein: no optimizer step was seen, so there is nothing to report."
    page = run_file(run.path).with_suffix(".html")
    try:
        write_page(page, [report], only_ours=True)
    except RecordWriteError as error:
        return f"{to_text(report)}\ngradrein: {error}"
    return f"{to_text(report)}\nThe page: {page}"


def _is_over(file: Path, rank: RankInfo, process: int | None = None) -> bool:
    """Return whether a rank has completed its record, or its process is gone."""
    header = header_of(file)
    if header.get("launch") != rank.launch or (process is not None and header["process"][1] != process):
        return False
    host, number = header["process"]
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 4096))
        last = opened.read().rstrip(b"\n").rpartition(b"\n")[2]
    return last.startswith(b'{"ended"') or (host == socket.gethostname() and not _is_alive(number))


def _is_alive(process: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # no /proc here
        return True
