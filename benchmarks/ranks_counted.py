"""Collectives of a clipping call and the bytes they leave a rank with, counted for up to 16,384 ranks.

    python benchmarks/ranks_counted.py    # three minutes

Nothing is timed: one process believes to be a rank of many (torch's `fake` process group; tests/ranks/counting.py), and
what it hands to the collectives is counted. 800 parameters, each sharded over the mesh.
"""

from __future__ import annotations

import pathlib
import sys

from side_by_side import save

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "ranks"))
import counting

CALLS = {"torch.nn.utils.clip_grad_norm_": "torch", "clip_grad_norm_": "gradrein"}
WORLDS, PARAMETERS = (64, 1024, 16384), 800


def main():
    rows = []
    for layout in counting.LAYOUTS:
        for ranks in WORLDS:
            found = counting.in_fake_world(ranks, counting.count_calls, layout, PARAMETERS, list(CALLS))
            for call, of in CALLS.items():
                kinds, size = found[call]
                rows.append({"layout": layout, "ranks": ranks, "call": of, "collectives": len(kinds), "bytes": size})
    save("ranks-counted", __doc__, rows)


if __name__ == "__main__":
    main()
