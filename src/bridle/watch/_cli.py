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
from ._ranks import Place, free_name, joined_name, one_for_each_run, place
from ._record import reason
from ._reporter import await_reporter, start_reporter
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
    report.add_argument(
        "record",
        nargs="+",
        help="a record, one of several ranks', or a folder; two runs are compared, before and after",
    )
    report.add_argument("--json", action="store_true", help="print JSON, write no page")
    report.add_argument("--text", action="store_true", help="print only, write no page")
    report.add_argument("-o", "--output", metavar="FILE", help="the page (default: beside the record, .html)")
    report.add_argument("--optimizer", type=int, metavar="I", help="which one, where a run has several")
    return parser


def _report(options: argparse.Namespace) -> int:
    runs = [read(path, options.optimizer) for path in one_for_each_run(options.record)]
    if options.json:
        found = [as_json(run) for run in runs]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        return 0
    print("\n".join(as_text(run) for run in runs), end="")
    if not options.text:
        from ._page import write_page

        page = Path(options.output) if options.output else joined_name(runs[-1].path).with_suffix(".html")
        write_page(page, runs)
        print(f"\nThe page: {page}")
    return 0


def _watch(options: argparse.Namespace) -> None:
    if not options.module:
        check_script(options.script)
    here = place()
    record = Path(options.record) if options.record else free_name(options.script, here)
    # Of several ranks one has the terminal. Forked before there is anything that a fork could break.
    reporter = start_reporter(record, here) if here is not None and here.rank == 0 else None
    line = LiveLine() if (here is None or here.rank == 0) and possible() else None
    sys.argv = [options.script, *options.args]  # what the record says was run
    on_step = None if line is None else line.draw
    monitor = Monitor(record=record, clip=options.clip, every=options.every, on_step=on_step)
    if options.anomaly:
        torch.autograd.set_detect_anomaly(True)
    # Registered before the script runs, so it comes after all that the script registers.
    atexit.register(_conclude, monitor, line, os.getpid(), here, reporter)
    monitor.start()
    run = run_module if options.module else run_script
    try:
        run(options.script, options.args)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            monitor.stop(reason(error))
        elif error.code:
            monitor.stop(f"exit code {error.code}")
        raise


def _conclude(monitor: Monitor, line: LiveLine | None, process: int, here: Place | None, reporter: int | None) -> None:
    if os.getpid() != process:  # a forked child of the script ends here as well
        return
    if line is not None:
        line.close()
    monitor.stop()
    if here is not None:
        if reporter is not None:
            await_reporter(reporter)
        elif here.rank == 0:
            print(f"bridle: when all ranks have ended: bridle report {monitor.path}", file=sys.stderr)
        return
    if monitor.stopped_because is not None:
        print(f"bridle: recording stopped early: {monitor.stopped_because}", file=sys.stderr)
    if monitor.steps == 0:
        print("bridle: no optimizer step was seen, so there is nothing to say.", file=sys.stderr)
        return
    print(f"\n{as_text(read(monitor.path))}\nThe page: bridle report {monitor.path}", file=sys.stderr)
