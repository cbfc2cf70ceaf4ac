"""`gradrein watch --try`: run a script as it is and with the changes that its report suggests, and say which to keep.

Each run is a process of its own, with the same seed. One interrupt ends the current run and reports on what is there.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..analysis.compare import Outcome, outcome
from ..analysis.sites import label_of
from ..report.html import write_page
from ..report.report import Report, read_report

_PAUSE = 0.2
_GRACE = 10.0  # seconds for a run to end after it was interrupted
_MOST = 4  # candidates
_RISES = 1.2  # a training loss that ends so many times above its lowest has risen
_INTERRUPTED = -1000  # which no process returns


@dataclass(frozen=True)
class Trial:
    """One run: what to call it, and the options of `gradrein watch` that make it."""

    label: str
    options: list[str]
    record: Path


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
    first = Trial("as it is", [], folder / "as-it-is.jsonl")
    code = _run(first, command, steps, until, "1")
    report = _report(first, code)
    if report is None:
        return 1
    trials = candidates(report, folder)
    if not trials:
        _say(f"{report.verdict}\n\nThere is nothing to try: no change is suggested.")
        return 0
    done, failed = [(first, report)], 0
    for i, trial in enumerate(trials, start=2):
        if code == _INTERRUPTED or time.monotonic() > until:
            break
        code = _run(trial, command, steps, until, f"{i} of {len(trials) + 1}")
        tried = _report(trial, code)
        failed += tried is None
        if tried is not None:
            done.append((trial, tried))
    _conclude(done, folder, missing=len(trials) + 1 - len(done) - failed)
    return 1 if failed else 0


def candidates(report: Report, folder: Path) -> list[Trial]:
    """Return what to try: what was advised."""
    advice = report.advice
    options = [action.try_with for action in advice.actions if action.try_with]
    return [
        Trial(_label(o), o.split(), folder / f"{o.replace('--', '').replace(' ', '-')}.jsonl") for o in options[:_MOST]
    ]


def _label(options: str) -> str:
    """Return options in words: "--clip auto --lr-scale 0.5" is "clip auto, learning rate x 0.5"."""
    return options.replace(" --", ", --").replace("--clip", "clip").replace("--lr-scale", "learning rate x")


def _run(trial: Trial, command: list[str], steps: int | None, until: float, place: str) -> int:
    """Run one trial. Return its exit code; 0 where the time is up, `_INTERRUPTED` after an interrupt."""
    options = [*trial.options, "--record", str(trial.record), "--seed", "0"]
    if steps is not None:
        options += ["--steps", str(steps)]
    trial.record.unlink(missing_ok=True)
    log = trial.record.with_suffix(".log")
    _say(f"run {place}: {trial.label}", end="" if sys.stderr.isatty() else "\n")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradrein", "watch", *options, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # an interrupt is ours to pass on
        )
    try:
        _attend(process, trial, until, place)
        return process.poll() or 0
    except KeyboardInterrupt:
        _say("\ninterrupted: what was recorded is kept.")
        return _INTERRUPTED
    finally:
        _end(process)
        if sys.stderr.isatty():
            _say("")


def _attend(process: subprocess.Popen[bytes], trial: Trial, until: float, place: str) -> None:
    began = time.monotonic()
    while process.poll() is None and time.monotonic() < until:
        time.sleep(_PAUSE)
        if sys.stderr.isatty():
            spent = time.monotonic() - began
            _say(f"\r\x1b[2Krun {place}: {trial.label}, step {_last_step(trial.record)}, {spent:.0f} s", end="")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run that still goes on, as Ctrl-C would; end it where that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    if process.poll() is None:
        process.kill()
        process.wait()


def _last_step(record: Path) -> int:
    try:
        with record.open("rb") as file:
            file.seek(max(0, record.stat().st_size - 20_000))
            lines = file.read().split(b"\n")
        return next(int(json.loads(line)["step"]) for line in reversed(lines[:-1]) if line.startswith(b'{"step"'))
    except (OSError, ValueError, KeyError, StopIteration):
        return 0


def _report(trial: Trial, code: int) -> Report | None:
    """Return the report on a run; None, and say why, where the script failed or no step was recorded."""
    log = trial.record.with_suffix(".log")
    try:
        report = read_report(trial.record)
    except ValueError:
        report = None
    steps = sum(report.run.n_steps) if report is not None else 0
    if code not in (0, _INTERRUPTED):
        _say(f"{trial.label}: the script failed after {steps} steps: {_error(log) or f'exit code {code}'} (see {log})")
        return None
    if report is None or not steps:
        tail = log.read_text(errors="replace").splitlines()[-8:]
        _say("\n".join([f"{trial.label}: no step was recorded. The end of {log}:", *tail]))
        return None
    return report


def _error(log: Path) -> str:
    """Return the line of the last traceback that names the error."""
    _, traceback, text = log.read_text(errors="replace").rpartition("Traceback (most recent call last):")
    lines = text.splitlines() if traceback else []
    return next((line for line in lines if line and not line.startswith((" ", "\t"))), "")


def _conclude(done: list[tuple[Trial, Report]], folder: Path, missing: int) -> None:
    steps = min(report.run.steps[-1] for _, report in done) + 1
    outcomes = [(trial.label, outcome(report.run, report.findings, steps)) for trial, report in done]
    _say("\n" + comparison(outcomes, steps))
    first = done[0][1].run
    if first.n_optimizers > 1 and outcomes[0][1].name == "training loss":
        _say(
            f"This is the loss of {label_of(first)}. Where optimizers work against each other, as in a GAN, lower need "
            "not be better: judge by what is generated."
        )
    if missing:
        _say(f"{missing} of the runs did not fit into the time limit.")
    best = min(range(len(done)), key=lambda i: outcomes[i][1].order)
    page = folder / "try.html"
    shown = [done[0][1], done[best][1]] if best else [done[0][1]]
    write_page(page, shown, [(trial.label, report.run) for trial, report in done], which_to_keep(outcomes))
    change = next((a for a in done[0][1].advice.actions if best and a.try_with.split() == done[best][0].options), None)
    if change is not None and change.lines:
        _say("\n".join([f"To keep it, {change.where}", *(f"    {line}" for line in change.lines)]))
    _say(f"The curves: {page}")


def comparison(outcomes: list[tuple[str, Outcome]], steps: int) -> str:
    """Return the table, and which change to keep."""
    width = max(len(label) for label, _ in outcomes) + 2
    title = f"{outcomes[0][1].name}, {steps} steps"
    lines = [f"{'':{width}}{'final':>10}{'lowest':>10}{'over lowest':>13}{'swings':>8}   {title}"]
    for label, one in outcomes:
        cells = f"{one.final:10.4g}{one.lowest:10.4g}{one.over:13.3g}{'yes' if one.swings else 'no':>8}"
        lines.append(f"{label:{width}}{cells}   {one.sparkline}")
    lines.append('"over lowest": how many times its lowest so far the loss is, on average; 1 if it only falls.')
    return "\n".join([*lines, which_to_keep(outcomes)])


def which_to_keep(outcomes: list[tuple[str, Outcome]]) -> str:
    """Say which change to keep and by how much it is better, and warn where its training loss rises."""
    (_, before), rest = outcomes[0], outcomes[1:]
    better = sorted((o for o in rest if o[1].order < before.order), key=lambda o: o[1].order)
    if not better:
        return "Keep the script as it is: none of the changes is better."
    label, after = better[0]
    much = f"{before.final / after.final:.2g} times lower" if 0 < after.final < before.final < math.inf else ""
    ends = f"{after.final:.4g} instead of {before.final:.4g}" + (f", {much}" if much else "")
    swings = "still swings" if after.swings else "no longer swings" if before.swings else "does not swing"
    text = f"Keep: {label}. The {after.name} ends at {ends}, and {swings}."
    if after.training_rise > _RISES:
        text += f" But its training loss rises: it ends {after.training_rise:.2g} times above its lowest."
    return text


def _say(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, end=end, flush=True)
