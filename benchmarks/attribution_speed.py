"""Projected per-sample gradients against other libraries: samples per second, peak memory, share of parameters covered.

One model (the GPT of persample_models.py), the same samples, in turns in one process on one thread: the ratio of
processor time to a plain forward and backward of the same round, median and quartiles. Methods that take more than ten
plain steps run once. Peak memory is the growth of the resident set during the first call in a fresh process, with the
allocator told to hand back what is freed. Sizes: all parameters to 512 numbers where a library projects the whole
gradient, 16 x 16 for each weight where it projects both sides. A library that refuses is listed by name.

TorchJD has no projection; its Gramian of the batch is beside ours.

    python benchmarks/attribution_speed.py            # writes benchmarks/results/attribution-speed.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import time
import types
import warnings

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "0")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")

import torch
from torch.func import functional_call, grad, vmap

import gradrein
from persample_models import gpt
from side_by_side import ratio, save

SIZE, SIDE, BATCH = 512, 16, 16


def problem():
    torch.manual_seed(0)
    found = gpt(BATCH)
    return found.model, found.x, found.y, found.losses


def all_of(model):
    return sum(p.numel() for p in model.parameters())


def plain(model, x, y, losses):
    def run():
        model.zero_grad()
        losses(model(x), y).sum().backward()

    return run, 1.0


def ours(kind, size):
    def make(model, x, y, losses):
        def run():
            ps = gradrein.per_sample(losses(model(x), y), model, retain_graph=False, memory_budget=0)
            return ps.project(size, kind=kind)

        return run, 1.0

    return make


def our_gram(model, x, y, losses):
    return lambda: gradrein.per_sample(losses(model(x), y), model, retain_graph=False).gram(), 1.0


def vmapped(model, x, y, losses):
    """Return a function of the batch that writes down all gradients, name -> (samples, *shape)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return losses(functional_call(model, parameters, (x[None],)), y[None])[0]

    return lambda: vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


def vmap_dense(model, x, y, losses):
    """A dense projection with signs that are drawn anew, in blocks of rows: all of them do not fit into memory."""
    written = vmapped(model, x, y, losses)

    def run():
        generator, out = torch.Generator().manual_seed(0), torch.zeros(len(x), SIZE)
        for g in written().values():
            for block in g.flatten(1).split(1 << 16, 1):
                signs = torch.randint(2, (block.shape[1], SIZE), generator=generator, dtype=torch.int8)
                out += block @ (signs * 2.0 - 1)
        return out

    return run, 1.0


def traker(model, x, y, losses):
    sys.modules.setdefault("fast_jl", types.ModuleType("fast_jl"))
    from trak.projectors import BasicProjector, ProjectionType

    projector = BasicProjector(all_of(model), SIZE, 0, ProjectionType.rademacher, "cpu", block_size=16)
    written = vmapped(model, x, y, losses)
    return lambda: projector.project(torch.cat([g.flatten(1) for g in written().values()], 1), 0), 1.0


def dattri(model, x, y, losses):
    from dattri.func.projection import random_project

    written = vmapped(model, x, y, losses)
    shapes = {name: p.detach()[None].expand(BATCH, *p.shape) for name, p in model.named_parameters()}
    project = random_project(shapes, BATCH, SIZE, 16, proj_type="rademacher", device="cpu")
    return lambda: project(written()), 1.0


def bergson(model, x, y, losses):
    from bergson import GradientProcessor
    from bergson.collector.collector import HookCollectorBase
    from bergson.collector.in_memory_collector import InMemoryCollector

    class Collector(InMemoryCollector):
        """Keeps the gradients of the batch, and needs no dataset."""

        def setup(self):
            self.builder = self.scorer = None

        def teardown(self):
            pass

    type(model).device = property(lambda self: next(self.parameters()).device)
    type(model).dtype = property(lambda _: torch.float32)
    assert issubclass(Collector, HookCollectorBase)
    processor = GradientProcessor(projection_dim=SIDE, include_bias=False)
    config = types.SimpleNamespace(filter_modules=None, attribute_tokens=False)

    def run():
        collector = Collector(model=model, data=None, cfg=config, processor=processor)
        with collector:
            losses(model(x), y).sum().backward()
        model.zero_grad()
        return torch.cat([collector.mod_grads[name].flatten(1) for name in sorted(collector.mod_grads)], 1)

    names = set(Collector(model=model, data=None, cfg=config, processor=processor).target_info)
    tracked = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".weight") and name[:-7] in names)
    return run, tracked / all_of(model)


def torchjd(model, x, y, losses):
    from torchjd.autogram import Engine

    engine = Engine(model, batch_dim=0)
    return lambda: engine.compute_gramian(losses(model(x), y)), 1.0


METHODS = {
    "plain forward and backward": plain,
    "gradrein factored 16": ours("factored", SIDE),
    "gradrein sparse 512": ours("sparse", SIZE),
    "bergson 16": bergson,
    "dattri 512": dattri,
    "traker basic 512": traker,
    "torch.func.vmap, dense 512": vmap_dense,
    "gradrein gram": our_gram,
    "TorchJD gramian": torchjd,
}


def peak(method):
    """Print how many MB the first call takes."""
    parts = problem()
    run, _ = METHODS[method](*parts)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # what was the peak before, that of the parent too, is forgotten
    before = high_water()
    run()
    print("peak", (high_water() - before) / 1024)


def high_water():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak_of(method):
    done = subprocess.run([sys.executable, __file__, "--peak", method], capture_output=True, text=True, check=False)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("peak")]
    return float(found[0]) if found else None


def main(rounds):
    rows, runs, shares, times = [], {}, {}, {}
    for name, make in METHODS.items():
        try:
            run, shares[name] = make(*problem())
            start = time.process_time()
            run()
            times[name] = [time.process_time() - start]
            runs[name] = run
            print(f"{name}: {times[name][0]:.2f} s", flush=True)
        except Exception as error:
            rows.append({"method": name, "refused": f"{type(error).__name__}: {error}".split("\n")[0][:200]})
            print(rows[-1], flush=True)
    names = list(runs)
    fast = [name for name in names if times[name][0] < 10 * times[names[0]][0]]
    times |= {name: [] for name in fast}
    for turn in range(rounds):
        for name in fast[turn % len(fast) :] + fast[: turn % len(fast)]:
            start = time.process_time()
            runs[name]()
            times[name].append(time.process_time() - start)
    base = times[names[0]]
    plain_peak = peak_of(names[0])
    for name in names:
        own = times[name]
        memory = peak_of(name)
        quotient = ratio(own, base) if name in fast else {"once": round(own[0] / sorted(base)[len(base) // 2], 1)}
        rows.append(
            {
                "method": name,
                "samples_per_second": round(BATCH / sorted(own)[len(own) // 2], 2),
                "time_over_plain": quotient,
                "peak_mb": memory and round(memory, 1),
                "peak_over_plain": memory and plain_peak and round(memory / plain_peak, 2),
                "parameters_covered": round(shares[name], 4),
            }
        )
        print(rows[-1], flush=True)
    versions = {}
    for name in ("trak", "dattri", "bergson", "torchjd"):
        try:
            versions[name] = importlib.metadata.version({"trak": "traker"}.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    save("attribution-speed", __doc__, [{"versions": versions}, *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.peak:
        peak(options.peak)
    else:
        main(options.rounds)
