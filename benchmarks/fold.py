"""Clip and step: the coefficient folded into a fused optimizer, against clipping first.

    python benchmarks/fold.py

One step of torch's fused AdamW after clipping by norm, gradients twice the threshold and restored, untimed, before
every turn. Contenders: torch's clipping then the step, ours then the step, ours folded into the step.
"""

from __future__ import annotations

import torch

import gradrein
from clip import MODELS, parameters
from side_by_side import interleave, ratio, save, show

METHOD = __doc__ or ""


def row(name: str) -> dict[str, object]:
    ps = parameters(MODELS[name], torch.float32)
    for p in ps:
        torch.nn.init.normal_(p)
    grads = [p.grad for p in ps]
    kept = [g.clone() for g in grads]
    limit = gradrein.get_total_norm(kept).item() / 2
    optimizer = torch.optim.AdamW(ps, lr=1e-4, fused=True)

    def torch_first() -> None:
        torch.nn.utils.clip_grad_norm_(ps, limit)
        optimizer.step()

    def gradrein_first() -> None:
        gradrein.clip_(ps, gradrein.by_norm(limit))
        optimizer.step()

    def folded() -> None:
        gradrein.clip_(ps, gradrein.by_norm(limit), fold_into=optimizer)
        optimizer.step()

    contenders = {"folded": folded, "gradrein, then step": gradrein_first, "torch, then step": torch_first}
    times = interleave(contenders, rounds=15, before=lambda: torch._foreach_copy_(grads, kept), inner=1)
    return {
        "model": name,
        "milliseconds": {k: round(1e3 * sorted(t)[len(t) // 2], 3) for k, t in times.items()},
        "faster_than_torch_then_step": ratio(times["torch, then step"], times["folded"]),
        "faster_than_gradrein_then_step": ratio(times["gradrein, then step"], times["folded"]),
    }


def main() -> None:
    rows = [row(name) for name in ("GPT-2 124M", "ResNet-50", "1000 x (32, 32)")]
    for r in rows:
        print(r["model"], r["milliseconds"], "against torch, then step:", show(r["faster_than_torch_then_step"]))
    save("fold", METHOD, rows)


if __name__ == "__main__":
    main()
