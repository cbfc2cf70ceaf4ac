"""Which rank this process is, and how the records of one run find each other: by their names.

Nothing here communicates. torchrun says in the environment which rank a process is; each rank writes a file of its own,
`run.rank0.jsonl` on rank 0, and a reader looks for the others beside it.
"""

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import ArgumentError

# The same on all ranks of one launch, and different between launches (torchrun makes an id for each).
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_OURS = ".gradrein.jsonl"  # of the names we make


@dataclass(frozen=True)
class RankInfo:
    """One process among several, as the first line of its record names it.

    Attributes:
        rank: Its number.
        world: How many there are.
        launch: The same on all of them.
    """

    rank: int
    world: int
    launch: str


def rank_info() -> RankInfo | None:
    """Return the rank of this process, from its process group or torchrun's environment; None in a run of one."""
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
    return RankInfo(rank, world, " ".join(os.environ.get(key, "-") for key in _LAUNCH)) if world > 1 else None


def rank_file(path: Path, rank: int) -> Path:
    """Return the file of a rank: `run.jsonl` is `run.rank0.jsonl` on rank 0."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def run_file(path: Path) -> Path:
    """Return what a rank's file was named after: the inverse of `rank_file`; any other file is returned as it is."""
    return path.with_name(re.sub(r"\.rank\d+(\.[^.]*)?$", r"\1", path.name))


def rank_files(path: Path) -> dict[int, Path]:
    """Return the files of all ranks of the same run beside this one, by rank."""
    named = run_file(path)
    shape = re.compile(re.escape(named.stem) + r"\.rank(\d+)" + re.escape(named.suffix))
    folder = named.parent.iterdir() if named.parent.is_dir() else ()
    files = {int(match[1]): file for file in folder if (match := shape.fullmatch(file.name))}
    return dict(sorted(files.items()))


def header_of(path: Path) -> dict[str, Any]:
    """Return the first line of a record; nothing where there is none yet."""
    try:
        with path.open() as file:
            line = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return line if isinstance(line, dict) else {}


def default_name(script: str) -> Path:
    """Return the record of a script or module, in the current folder: `train.gradrein.jsonl` for `train.py`."""
    stem = Path(script).stem if script.endswith(".py") else Path(script).resolve().name if os.sep in script else script
    return Path(f"{stem.strip('.') or Path.cwd().name}{_OURS}")


def free_name(record: Path, rank: RankInfo | None) -> Path:
    """Return this name, or the first numbered one that is not taken. Ranks of one launch each find the same."""
    end = _OURS if record.name.endswith(_OURS) else record.suffix
    stem = record.name.removesuffix(end)
    names = (record.with_name(f"{stem}{'' if i == 1 else f'-{i}'}{end}") for i in itertools.count(1))
    return next(name for name in names if _is_empty(name) and _is_free(name, rank))


def _is_empty(path: Path) -> bool:
    """Return whether a record can begin there without anything being lost."""
    return not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0)


def _is_free(name: Path, rank: RankInfo | None) -> bool:
    taken = rank_files(name)
    if rank is None:
        return not taken
    ours = (header_of(file).get("launch", rank.launch) == rank.launch for file in taken.values())
    return (rank.rank not in taken or _is_empty(taken[rank.rank])) and all(ours)


def one_file_per_run(paths: list[str]) -> list[Path]:
    """Return the records to read: one of the files of several ranks, which leads to the others.

    Raises:
        ArgumentError: more than two runs.
    """
    files: list[Path] = []
    for file in map(Path, paths):
        if run_file(file) == file or run_file(file) not in map(run_file, files):
            files.append(file)
    if len(files) > 2:
        names = ", ".join(map(str, files))
        raise ArgumentError(f"a report covers one run, or two (before and after); found {len(files)}: {names}.")
    return files
