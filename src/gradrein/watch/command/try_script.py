"""`gradrein watch --try`: run a script as it is and with the best candidates, and say which held.

Each run is a process of its own, with the same seed. One interrupt ends the current run and reports on what is there.
"""

import contextlib
import json
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
_MOST = 3  # candidates


@dataclass(frozen=True)
class Trial:
    """One run: what to call it, and the options of `gradrein watch` that make it."""

    label: str
    options: list[str]
    record: Path


@dataclass(frozen=True)
class Limits:
    """When to stop: after so many steps of each run (None: at its own end), and so many seconds of all together."""

    steps: int | None
    seconds: float


def try_script(command: list[str], folder: Path, limits: Limits) -> int:
    """Run the trials, print the comparison, write the page. Return an exit code.

    Args:
        command: The script and its arguments, as after `gradrein watch`.
        folder: Where records and the page go.
        limits: When to stop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + limits.seconds
    first = Trial("as it is", [], folder / "as-it-is.jsonl")
    complete = _run(first, command, limits, until, "1")
    report = _report(first)
    if report is None:
        return 1
    trials = candidates(report, folder)
    if not trials:
        _say(f"{report.verdict}\n\nThere is nothing to try: no change is suggested.")
        return 0
    done = [(first, report)]
    for i, trial in enumerate(trials, start=2):
        if not complete or time.monotonic() > until:
            break
        complete = _run(trial, command, limits, until, f"{i} of {len(trials) + 1}")
        if (found := _report(trial)) is not None:
            done.append((trial, found))
    _conclude(done, folder, missing=len(trials) + 1 - len(done))
    return 0


def candidates(report: Report, folder: Path) -> list[Trial]:
    """Return what to try: what was advised, and a smaller learning rate beside it."""
    advice = report.advice
    options = [action.try_with for action in advice.actions if action.try_with]
    return [Trial(_label(o), o.split(), folder / f"{'-'.join(_words(o))}.jsonl") for o in options[:_MOST]]


def _label(options: str) -> str:
    words = {"clip": "clip", "lr-scale": "learning rate x"}
    return " ".join(words.get(word, word) for word in _words(options))


def _words(options: str) -> list[str]:
    return [word.removeprefix("--") for word in options.split()]


def _run(trial: Trial, command: list[str], limits: Limits, until: float, place: str) -> bool:
    """Run one trial. Return whether to go on: not after an interrupt."""
    options = [*trial.options, "--record", str(trial.record), "--seed", "0"]
    if limits.steps is not None:
        options += ["--steps", str(limits.steps)]
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
        return True
    except KeyboardInterrupt:
        _say("\ninterrupted: what was recorded is kept.")
        return False
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


def _report(trial: Trial) -> Report | None:
    log = trial.record.with_suffix(".log")
    try:
        report = read_report(trial.record)
    except ValueError:
        report = None
    if report is None or not report.run.steps:
        tail = log.read_text(errors="replace").splitlines()[-8:]
        _say("\n".join([f"{trial.label}: no step was recorded. The end of {log}:", *tail]))
        return None
    return report


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
    write_page(page, shown, [(trial.label, report.run) for trial, report in done], which_held(outcomes))
    if best:
        change = next((a for a in done[0][1].advice.actions if a.try_with.split() == done[best][0].options), None)
        if change is not None and change.paste is not None:
            lines = "\n".join(f"  | {line}" for line in change.paste.lines)
            _say(f"To keep it: {change.paste.place}\n{lines}")
    _say(f"The curves: {page}")


def comparison(outcomes: list[tuple[str, Outcome]], steps: int) -> str:
    """Return the table, and the sentence about which held."""
    lines = [
        f"{'':24}{'final':>10}{'lowest':>10}{'above lowest':>14}{'swings':>8}   {outcomes[0][1].name}, {steps} steps"
    ]
    for label, found in outcomes:
        cells = f"{found.final:10.4g}{found.lowest:10.4g}{found.above:14.3f}"
        lines.append(f"{label:24}{cells}{'yes' if found.swings else 'no':>8}   {found.sparkline}")
    lines.append('"above lowest" is the mean of log10(loss / lowest loss so far): 0 for a curve that only falls.')
    return "\n".join([*lines, which_held(outcomes)])


def which_held(outcomes: list[tuple[str, Outcome]]) -> str:
    """Return the sentence about which run no longer swings and ends lower than the first."""
    (_, before), rest = outcomes[0], outcomes[1:]
    held = sorted((o for o in rest if not o[1].swings and o[1].final < before.final), key=lambda o: o[1].order)
    calmer = sorted((o for o in rest if o[1].order < before.order), key=lambda o: o[1].order)
    if held:
        return f"Held: {', '.join(label for label, _ in held)}. Best: {held[0][0]}."
    if calmer:
        return f"None held it altogether; {calmer[0][0]} came closest."
    return "None of them is better than the run as it is."


def _say(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, end=end, flush=True)
