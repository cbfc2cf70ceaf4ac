"""Run torch's own tests, with torch and then with gradrein in its place, and show where the two differ.

    python tools/torch_suite TORCH_SRC [--files PART] [--out FOLDER]

TORCH_SRC is a checkout of torch, of the version that is installed or near it. A test counts if it passes with
torch alone. The exit status is 0 if every difference is a known one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from known import KNOWN

HERE = Path(__file__).parent
TIME_LIMIT = 300.0  # seconds for one test

# File of torch's test folder, and which of its tests are about something that gradrein replaces.
SUITE = {
    "test_autograd.py": "",
    "autograd/test_complex.py": "",
    "autograd/test_functional.py": "",
    "autograd/test_logging.py": "",
    "autograd/test_node_lifecycle.py": "",
    "nn/test_module_hooks.py": "",
    "test_nn.py": "clip_grad or total_norm",
    "test_torch.py": "grad_scal or gradscaler or grad_scale",
    "test_expanded_weights.py": "",
    "distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_.py": "",
}


def main() -> int:
    """Compare every file of the suite and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of torch's sources")
    parser.add_argument("--files", default="", help="run only the files whose name contains this")
    parser.add_argument("--out", type=Path, default=None, help="keep the journals of the runs here")
    asked = parser.parse_args()
    out = asked.out or Path(tempfile.mkdtemp(prefix="torch_suite_"))
    out.mkdir(parents=True, exist_ok=True)
    rows, differences = [], {}
    for file, keywords in SUITE.items():
        if asked.files in file and (asked.source / "test" / file).exists():
            row, found = compare(asked.source / "test", file, keywords, out)
            print(row, flush=True)
            rows.append(row)
            differences |= found
    print(as_table(rows))
    for test, why in sorted(differences.items()):
        print(f"\n{test}\n  " + (f"known: {KNOWN[test]}" if test in KNOWN else why))
    return 0 if rows and differences.keys() <= KNOWN.keys() else 1


def compare(tests: Path, file: str, keywords: str, out: Path) -> tuple[tuple[str, int, int, int], dict[str, str]]:
    """Run one file with torch, then what passed with gradrein; what differs is run again, with both."""
    slug = file.replace("/", "_").removesuffix(".py")
    plain = run(tests, file, keywords, "torch", out / f"{slug}.torch.jsonl")
    passed = {test for test, (outcome, _) in plain.items() if outcome == "passed"}
    ours = run(tests, file, keywords, "gradrein", out / f"{slug}.gradrein.jsonl", passed)
    suspects = {test for test in passed if ours.get(test, ("lost", ""))[0] != "passed"}
    if suspects:
        again = run(tests, file, keywords, "torch", out / f"{slug}.torch-again.jsonl", suspects)
        steady = {test for test, (outcome, _) in again.items() if outcome == "passed"}
        passed -= suspects - steady
        ours |= run(tests, file, keywords, "gradrein", out / f"{slug}.gradrein-again.jsonl", steady)
    differences = {test: ours.get(test, ("lost", ""))[1] for test in passed if ours.get(test, ("lost",))[0] != "passed"}
    return (file, len(plain), len(passed), len(passed) - len(differences)), differences


def run(
    tests: Path, file: str, keywords: str, runs: str, journal: Path, only: set[str] | None = None
) -> dict[str, tuple[str, str]]:
    """Run a file to its end, in as many processes as it takes: a crash or a hang costs one test, not the rest."""
    journal.write_text("")
    if only is not None and not only:
        return {}
    environment = _environment(tests, runs, journal, only)
    command = [sys.executable, "-m", "pytest", file, "-c", os.devnull, "--rootdir", str(tests), "--noconftest", "-q"]
    command += ["--continue-on-collection-errors", "-p", "journal"]
    # Tests look at warnings and at log handlers themselves, and pytest must not stand in between.
    command += [part for plugin in ("cacheprovider", "warnings", "logging") for part in ("-p", f"no:{plugin}")]
    command += ["-k", keywords] if keywords else []
    while True:
        with (journal.with_suffix(".log")).open("w") as log:
            process = subprocess.Popen(command, cwd=tests, env=environment, stdout=log, stderr=subprocess.STDOUT)
            killed = _wait(process, journal)
        outcomes = _read(journal)
        if not outcomes:
            sys.exit(f"{file} did not run with {runs}:\n{journal.with_suffix('.log').read_text()[-2000:]}")
        stuck = [test for test, (outcome, _) in outcomes.items() if outcome == "running"]
        if not stuck:
            return outcomes
        why = f"no end after {TIME_LIMIT:g} s" if killed else f"the process ended with {process.returncode}"
        with journal.open("a") as lines:
            lines.writelines(json.dumps({"test": test, "outcome": "died", "why": why}) + "\n" for test in stuck)


def _environment(tests: Path, runs: str, journal: Path, only: set[str] | None) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SUITE_RUNS": runs, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    environment["TORCH_SUITE_JOURNAL"] = str(journal.resolve())
    if "distributed" in journal.name:
        environment["TORCH_SUITE_RANKS"] = "4"
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(tests), os.environ.get("PYTHONPATH", "")])
    if only is not None:
        chosen = journal.with_suffix(".only")
        chosen.write_text("\n".join(sorted(only)))
        environment["TORCH_SUITE_ONLY"] = str(chosen.resolve())
    return environment


def _wait(process: subprocess.Popen[bytes], journal: Path) -> bool:
    """Wait for the end; kill it and return True if nothing has been written for longer than a test may take."""
    started = time.time()
    while process.poll() is None:
        time.sleep(0.2)
        if time.time() - max(started, journal.stat().st_mtime) > TIME_LIMIT:
            process.kill()
            process.wait()
            return True
    return False


def _read(journal: Path) -> dict[str, tuple[str, str]]:
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    outcomes: dict[str, tuple[str, str]] = {}
    for line in lines:
        # A test that failed and then failed to tear down as well stays failed.
        if outcomes.get(line["test"], ("running", ""))[0] in ("running", "passed"):
            outcomes[line["test"]] = (line["outcome"], line["why"])
    return outcomes


def as_table(rows: list[tuple[str, int, int, int]]) -> str:
    """Return the rows as a table in markdown, with their sum."""
    total = ("all", *(sum(row[column] for row in rows) for column in (1, 2, 3)))
    lines = [
        "| torch's file | run | pass with torch | pass with gradrein | differ |",
        "| --- | --: | --: | --: | --: |",
    ]
    lines += [f"| {name} | {n} | {plain} | {ours} | {plain - ours} |" for name, n, plain, ours in [*rows, total]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
