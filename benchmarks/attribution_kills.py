"""Kill a process that adds to a gradient store, at random moments; what it reported as added must be there.

python benchmarks/attribution_kills.py [kills]      # writes benchmarks/results/attribution-kills.json
"""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import torch

from gradrein.attribution import GradientStore
from side_by_side import save

TESTS = pathlib.Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
BATCH = 16


def killed(path, first, seconds):
    """Return what a writer reported before it was killed, this long after its first report."""
    command = [sys.executable, str(TESTS / "attribution" / "writer.py"), path, str(first), str(BATCH)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    said = [int(child.stdout.readline())]
    time.sleep(seconds)
    child.kill()
    said += [int(line) for line in child.stdout.read().split()]
    child.wait()
    return said


def main(kills):
    from attribution.writer import projected

    generator, rows, first = random.Random(0), [], 0
    with tempfile.TemporaryDirectory() as path:
        reported = set()
        for _ in range(kills):
            said = killed(path, first, generator.uniform(0, 0.2))
            reported |= {start + i for start in said for i in range(BATCH)}
            store = GradientStore(path)
            there = {i: row for ids, block in store.blocks() for i, row in zip(ids.tolist(), block, strict=True)}
            wrong = sum(not torch.equal(row, projected([i])[0]) for i, row in there.items())
            rows.append(
                {"reported": len(reported), "there": len(there), "missing": len(reported - set(there)), "wrong": wrong}
            )
            print(rows[-1])
            first = 1 + max(there)
    save("attribution-kills", __doc__, rows)
    assert not any(row["missing"] or row["wrong"] for row in rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
