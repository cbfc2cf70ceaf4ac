"""`gradrein watch`: run a script, record it, and conclude when it has ended."""

import argparse
import atexit
import os
import sys
from pathlib import Path

import torch

from ...errors import ArgumentError, GradreinError, RecordWriteError
from ..format.rank_files import RankInfo, default_name, free_name, rank_info
from ..monitor import Monitor
from ..record.writer import reason
from ..report.background import await_reporter, start_reporter
from ..say import say
from .fail_on import EXIT_CODE, check_names, matching
from .live_line import LiveLine, is_available
from .lr_scale import LearningRateScale
from .run_script import check_module, check_script, end_after, run_module, run_script, seed_all


def watch(options: argparse.Namespace) -> int:
    """Run the script of a command line, to its own end whatever happens to the record.

    Returns:
        0, or the code of `--fail-on`. A script that exits or raises does so from here.
    """
    check = check_module if options.module else check_script
    check(options.script)
    if options.steps is not None and options.steps < 1:
        raise ArgumentError(f"--steps is a whole number, 1 or more; found {options.steps}.")
    rank = rank_info()
    check_names(options.fail_on)
    if options.fail_on and rank is not None:
        raise ArgumentError("--fail-on is for one process; for several, use `gradrein report --fail-on` afterwards.")
    record = _free_record(options, rank)
    # Only rank 0 reports. Fork before threads or an accelerator are initialised.
    reporter = start_reporter(record, rank) if rank is not None and rank.rank == 0 else None
    line = LiveLine() if (rank is None or rank.rank == 0) and is_available() else None
    sys.argv = [options.script, *options.args]  # for the header of the record
    on_step = None if line is None else line.draw
    monitor = Monitor(record=record, clip=options.clip, every=options.every, on_step=on_step)
    if options.anomaly:
        torch.autograd.set_detect_anomaly(True)
    # Registered before the script runs, so it is called after all that the script registers.
    atexit.register(_conclude, monitor, line, os.getpid(), rank, reporter, options.verbose)
    if options.lr_scale is not None:
        LearningRateScale(options.lr_scale)
    if options.seed is not None:
        seed_all(options.seed)
    _start(monitor)
    if options.steps is not None:
        end_after(options.steps)
    _run(options, monitor)
    return _verdict(options.fail_on, monitor) if options.fail_on else 0


def _free_record(options: argparse.Namespace, rank: RankInfo | None) -> Path:
    wanted = Path(options.record) if options.record else default_name(options.script)
    try:
        if wanted.exists() and not wanted.is_file():
            return wanted  # which the monitor refuses
        record = free_name(wanted, rank)
    except OSError:  # which it is told when it starts
        return wanted
    if options.record and record != wanted and (rank is None or rank.rank == 0):
        say(f"gradrein: {wanted} is not empty: this run is recorded in {record}.")
    return record


def _start(monitor: Monitor) -> None:
    try:
        monitor.start()
    except RecordWriteError as error:
        say(f"gradrein: the program runs without recording: {error} To record elsewhere, pass --record FILE.")


def _run(options: argparse.Namespace, monitor: Monitor) -> None:
    run = run_module if options.module else run_script
    try:
        run(options.script, options.args)
    except SystemExit as error:
        if error.code:
            monitor.stop(f"exit code {error.code}")
            raise
        if not options.fail_on:
            raise
    except BaseException as error:
        monitor.stop(reason(error))
        raise


def _verdict(names: str, monitor: Monitor) -> int:
    """Return the exit code of a script that ended well: 0 only where all of it was recorded, and nothing matches."""
    monitor.stop()
    if monitor.steps == 0 or monitor.stopped_because is not None:
        say("gradrein: --fail-on: the run was not recorded to its end, so nothing could be checked.")
        return EXIT_CODE
    return EXIT_CODE if matching(names, [monitor.report()]) else 0


def _conclude(
    monitor: Monitor, line: LiveLine | None, process: int, rank: RankInfo | None, reporter: int | None, verbose: bool
) -> None:
    if os.getpid() != process:  # a forked child of the script ends here as well
        return
    if line is not None:
        line.close()
    monitor.stop()
    if rank is None:
        _print_report(monitor, verbose)
    elif reporter is not None:
        if monitor._started and monitor._writer.failure is None:  # else it waits for this process to be gone
            await_reporter(reporter)
    elif rank.rank == 0:
        say(f"gradrein: when all ranks have ended: gradrein report {monitor.path}")


def _print_report(monitor: Monitor, verbose: bool) -> None:
    if not monitor._started:
        return
    if monitor.steps == 0:
        say(f"gradrein: no optimizer step was seen, so there is nothing to report. {_hint(monitor)}")
        return
    try:
        report = monitor.report()
        found = f"\n{report.details() if verbose else report}The page: gradrein report {monitor.path}"
    except GradreinError as error:
        found = "" if monitor.stopped_because is not None else f"gradrein: no report: {error}"
    except Exception as error:  # the exit code is the script's, and so is its last traceback
        found = f"gradrein: no report ({reason(error)}). To try again: gradrein report {monitor.path}"
    if found and monitor.stopped_because is not None:
        found += "\ngradrein: recording stopped early: the report is about the steps before that."
    if found:
        say(found)


def _hint(monitor: Monitor) -> str:
    if passes := monitor._recorder.backwards:
        return (
            f"There were {passes} backward passes: the weights are updated by other means than a "
            "torch.optim.Optimizer. Its `step` is what is observed."
        )
    return (
        "There was no backward pass either. If the training runs in processes that the script starts, use "
        "gradrein.Monitor in them, or torchrun with `-m gradrein watch`."
    )
