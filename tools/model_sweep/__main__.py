"""Per-sample gradients of small, untrained Transformers models, compared with one backward per sample.

    python tools/model_sweep --out build/models.jsonl        # every model type, some minutes
    python tools/model_sweep --types gpt2,bert

Each model type of the installed transformers is built from its own configuration with sizes cut down. Two batches are
split, so that what was proved on the first is used on the second. A line of the result says what came out:
right, refused (with the error), wrong, crashed, or not built (transformers did not make or run the small model).
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import warnings
from pathlib import Path

import torch
from cases import Case, cases
from transformers import logging

import gradrein
from gradrein.errors import GradreinError

TOLERANCE = 1e-4  # several models compute norms or attention in float32 even when they are float64


class EmptyCaseError(Exception):
    """The small model has no gradients to compare."""


def loop_over_samples(losses: torch.Tensor, parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The slow, obviously right way."""
    return [
        [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(
                parameters,
                torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True),
                strict=True,
            )
        ]
        for loss in losses
    ]


def error_of(case: Case, batch: int) -> float:
    """Largest error of a parameter's gradients, relative to the largest of them (or a millionth of a sample's norm)."""
    losses = case.losses(batch)
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    try:
        expected = loop_over_samples(losses, list(named.values()))
    except Exception as error:
        raise EmptyCaseError(f"one backward per sample fails: {type(error).__name__}: {error}"[:200]) from error
    scale = max(float(torch.stack([g.norm() for g in sample]).norm()) for sample in expected)
    if not 0 < scale < math.inf:
        raise EmptyCaseError(f"the largest norm of a sample is {scale}: nothing to compare")
    got = gradrein.per_sample(losses, case.model, retain_graph=True).grads()
    worst = 0.0
    for index, name in enumerate(named):
        want = torch.stack([sample[index] for sample in expected])
        have = got[name] if name in got else torch.zeros_like(want)
        if want.numel():
            error = float((have - want).abs().max()) / (float(want.abs().max()) + 1e-6 * scale + 1e-300)
            worst = error if math.isnan(error) else max(worst, error)
            if math.isnan(worst):
                break
    return worst


def judge(case: Case) -> dict[str, object]:
    """Split two batches and say what came out."""
    try:
        worst = max(error_of(case, batch) for batch in (0, 1))
    except EmptyCaseError as error:
        return {"outcome": "not built", "why": str(error)}
    except GradreinError as error:
        return {"outcome": "refused", "why": f"{type(error).__name__}: {error}"[:400]}
    except TimeoutError as error:
        return {"outcome": "too slow", "why": str(error)}
    except Exception as error:
        return {"outcome": "crashed", "why": f"{type(error).__name__}: {error}"[:400]}
    return {"outcome": "right" if worst <= TOLERANCE else "wrong", "error": worst}


def _too_slow(*_: object) -> None:
    raise TimeoutError("more than 90 s")


def main() -> int:
    """Write one line for each case; 1 if any is wrong or crashed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default="", help="comma-separated model types; all without it")
    parser.add_argument("--part", default="0/1", help="i/n: the i-th of n parts, to run in several processes")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_slow)
    part, parts = map(int, arguments.part.split("/"))
    out = arguments.out.open("a") if arguments.out else sys.stdout
    bad = 0
    for case in cases(arguments.types.split(",") if arguments.types else None, part, parts):
        signal.alarm(90)
        line = {"type": case.type, "class": case.name, **(judge(case) if case.model else case.failure)}
        signal.alarm(0)
        bad += line["outcome"] in ("wrong", "crashed")
        print(json.dumps(line), file=out, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
