"""What `gradrein watch train.py [args]` and `gradrein report run.jsonl` do; their options are in `gradrein_cli`."""

import argparse
import io
import json
import os
import sys
from pathlib import Path

from ...errors import ArgumentError, GradreinError
from ..format.rank_files import default_name, free_name, one_file_per_run, rank_info, run_file
from ..report.html import write_page
from ..report.report import read_report
from ..say import say
from .fail_on import EXIT_CODE, check_names, matching
from .run_script import check_script
from .try_script import try_script
from .watch import prepare


def run(options: argparse.Namespace) -> int:
    """Run the command. Return the exit code of `report`; `watch` ends as the script ends."""
    try:
        if options.command == "report":
            return _report(options)
        if options.trial:
            return _try(options)
        watched = prepare(options)
    except GradreinError as error:
        say(f"gradrein: {error}")
        return 2
    return watched()  # what the script raises is its own


def _report(options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have letters that a terminal has not
    check_names(options.fail_on)
    reports = [read_report(path, options.optimizer) for path in one_file_per_run(options.record)]
    if options.json:
        dicts = [report.to_dict() for report in reports]
        _print(json.dumps(dicts[0] if len(dicts) == 1 else dicts, indent=1) + "\n")
    else:
        _print("\n".join(report.details() if options.verbose else str(report) for report in reports))
    if not options.text and not options.json:
        page = Path(options.output) if options.output else run_file(reports[-1].run.path).with_suffix(".html")
        write_page(page, reports, only_ours=not options.output)
        _print(f"The page: {page}\n")
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
    return try_script(passed, folder, options.steps, options.time)
