"""The command: `bridle watch train.py [args]` and `bridle report run.jsonl`."""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError, BridleError
from ._fail_on import EXIT_CODE, check_names, matching
from ._run_script import check_script
from ._say import say
from ._show_version import ShowVersion
from ._try import Limits, try_script
from ._watch import watch
from .report.html import write_page
from .report.report import read_report
from .run.rank_files import default_name, free_name, one_file_per_run, rank_info, run_file

_FAIL_ON = f"exit with {EXIT_CODE} if there is one of these findings, such as spikes,nonfinite; any: any finding"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code of `report`; `watch` ends as the script ends."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "report":
            return _report(options)
        return _try(options) if options.trial else watch(options)
    except BridleError as error:
        say(f"bridle: {error}")
        return 2


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
    watch.add_argument("--fail-on", metavar="NAMES", help=_FAIL_ON)
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
    report.add_argument("--fail-on", metavar="NAMES", help=_FAIL_ON)
    report.add_argument("--optimizer", type=int, metavar="I", help="report on this one only, where a run has several")
    return parser


def _report(options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have letters that a terminal has not
    check_names(options.fail_on)
    reports = [read_report(path, options.optimizer) for path in one_file_per_run(options.record)]
    if options.json:
        found = [report.to_dict() for report in reports]
        _print(json.dumps(found[0] if len(found) == 1 else found, indent=1) + "\n")
    else:
        _print("\n".join(map(str, reports)))
    if not options.text and not options.json:
        page = Path(options.output) if options.output else run_file(reports[-1].run.path).with_suffix(".html")
        write_page(page, reports, only_ours=not options.output)
        _print(f"\nThe page: {page}\n")
    return EXIT_CODE if options.fail_on and matching(options.fail_on, reports) else 0


def _print(text: str) -> None:
    """Print to a reader that may have seen enough, such as `head`: the page and the exit code are as without it."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the rest goes nowhere: Python would write it again at exit, and complain
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _try(options: argparse.Namespace) -> int:
    if not options.module:
        check_script(options.script)
    if rank_info() is not None:
        raise ArgumentError("--try starts the runs itself, in one process each: call it without torchrun.")
    if options.time <= 0:
        raise ArgumentError(f"--time is a number of seconds above 0; found {options.time:g}.")
    folder = (
        Path(options.record) if options.record else free_name(default_name(options.script), None).with_suffix(".try")
    )
    passed = ["--every", str(options.every), *(["-m"] if options.module else []), options.script, *options.args]
    return try_script(passed, folder, Limits(options.steps, options.time))
