"""Run the checks and timings, print them, and write one file."""

import json
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import ArgumentError
from . import _speed
from ._checks import CHECKS, gradients


def main(device: str | None, output: str | None) -> int:
    """Run the command; a device that is not there is an error of the command line."""
    try:
        return run(device, output)
    except ArgumentError as error:
        print(f"gradrein: {error}", file=sys.stderr)
        return 2


def run(device: str | None = None, output: str | None = None) -> int:
    """Check and time gradrein on a device. Return 0 if everything that was checked is right, else 1.

    Args:
        device: `"cuda"`, `"cuda:1"`, `"mps"`, `"cpu"`; by default an accelerator, if there is one.
        output: The file to write; by default `gradrein-selftest-DEVICE.json` here.
    """
    where = _device(device)
    result: dict[str, Any] = {"environment": environment(where), "checks": {}, "host_reads": {}, "speed": {}}
    print(" · ".join(f"{key} {value}" for key, value in result["environment"].items()))
    failed = 0
    for name, check in CHECKS.items():
        result["checks"][name] = error = _outcome(lambda check=check: check(where))
        failed += error != "right"
        print(f"  {'right ' if error == 'right' else 'WRONG '} {name}{'' if error == 'right' else f': {error}'}")
    for name, error in _host_reads(where).items():
        result["host_reads"][name] = error
        print(f"  {error:6} {name}")
    for name, contenders in (*_speed.clipping(where), *_speed.per_sample(where)):
        result["speed"][name] = times = _timed(contenders, where)
        print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in times.items()))
    path = Path(output or f"gradrein-selftest-{where.type}.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("Times are quartiles: of the first in milliseconds, of the others over the first.")
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks are right. The file to attach: {path}")
    return 1 if failed else 0


def _device(name: str | None) -> torch.device:
    if name is None:
        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"--device {name}: torch cannot use it here: {str(error).splitlines()[0]}") from error
    return device


def environment(device: torch.device) -> dict[str, str]:
    """Return what the results hold for."""
    known = {"gradrein": __version__, "torch": torch.__version__, "python": platform.python_version()}
    known |= {"system": f"{platform.system()} {platform.machine()}", "device": str(device)}
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        known |= {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        known["cuda"] = str(torch.version.cuda or torch.version.hip)
    return known


def _outcome(check: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except Exception as error:
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if "gradrein" in frame.filename]
        line = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}{line}"
    return "right"


def _host_reads(device: torch.device) -> dict[str, str]:
    """Return which calls waited for the device, as torch's own debug mode of CUDA sees it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return {}
    import gradrein

    parameters = gradients(device)
    calls: dict[str, Callable[[], object]] = {
        "clip_grad_norm_": lambda: gradrein.clip_grad_norm_(parameters, 1.0),
        "clip_, skip": lambda: gradrein.clip_(parameters, gradrein.by_norm(1.0), nonfinite="skip"),
    }
    outcomes = {}
    for name, call in calls.items():
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes[name] = "waits" if _outcome(call) != "right" else "never"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return outcomes


def _timed(contenders: dict[str, Any], device: torch.device) -> dict[str, Any]:
    able = {name: run for name, run in contenders.items() if _outcome(run) == "right"}
    started = time.perf_counter()
    times: dict[str, Any] = dict(_speed.take_turns(able, device))
    times |= {name: "cannot" for name in contenders if name not in able}
    return {**times, "seconds": round(time.perf_counter() - started, 1)}
