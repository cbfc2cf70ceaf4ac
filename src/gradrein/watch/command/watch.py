"""`gradrein watch`: run a script, record it, and conclude when it has ended."""

import argparse
import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...autograd import detect_nonfinite
from ...errors import ArgumentError, GradreinError, RecordWriteError
from ..analysis.signs import LR_SCALE
from ..format.rank_files import RankInfo, default_name, rank_info
from ..monitor import Monitor
from ..record.writer import reason
from ..say import say
from .fail_on import EXIT_CODE, check_names, matching
from .lr_scale import scale_learning_rates
from .run_script import check_module, check_script, end_after, run_module, run_script, seed_all


def prepare(options: argparse.Namespace) -> Callable[[], int]:
    """Check a command line and begin to record.

    Returns:
        A function that runs the script to its own end, whatever happens to the record, and returns 0 or the code of
        `--fail-on`. A script that exits or raises does so from there.
    """
    check = check_module if options.module else check_script
    check(options.script)
    if options.steps is not None and options.steps < 1:
        raise ArgumentError(f"--steps is a whole number, 1 or more; found {options.steps}.")
    rank = rank_info()
    check_names(options.fail_on)
    if options.fail_on and rank is not None:
        raise ArgumentError("--fail-on is for one process; for several, use `gradrein report --fail-on` afterwards.")
    record = Path(options.record) if options.record else default_name(options.script)
    sys.argv = [options.script, *options.args]  # for the header of the record
    monitor = Monitor(record=record, clip=options.clip, every=options.every)
    if options.lr_scale is not None:
        scale_learning_rates(options.lr_scale)
    if options.seed is not None:
        seed_all(options.seed)
    raised: list[str] = []
    if _start(monitor):
        # Registered before the script runs, so it is called after all that the script registers.
        atexit.register(_conclude, monitor, options.verbose, raised, os.getpid(), rank)
        if options.lr_scale is not None:
            monitor.note(LR_SCALE, factor=options.lr_scale)
        _say_how_to_report(monitor, rank)  # already here: when a rank fails, torchrun kills the others
    if options.steps is not None:
        end_after(options.steps)
    return lambda: _watched(options, monitor, raised)


def _watched(options: argparse.Namespace, monitor: Monitor, raised: list[str]) -> int:
    with _searching_for_nan() if options.anomaly else contextlib.nullcontext():
        _run(options, monitor, raised)
    return _verdict(options.fail_on, monitor) if options.fail_on else 0


def _start(monitor: Monitor) -> bool:
    """Return whether the run is recorded."""
    try:
        monitor.start()
    except RecordWriteError as error:
        say(f"gradrein: the program runs without recording: {error} To record elsewhere, pass --record FILE.")
        return False
    return True


@contextlib.contextmanager
def _searching_for_nan() -> Iterator[None]:
    """Stop at the first NaN. torch keeps where the forward pass made each node; `detect_nonfinite` finds the origin."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False), detect_nonfinite():
        yield


def _run(options: argparse.Namespace, monitor: Monitor, raised: list[str]) -> None:
    """Run the script. What it raises is also put into `raised`, for what is said at the very end."""
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
        raised.append(reason(error))
        monitor.stop(raised[0])
        raise


def _verdict(names: str, monitor: Monitor) -> int:
    """Return the exit code of a script that ended well: 0 only where all of it was recorded, and nothing matches."""
    monitor.stop()
    if monitor.steps == 0 or monitor.stopped_because is not None:
        say("gradrein: --fail-on: the run was not recorded to its end, so nothing could be checked.")
        return EXIT_CODE
    return EXIT_CODE if matching(names, [monitor.report()]) else 0


def _conclude(monitor: Monitor, verbose: bool, raised: list[str], process: int, rank: RankInfo | None) -> None:
    if os.getpid() != process:  # a forked child of the script ends here as well
        return
    monitor.stop()
    if rank is None:
        _print_report(monitor, verbose, raised)
    else:
        _say_how_to_report(monitor, rank)


def _say_how_to_report(monitor: Monitor, rank: RankInfo | None) -> None:
    """Name the command that reports on several ranks: only when all have ended are their records complete."""
    if rank is not None and rank.rank == 0:
        say(f"gradrein: when all {rank.world} ranks have ended: gradrein report {monitor.path}")


def _print_report(monitor: Monitor, verbose: bool, raised: list[str]) -> None:
    if monitor.steps == 0:
        say(f"gradrein: no optimizer step was seen, so there is nothing to report. {_hint(monitor, raised)}")
        return
    try:
        report = monitor.report()
        text = f"\n{report.details() if verbose else report}The page: gradrein report {monitor.path}"
    except GradreinError as error:
        text = "" if monitor.stopped_because is not None else f"gradrein: no report: {error}"
    except Exception as error:  # the exit code is the script's, and so is its last traceback
        text = f"gradrein: no report ({reason(error)}). To try again: gradrein report {monitor.path}"
    if text and monitor.stopped_because is not None:
        text += "\ngradrein: recording stopped early: the report is about the steps before that."
    if text:
        say(text)


def _hint(monitor: Monitor, raised: list[str]) -> str:
    if raised:
        return f"The script failed before its first step ended: {raised[0]}"
    if passes := monitor.backwards:
        return (
            f"{passes} backward pass{'es were' if passes > 1 else ' was'} seen: the weights are updated by other means "
            "than a torch.optim.Optimizer. Its `step` is what is observed."
        )
    return (
        "There was no backward pass either. If the training runs in processes that the script starts, use "
        "gradrein.Monitor in them, or torchrun with `-m gradrein watch`."
    )
