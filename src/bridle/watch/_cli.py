"""The command: `bridle watch train.py [args]` and `bridle report run.jsonl`."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import BridleError
from ._live import LiveLine, possible
from ._monitor import Monitor
from ._run import read
from ._script import check_script, run_module, run_script
from ._text import as_json, as_text

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code of `report`, while `watch` ends as the script ends."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "report":
            return _report(options)
        _watch(options)
    except BridleError as error:
        print(f"bridle: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bridle", description="See why a training run swings, and hold it.")
    commands = parser.add_subparsers(dest="command", required=True)
    watch = commands.add_parser("watch", help="run a training script unchanged, record it, say what was found")
    watch.add_argument("--clip", metavar="HOW", help='clip gradients: a largest norm such as 1.0, "auto", "zscore"')
    watch.add_argument("--every", type=int, default=1, metavar="N", help="record every N steps (default: each)")
    watch.add_argument(
        "--record", metavar="FILE", help="where to write (default: SCRIPT.bridle.jsonl, numbered if taken)"
    )
    watch.add_argument(
        "--anomaly", action="store_true", help="stop at the operation that makes the first NaN, and name it"
    )
    watch.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    watch.add_argument("script", help="the script, or the module's name after -m")
    watch.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    report = commands.add_parser("report", help="say what a record shows, and write the page")
    report.add_argument("record", nargs="+", help="a record; two of them are compared, before and after")
    report.add_argument("--json", action="store_true", help="print JSON, write no page")
    report.add_argument("--text", action="store_true", help="print only, write no page")
    report.add_argument("-o", "--output", metavar="FILE", help="the page (default: beside the record, .html)")
    report.add_argument("--optimizer", type=int, metavar="I", help="which one, where a run has several")
    return parser


def _report(options: argparse.Namespace) -> int:
    runs = [read(path, options.optimizer) for path in options.record[:2]]
    if options.json:
        found = [as_json(run) for run in runs]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        return 0
    print("\n".join(as_text(run) for run in runs), end="")
    if not options.text:
        from ._page import write_page

        page = Path(options.output) if options.output else runs[-1].path.with_suffix(".html")
        write_page(page, runs)
        print(f"\nThe page: {page}")
    return 0


def _watch(options: argparse.Namespace) -> None:
    if not options.module:
        check_script(options.script)
    record = options.record or _free_name(options.script)
    line = LiveLine() if possible() else None
    sys.argv = [options.script, *options.args]  # what the record says was run
    on_step = None if line is None else line.draw
    monitor = Monitor(record=record, clip=options.clip, every=options.every, on_step=on_step)
    if options.anomaly:
        torch.autograd.set_detect_anomaly(True)
    # Registered before the script runs, so it comes after all that the script registers.
    atexit.register(_conclude, monitor, line, os.getpid())
    monitor.start()
    run = run_module if options.module else run_script
    run(options.script, options.args)


def _conclude(monitor: Monitor, line: LiveLine | None, process: int) -> None:
    if os.getpid() != process:  # a forked child of the script ends here as well
        return
    monitor.stop()
    if line is not None:
        line.close()
    if monitor.stopped_because is not None:
        print(f"bridle: recording stopped early: {monitor.stopped_because}", file=sys.stderr)
    if monitor.steps == 0:
        print("bridle: no optimizer step was seen, so there is nothing to say.", file=sys.stderr)
        return
    print(f"\n{as_text(read(monitor.path))}\nThe page: bridle report {monitor.path}", file=sys.stderr)


def _free_name(script: str) -> str:
    """A name for the record that is not taken; on ranks other than 0, with the rank in it."""
    stem = Path(script).stem if script.endswith(".py") else script
    rank = os.environ.get("RANK", "0")
    stem = stem if rank == "0" else f"{stem}-rank{rank}"
    names = (f"{stem}{'' if i == 1 else f'-{i}'}.bridle.jsonl" for i in range(1, 100_000))
    return next(name for name in names if not Path(name).exists())
