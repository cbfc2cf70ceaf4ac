"""Three things that go silently wrong with torch's clipping, the same with gradrein, and how fast each is."""

import statistics
import time
import warnings

import torch

import gradrein


def parameter(grad):
    p = torch.nn.Parameter(torch.zeros_like(grad))
    p.grad = grad
    return p


def show(title, make, clip):
    print(f"\n{title}")
    for name, library in (("torch", torch.nn.utils), ("gradrein", gradrein)):
        p = make()
        norm = clip(library, p)
        print(f"  {name:6}  norm {norm.item():<12.6g} largest gradient after clipping {p.grad.abs().max().item():.6g}")


def wrong_cases():
    show(
        "1. A million half-precision values of 100 (all finite, true norm 100000), clipped to norm 1000",
        lambda: parameter(torch.full((1000, 1000), 100.0, dtype=torch.float16)),
        lambda library, p: library.clip_grad_norm_([p], 1000.0),
    )
    show(
        "2. A tied parameter listed twice (gradient 3, 4: true norm 5), clipped to norm 1",
        lambda: parameter(torch.tensor([3.0, 4.0])),
        lambda library, p: library.clip_grad_norm_([p, p], 1.0),
    )
    show(
        "3. Parameters from a filter() that was used once before, clipped to norm 1",
        lambda: parameter(torch.tensor([3.0, 4.0])),
        lambda library, p: exhausted(library, p),
    )


def exhausted(library, p):
    trainable = filter(lambda q: q.requires_grad, [p])
    list(trainable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm = library.clip_grad_norm_(trainable, 1.0)
    for warning in caught:
        print(f"          warned: {str(warning.message)[:90]}...")
    return norm


def speed():
    shapes = [(64, 64), (64,)] * 200
    ps = [parameter(torch.randn(shape)) for shape in shapes]
    print(f"\nSpeed, {len(ps)} parameters of a small deep network (median of 50 interleaved turns)")
    for regime, limit in (("under the threshold", 1e9), ("clipping", 1e-3)):
        times = {"torch": [], "gradrein": []}
        for _ in range(50):
            for name, library in (("torch", torch.nn.utils), ("gradrein", gradrein)):
                start = time.perf_counter()
                library.clip_grad_norm_(ps, limit)
                times[name].append(time.perf_counter() - start)
        ratio = statistics.median(t / b for t, b in zip(times["torch"], times["gradrein"], strict=True))
        ours, theirs = (1e3 * statistics.median(times[name]) for name in ("gradrein", "torch"))
        print(f"  {regime:20} torch {theirs:6.3f} ms   gradrein {ours:6.3f} ms   {ratio:.1f}x")


if __name__ == "__main__":
    wrong_cases()
    speed()
