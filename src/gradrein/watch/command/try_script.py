"""`gradrein watch --try`: run a script as it is and with the changes that its report suggests, and say which to keep.

Each run is a process of its own, with the same seed. One interrupt ends the current run and reports on what is there.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from ..analysis.actions import Action
from ..analysis.advice import TRY
from ..analysis.compare import sparkline
from ..analysis.losses import judged_loss, levels_of, losses_of, still_falls
from ..analysis.signs import end_of, means
from ..analysis.sites import label_of
from ..analysis.statistics import finite
from ..report.html import write_page
from ..report.report import Report, read_report
from ..run.run import Run
from ..say import say

_NO_CHANGE = Action("keep the script as it is", "")
_GRACE = 10.0  # seconds for a run to end after it was interrupted
_MOST = 6  # candidates
_RISES = 1.2  # a training loss that ends so many times above its lowest has risen
_INTERRUPTED = -1000  # which no process returns


def try_script(command: list[str], folder: Path, steps: int | None, seconds: float) -> int:
    """Run the trials, print the comparison, write the page.

    Args:
        command: The script and its arguments, as after `gradrein watch`.
        folder: Where records and the page go.
        steps: End each run after so many steps; None: at its own end.
        seconds: End all of them together after so long.

    Returns:
        The exit code: 1 if the script fails, as it is or with a change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    say("run 1: as it is")
    code = _run("", folder, command, steps, until)
    report = _report("", folder, code)
    if report is None:
        return 1
    trials = candidates(report)
    if not trials:
        say(f"{report.verdict}\n\nThere is nothing to try: no change is suggested.")
        return 0
    done, failed = {"": report}, 0
    for i, trial in enumerate(trials, start=2):
        if code == _INTERRUPTED or time.monotonic() > until:
            break
        say(f"run {i} of {len(trials) + 1}: {label_of_trial(trial)}")
        code = _run(trial, folder, command, steps, until)
        tried = _report(trial, folder, code)
        failed += tried is None
        if tried is not None:
            done[trial] = tried
    _conclude(done, folder, missing=len(trials) + 1 - len(done) - failed)
    return 1 if failed else 0


def candidates(report: Report) -> list[str]:
    """Return what to try, as options of `gradrein watch`: what was advised."""
    return [action.try_with for action in report.advice.actions if action.try_with not in ("", TRY)][:_MOST]


def label_of_trial(options: str) -> str:
    """Return options in words: "--clip auto --lr-scale 0.5" is "clip auto, learning rate x 0.5"."""
    words = options.replace(" --", ", --").replace("--clip", "clip").replace("--lr-scale", "learning rate x")
    return words or "as it is"


def record_of_trial(options: str, folder: Path) -> Path:
    """Return where the run with these options is recorded."""
    return folder / f"{options.replace('--', '').replace(' ', '-') or 'as-it-is'}.jsonl"


def _run(trial: str, folder: Path, command: list[str], steps: int | None, until: float) -> int:
    """Run the script with options. Return its exit code; 0 where the time is up, `_INTERRUPTED` after an interrupt."""
    record = record_of_trial(trial, folder)
    options = [*trial.split(), "--record", str(record), "--seed", "0"]
    if steps is not None:
        options += ["--steps", str(steps)]
    record.unlink(missing_ok=True)
    with record.with_suffix(".log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradrein", "watch", *options, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # an interrupt is ours to pass on
        )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(until - time.monotonic())
        return process.poll() or 0
    except KeyboardInterrupt:
        say("interrupted: what was recorded is kept.")
        return _INTERRUPTED
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run that still goes on, as Ctrl-C would; end it where that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    if process.poll() is None:
        process.kill()
        process.wait()


def _report(trial: str, folder: Path, code: int) -> Report | None:
    """Return the report on a run; None, and say why, where the script failed or no step was recorded."""
    record, label = record_of_trial(trial, folder), label_of_trial(trial)
    log = record.with_suffix(".log")
    try:
        report = read_report(record)
    except ValueError:
        report = None
    steps = sum(report.run.n_steps) if report is not None else 0
    if code not in (0, _INTERRUPTED):
        say(f"{label}: the script failed after {steps} steps: {_error(log) or f'exit code {code}'} (see {log})")
        return None
    if report is None or not steps:
        tail = log.read_text(errors="replace").splitlines()[-8:]
        say("\n".join([f"{label}: no step was recorded. The end of {log}:", *tail]))
        return None
    return report


def _error(log: Path) -> str:
    """Return the line of the last traceback that names the error."""
    _, traceback, text = log.read_text(errors="replace").rpartition("Traceback (most recent call last):")
    lines = text.splitlines() if traceback else []
    return next((line for line in lines if line and not line.startswith((" ", "\t"))), "")


def _conclude(done: dict[str, Report], folder: Path, missing: int) -> None:
    steps = min(report.run.steps[-1] for report in done.values()) + 1
    runs = [(label_of_trial(trial), report.run) for trial, report in done.items()]
    say("\n" + comparison(runs, steps))
    before = done[""]
    if before.run.n_optimizers > 1 and judged_at(before.run, steps)[0] == "training loss":
        say(
            f"This is the loss of {label_of(before.run)}. Where optimizers work against each other, as in a GAN, lower "
            "need not be better: judge by what is generated."
        )
    if missing:
        say(f"{missing} of the runs did not fit into the time limit.")
    best = min(done, key=lambda trial: end_at(done[trial].run, steps))
    page = folder / "try.html"
    change = next((action for action in before.advice.actions if best and action.try_with == best), _NO_CHANGE)
    measured = replace(change, why=which_to_keep(runs, steps))
    advice = replace(before.advice, because="Measured by `gradrein watch --try`.", actions=[measured])
    write_page(page, [replace(before, advice=advice), *([done[best]] if best else [])], runs)
    if change.lines:
        say("\n".join([f"To keep it, {change.where}", *(f"    {line}" for line in change.lines)]))
    say(f"The curves: {page}")


def judged_at(run: Run, steps: int) -> tuple[str, list[float]]:
    """Return the name and the levels of the loss that runs are compared by, in their first steps."""
    *others, trained = losses_of(run)
    loss = next((one for one in others if len(one) >= 2), trained)
    return loss.name, levels_of(loss, steps)


def end_at(run: Run, steps: int) -> float:
    """Return the mean of the last tenth of that loss; infinity where the run was lost."""
    _, levels = judged_at(run, steps)
    return math.inf if not levels or (run.loss and not finite(run.loss[-5:])) else end_of(levels)


def comparison(runs: list[tuple[str, Run]], steps: int) -> str:
    """Return the table of labelled runs, and which change to keep."""
    width = max(len(label) for label, _ in runs) + 2
    lines = [f"{'':{width}}{'end':>10}{'lowest':>10}   {judged_at(runs[0][1], steps)[0]}, {steps} steps"]
    for label, run in runs:
        _, levels = judged_at(run, steps)
        cells = f"{end_at(run, steps):10.4g}{min(levels, default=math.nan):10.4g}"
        lines.append(f"{label:{width}}{cells}   {sparkline(levels)}")
    return "\n".join([*lines, which_to_keep(runs, steps)])


def which_to_keep(runs: list[tuple[str, Run]], steps: int) -> str:
    """Say which change to keep and by how much it is better, and warn where its training loss rises."""
    label, run = min(runs, key=lambda one: end_at(one[1], steps))
    before, after = end_at(runs[0][1], steps), end_at(run, steps)
    if not after < before:
        return "Keep the script as it is: none of the changes is better."
    much = f", {before / after:.2g} times lower" if 0 < after < before < math.inf else ""
    text = f"Keep: {label}. The {judged_at(run, steps)[0]} ends at {after:.4g} instead of {before:.4g}{much}."
    training = means(levels_of(losses_of(run)[-1], steps), 5)
    if training and 0 < _RISES * min(training) < training[-1]:
        rise = training[-1] / min(training)
        text += f" But its training loss rises: its last fifth is {rise:.2g} times its lowest."
    if still_falls(judged_loss(run)):
        text += " It still falls at the end: train longer, or try a higher learning rate with it."
    return text
