"""A pytest plugin: run the tests that are asked for, and write down how each one ends, as it ends."""

import json
import os
from pathlib import Path

import pytest

_JOURNAL = Path(os.environ["TORCH_SUITE_JOURNAL"])
_ONLY = os.environ.get("TORCH_SUITE_ONLY")


def _write(test: str, outcome: str, why: str = "") -> None:
    with _JOURNAL.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


def pytest_configure():
    """Stop at once where the functions under test are not those that were asked for."""
    import replacements  # only now: what it replaces must be imported after sitecustomize, not before

    wanted = os.environ["TORCH_SUITE_RUNS"] == "gradrein"
    if replacements.installed() != wanted:
        pytest.exit(f"gradrein's functions in torch's place: wanted {wanted}, found {not wanted}", returncode=3)


def pytest_collection_modifyitems(config, items):
    """Leave out what has run already, what another file is asked for, and other devices than the CPU."""
    done = {json.loads(line)["test"] for line in _JOURNAL.read_text().splitlines()}
    only = set(Path(_ONLY).read_text().splitlines()) if _ONLY else None
    kept = [
        item
        for item in items
        if item.nodeid not in done and (only is None or item.nodeid in only) and not _is_elsewhere(item)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_elsewhere(item: pytest.Item) -> bool:
    """Tell whether this is a copy of a test that belongs to another file, or needs another device."""
    imported = item.cls is not None and item.cls.__module__ not in (item.module.__name__, "builtins")
    return imported or any(device in item.nodeid.lower() for device in ("cuda", "_mps", "_xpu", "_hpu"))


def pytest_runtest_logstart(nodeid):
    """Note what is running, so that a crash or a hang has a name."""
    _write(nodeid, "running")


def pytest_runtest_logreport(report):
    """Note how it ended."""
    if report.when == "call" or not report.passed:
        _write(report.nodeid, report.outcome, "" if report.passed else _why(report.longrepr))


def _why(told) -> str:
    crash = getattr(told, "reprcrash", None)
    lines = [line for line in (str(told) if crash is None else crash.message).splitlines() if line.strip()]
    return "\n  ".join(lines if len(lines) <= 6 else [*lines[:2], "...", *lines[-3:]])
