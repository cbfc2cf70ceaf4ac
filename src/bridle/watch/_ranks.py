"""Which of several processes this is, and how the records of one run find each other: by their names.

Nothing here talks to another process. torchrun says in the environment who is who; each rank writes a file of its
own, `run.rank0.jsonl` for rank 0, and whoever wants them all looks for the others beside it.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError

__all__ = ["Place", "family", "free_name", "header_of", "joined_name", "one_for_each_run", "place", "rank_file"]

# What the ranks of one launch have in common, and two launches have not (torchrun makes an id for each).
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """One process among several.

    Attributes:
        rank: its number.
        world: how many there are.
        launch: the same word on all of them.
    """

    rank: int
    world: int
    launch: str

    def header(self) -> dict[str, Any]:
        """What the first line of its record says about it."""
        process = [socket.gethostname(), os.getpid()]
        return {"rank": self.rank, "world": self.world, "launch": self.launch, "process": process}


def place() -> Place | None:
    """Where this process stands, as its process group or torchrun says; None in a run of one process."""
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
    return Place(rank, world, " ".join(os.environ.get(key, "-") for key in _LAUNCH)) if world > 1 else None


def rank_file(path: Path, rank: int) -> Path:
    """The file of a rank: `run.jsonl` is `run.rank0.jsonl` on rank 0."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def joined_name(path: Path) -> Path:
    """What a rank's file was named after: the inverse of `rank_file`, and of other files the name itself."""
    return path.with_name(re.sub(r"\.rank\d+(\.[^.]*)?$", r"\1", path.name))


def family(path: Path) -> dict[int, Path]:
    """The files beside this one that ranks have named after the same one, by rank."""
    named = joined_name(path)
    shape = re.compile(re.escape(named.stem) + r"\.rank(\d+)" + re.escape(named.suffix))
    folder = named.parent.iterdir() if named.parent.is_dir() else ()
    found = {int(match[1]): file for file in folder if (match := shape.fullmatch(file.name))}
    return dict(sorted(found.items()))


def header_of(path: Path) -> dict[str, Any]:
    """The first line of a record; nothing where there is none yet."""
    try:
        with path.open() as file:
            line = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return line if isinstance(line, dict) else {}


def free_name(script: str, here: Place | None) -> Path:
    """A name for the record that is not taken; ranks of one launch, each for itself, find the same."""
    stem = Path(script).stem if script.endswith(".py") else script
    names = (Path(f"{stem}{'' if i == 1 else f'-{i}'}.bridle.jsonl") for i in range(1, 100_000))
    return next(name for name in names if not name.exists() and _is_free(name, here))


def _is_free(name: Path, here: Place | None) -> bool:
    taken = family(name)
    if here is None:
        return not taken
    ours = (header_of(file).get("launch", here.launch) == here.launch for file in taken.values())
    return here.rank not in taken and all(ours)


def one_for_each_run(paths: list[str]) -> list[Path]:
    """The records to read among files and folders: of the files of several ranks one, since it leads to the others.

    Raises:
        ArgumentError: more than two runs, or a folder that does not hold exactly one.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        file = _only_run(path) if path.is_dir() else path
        if joined_name(file) == file or joined_name(file) not in map(joined_name, found):
            found.append(file)
    if len(found) > 2:
        names = ", ".join(map(str, found))
        raise ArgumentError(f"a report is about one run or two, before and after; found {len(found)}: {names}.")
    return found


def _only_run(folder: Path) -> Path:
    inside = {joined_name(file): file for file in sorted(folder.glob("*.jsonl"), reverse=True)}
    if len(inside) != 1:
        names = ", ".join(sorted(file.name for file in inside.values())) or "no .jsonl file"
        raise ArgumentError(f"{folder} is a folder with {names} in it. Name the record of one run.")
    return next(iter(inside.values()))
