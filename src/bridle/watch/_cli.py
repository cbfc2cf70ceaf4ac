"""The command: `bridle watch train.py [args]` and `bridle report run.jsonl`."""

import argparse
import atexit
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import ArgumentError, BridleError
from ._live_line import LiveLine, is_available
from ._lr_scale import LearningRateScale
from ._monitor import Monitor
from ._run_script import check_script, end_after, run_module, run_script, seed_all
from ._show_version import ShowVersion
from ._try import Limits, try_script
from .record.writer import reason
from .report.background import await_reporter, start_reporter
from .report.html import write_page
from .report.report import read_report
from .run.rank_files import RankInfo, free_name, one_file_per_run, rank_info, run_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code of `report`; `watch` ends as the script ends."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "report":
            return _report(options)
        if options.trial:
            return _try(options)
        _watch(options)
    except BridleError as error:
        print(f"bridle: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bridle", description="See why a training run swings, and hold it.")
    parser.add_argument("--version", action=ShowVersion, help="show what is installed, and if the kernel is used")
    commands = parser.add_subparsers(dest="command", required=True)
    watch = commands.add_parser("watch", help="run a training script unchanged, record it, report what was found")
    watch.add_argument("--clip", metavar="HOW", help='clip gradients: a largest norm such as 1.0, "auto", "zscore"')
    watch.add_argument("--every", type=int, default=1, metavar="N", help="record every N steps (default: each)")
    watch.add_argument(
        "--record", metavar="FILE", help="where to write (default: SCRIPT.bridle.jsonl, numbered if taken)"
    )
    watch.add_argument(
        "--anomaly", action="store_true", help="stop at the operation that makes the first NaN, and name it"
    )
    watch.add_argument("--lr-scale", type=float, metavar="F", help="multiply every learning rate, such as by 0.33")
    watch.add_argument("--steps", type=int, metavar="N", help="end the script after so many optimizer steps")
    watch.add_argument("--seed", type=int, metavar="S", help="seed random, numpy and torch before the script begins")
    watch.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="run the script as it is, then with the best two or three changes, and compare them",
    )
    watch.add_argument(
        "--time", type=float, default=1800.0, metavar="S", help="of --try: seconds for all runs together (default 1800)"
    )
    watch.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    watch.add_argument("script", help="the script, or the module's name after -m")
    watch.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    report = commands.add_parser("report", help="report what a record shows, and write the page")
    report.add_argument(
        "record",
        nargs="+",
        help="a record, one of several ranks', or a folder; two runs are compared, before and after",
    )
    report.add_argument("--json", action="store_true", help="print JSON, write no page")
    report.add_argument("--text", action="store_true", help="print only, write no page")
    report.add_argument("-o", "--output", metavar="FILE", help="the page (default: beside the record, .html)")
    report.add_argument("--optimizer", type=int, metavar="I", help="report on this one only, where a run has several")
    return parser


def _report(options: argparse.Namespace) -> int:
    reports = [read_report(path, options.optimizer) for path in one_file_per_run(options.record)]
    if options.json:
        found = [report.to_dict() for report in reports]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        return 0
    print("\n".join(map(str, reports)), end="")
    if not options.text:
        page = Path(options.output) if options.output else run_file(reports[-1].run.path).with_suffix(".html")
        write_page(page, reports)
        print(f"\nThe page: {page}")
    return 0


def _try(options: argparse.Namespace) -> int:
    if not options.module:
        check_script(options.script)
    if rank_info() is not None:
        raise ArgumentError("--try starts the runs itself, in one process each: call it without torchrun.")
    if options.time <= 0:
        raise ArgumentError(f"--time is a number of seconds above 0; found {options.time:g}.")
    folder = Path(options.record) if options.record else free_name(options.script, None).with_suffix(".try")
    passed = ["--every", str(options.every), *(["-m"] if options.module else []), options.script, *options.args]
    return try_script(passed, folder, Limits(options.steps, options.time))


def _watch(options: argparse.Namespace) -> None:
    if not options.module:
        check_script(options.script)
    if options.steps is not None and options.steps < 1:
        raise ArgumentError(f"--steps is a whole number, 1 or more; found {options.steps}.")
    rank = rank_info()
    record = Path(options.record) if options.record else free_name(options.script, rank)
    # Only rank 0 reports. Fork before threads or an accelerator are initialised.
    reporter = start_reporter(record, rank) if rank is not None and rank.rank == 0 else None
    line = LiveLine() if (rank is None or rank.rank == 0) and is_available() else None
    sys.argv = [options.script, *options.args]  # for the header of the record
    on_step = None if line is None else line.draw
    monitor = Monitor(record=record, clip=options.clip, every=options.every, on_step=on_step)
    if options.anomaly:
        torch.autograd.set_detect_anomaly(True)
    # Registered before the script runs, so it is called after all that the script registers.
    atexit.register(_conclude, monitor, line, os.getpid(), rank, reporter)
    if options.lr_scale is not None:
        LearningRateScale(options.lr_scale)
    if options.seed is not None:
        seed_all(options.seed)
    monitor.start()
    if options.steps is not None:
        end_after(options.steps)
    run = run_module if options.module else run_script
    try:
        run(options.script, options.args)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            monitor.stop(reason(error))
        elif error.code:
            monitor.stop(f"exit code {error.code}")
        raise


def _conclude(
    monitor: Monitor, line: LiveLine | None, process: int, rank: RankInfo | None, reporter: int | None
) -> None:
    if os.getpid() != process:  # a forked child of the script ends here as well
        return
    if line is not None:
        line.close()
    monitor.stop()
    if rank is not None:
        if reporter is not None:
            await_reporter(reporter)
        elif rank.rank == 0:
            print(f"bridle: when all ranks have ended: bridle report {monitor.path}", file=sys.stderr)
        return
    if monitor.stopped_because is not None:
        print(f"bridle: recording stopped early: {monitor.stopped_because}", file=sys.stderr)
    if monitor.steps == 0:
        print("bridle: no optimizer step was seen, so there is nothing to report.", file=sys.stderr)
        return
    print(f"\n{monitor.report()}\nThe page: bridle report {monitor.path}", file=sys.stderr)
