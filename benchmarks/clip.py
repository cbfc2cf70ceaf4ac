"""Clipping against torch, in one interleaved run.

    python benchmarks/clip.py            every row (a few minutes)
    python benchmarks/clip.py --quick    fewer rounds, fewer rows
    python benchmarks/clip.py --policies only the rows of policies, kept in results of their own

Contenders: `torch.nn.utils` with `foreach=None` and `foreach=False`, and gradrein. Two regimes: the norm is under the
threshold, or twice it (untimed, the gradients are restored before every turn); value clipping likewise, with one
element in twenty over the limit. `limit` is a plain multi-tensor read (under) or read and scale (clipping) of the
same memory by the same C code with nothing else around it: what memory allows at that moment, measured in the same
round.
"""

from __future__ import annotations

import argparse
import math
import time

import torch

import gradrein
from gradrein._kernels import BACKENDS
from side_by_side import interleave, ratio, save, show

METHOD = __doc__ or ""

POLICIES = """What policies that remember every element cost beside `ByMedian`, which needs norms only: small tensors.

In each round every policy clips the same gradients, none of which is over its limit; by processor time, on one thread.
The floor is the time of `ByMedian` and of a copy that moves as many bytes as the policy has to: gradient and what is
remembered, read and written (float32: 12 bytes of each element), and for `ByOvershoot` the parameter too (16). What is
above the floor is arithmetic and Python.
"""


def gpt2() -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 124M."""
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def resnet50() -> list[tuple[int, ...]]:
    """The 161 parameters of ResNet-50."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            for out, into, k in ((width, inside, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, k, k), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, inside, 1, 1), (4 * width,), (4 * width,)]
            inside = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


MODELS = {
    "GPT-2 124M": gpt2(),
    "ResNet-50": resnet50(),
    "MLP, 8 tensors": [(1024, 784), (1024,), (1024, 1024), (1024,), (1024, 1024), (1024,), (10, 1024), (10,)],
    "200 x (256, 256)": [(256, 256)] * 200,
    "1000 x (32, 32)": [(32, 32)] * 1000,
    "20000 x (16, 16)": [(16, 16)] * 20000,
}


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    found = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
        p.grad = torch.randn(shape).to(dtype) * 0.01
        found.append(p)
    return found


def norm_row(ps: list[torch.nn.Parameter], p: float, clipping: bool, rounds: int) -> dict[str, object]:
    grads = [q.grad for q in ps]
    norm = gradrein.get_total_norm(grads, p).item()
    limit = norm / 2 if clipping else norm * 10

    def memory() -> None:
        BACKENDS["cpu"].total_norm(grads, math.inf)
        if clipping:
            BACKENDS["cpu"].scale_(grads, 0.5)

    def restore() -> None:
        """What was halved is doubled again: a power of two leaves no trace in any of the types."""
        if gradrein.get_total_norm(grads, p).item() < 0.75 * norm:
            torch._foreach_mul_(grads, 2.0)

    contenders = {
        "gradrein": lambda: gradrein.clip_grad_norm_(ps, limit, p),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(ps, limit, p),
        "torch foreach=False": lambda: torch.nn.utils.clip_grad_norm_(ps, limit, p, foreach=False),
    }
    if BACKENDS["cpu"] is not None:
        contenders["limit"] = memory
    if clipping:
        return summary(interleave(contenders, rounds=rounds, before=restore, inner=1))
    return summary(interleave(contenders, rounds=rounds))


def value_row(ps: list[torch.nn.Parameter], clipping: bool, rounds: int) -> dict[str, object]:
    grads = [q.grad for q in ps]
    kept = [g.clone() for g in grads]
    limit = 0.02 if clipping else 1.0  # two standard deviations: one element in twenty is over it

    def memory() -> None:
        if clipping:
            BACKENDS["cpu"].scale_(grads, 0.5)
        else:
            BACKENDS["cpu"].total_norm(grads, math.inf)

    contenders = {
        "gradrein": lambda: gradrein.clip_grad_value_(ps, limit),
        "torch": lambda: torch.nn.utils.clip_grad_value_(ps, limit),
        "torch foreach=False": lambda: torch.nn.utils.clip_grad_value_(ps, limit, foreach=False),
    }
    if BACKENDS["cpu"] is not None:
        contenders["limit"] = memory
    if clipping:
        return summary(interleave(contenders, rounds=rounds, before=lambda: torch._foreach_copy_(grads, kept), inner=1))
    return summary(interleave(contenders, rounds=rounds))


def policy_rows(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> list[dict[str, object]]:
    ps = parameters([shape] * 1000, dtype)
    for p in ps:
        torch.nn.init.normal_(p)
    policies = {name: getattr(gradrein.policies, name)() for name in ("ByMedian", "ByOvershoot")}
    for policy in policies.values():
        for _ in range(15):  # longer than any of them warms up
            gradrein.clip_(ps, policy)
    half = sum(p.numel() for p in ps)
    source, target = torch.ones(half), torch.zeros(half)
    contenders = {name: lambda policy=policy: gradrein.clip_(ps, policy) for name, policy in policies.items()}
    contenders["copy"] = lambda: target.copy_(source)  # reads and writes four bytes of an element
    times = interleave(contenders, rounds=rounds, inner=3, clock=time.process_time)
    size = torch.finfo(dtype).bits // 8
    moved = {"ByOvershoot": 2 * size + 8}  # gradient, parameter, what is remembered twice
    found = []
    for name, bytes_each in moved.items():
        least = [m + c * bytes_each / 8 for m, c in zip(times["ByMedian"], times["copy"], strict=True)]
        found.append(
            {
                "policy": name,
                "tensors": f"1000 x {shape}",
                "dtype": str(dtype).removeprefix("torch."),
                "milliseconds": {k: round(1e3 * sorted(times[k])[rounds // 2], 3) for k in (name, "ByMedian", "copy")},
                "time_over_ByMedian": ratio(times[name], times["ByMedian"]),
                "floor_over_ByMedian": ratio(least, times["ByMedian"]),
            }
        )
    return found


def measure_policies(rounds: int) -> None:
    torch.set_num_threads(1)
    rows = []
    for shape in ((64,), (32, 32)):
        for dtype in (torch.float32, torch.bfloat16):
            for row in policy_rows(shape, dtype, rounds):
                rows.append(row)
                print(row, flush=True)
    save("clip-policies", POLICIES, rows)


def summary(times: dict[str, list[float]]) -> dict[str, object]:
    best = min(("torch", "torch foreach=False"), key=lambda name: sorted(times[name])[len(times[name]) // 2])
    found: dict[str, object] = {
        "milliseconds": {name: round(1e3 * sorted(t)[len(t) // 2], 4) for name, t in times.items()},
        "faster_than_torch_best": ratio(times[best], times["gradrein"]),
        "faster_than_torch_default": ratio(times["torch"], times["gradrein"]),
        "torch_best": best,
    }
    if "limit" in times:
        found["time_over_memory_limit"] = ratio(times["gradrein"], times["limit"])
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=METHOD, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--quick", action="store_true")
    ask.add_argument("--policies", action="store_true")
    ask.add_argument("--model", choices=MODELS)
    options = ask.parse_args()
    rounds = 7 if options.quick else 15
    if options.policies:
        measure_policies(60)
        return
    rows: list[dict[str, object]] = []
    for name, shapes in MODELS.items():
        if options.model not in (None, name):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            ps = parameters(shapes, dtype)
            kinds = [("norm 2", 2.0, False), ("norm 2", 2.0, True)]
            if not options.quick:
                kinds += [("norm 1", 1.0, False), ("norm 1", 1.0, True)]
                kinds += [("norm inf", math.inf, False), ("norm inf", math.inf, True)]
            for kind, p, clipping in kinds:
                report(rows, name, dtype, kind, "clipping" if clipping else "under", norm_row(ps, p, clipping, rounds))
            for clipping in (False, True):
                regime = "clipping" if clipping else "under"
                report(rows, name, dtype, "value", regime, value_row(ps, clipping, rounds))
    if not options.quick and options.model is None:
        save("clip", METHOD, rows)


def report(rows: list[dict[str, object]], name: str, dtype: torch.dtype, kind: str, regime: str, row: dict) -> None:
    kept = {"model": name, "dtype": str(dtype).removeprefix("torch."), "kind": kind, "regime": regime, **row}
    rows.append(kept)
    limit = row.get("time_over_memory_limit")
    print(
        f"{name:18} {kept['dtype']:9} {kind:9} {regime:9} gradrein {row['milliseconds']['gradrein']:9.3f} ms   "
        f"torch {row['milliseconds'][row['torch_best']]:9.3f} ms   {show(row['faster_than_torch_best'])}"
        + (f"   {show(limit)} of the memory limit" if limit else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
