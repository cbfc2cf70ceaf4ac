"""Random faults over random layouts on four ranks: an error on every survivor, no gradient changed, no hang.

`make fuzz-ranks N=1000` runs a thousand and counts what came out.
"""

import argparse
import collections
import datetime
import math
import os
import random
import signal
import time

import layouts
import rank_processes
import torch
import torch.distributed as dist

import gradrein

WHOLE = {"line": 1, "shuffled": 1, "2d": 2, "crossed": 2, "turned": 2, "3d": 3}  # meshes of all ranks
SLICES = {"2d/a": 1, "2d/b": 1, "turned/a": 1, "3d/ac": 2}
SIZE = 4
# What leaves the group unusable, or somebody waiting for the timeout.
FATAL = ("killed", "late", "absent")
OTHER_CALLS = ("fewer", "order", "dtype", "threshold", "order of the norm", "policy", "nonfinite", "function")
LOCAL = ("nan", "inf", "none")


def any_case(rng):
    """Parameters on random meshes; the first on one of all ranks, so that every rank hears of a fault."""
    rows = []
    for k in range(rng.randint(2, 5)):
        where = rng.choice([*WHOLE] if k == 0 else [*WHOLE, *SLICES, "plain"])
        dims = {**WHOLE, **SLICES, "plain": 0}[where]
        least = 4 if k == 0 else 1  # every rank holds some of the first
        shape = tuple(rng.randint(least, 6) for _ in range(rng.randint(1, 3)))
        letters = "".join(rng.choice(["r", *map(str, range(len(shape)))]) for _ in range(dims))
        rows.append((shape, where, letters, ()))
    return {"seed": rng.randint(0, 99), "tensors": rows}


def any_fault(seed, fatal):
    rng = random.Random(seed)
    names = FATAL if fatal else (*OTHER_CALLS, *LOCAL)
    return any_case(rng), rng.choice(names), rng.randrange(SIZE), rng.choice(["clip_", "clip_grad_norm_"])


def clip(parameters, how, odd, fault):
    limit = 0.02 if odd and fault == "threshold" else 0.01
    p = 3.0 if odd and fault == "order of the norm" else 2.0
    other = odd and fault == "function"
    if (how == "clip_grad_norm_") != other and fault not in ("policy", "nonfinite"):
        gradrein.clip_grad_norm_(parameters, limit, p, error_if_nonfinite=True)
        return
    policy = gradrein.by_rms(0.001) if odd and fault == "policy" else gradrein.by_norm(limit, p)
    gradrein.clip_(parameters, policy, nonfinite="skip" if odd and fault == "nonfinite" else "raise")


def prepare(parameters, fault):
    """Make the fault on the rank that has it."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "late":
        time.sleep(5)
    if fault == "fewer":
        parameters.popitem()
    if fault == "order":
        for name in list(parameters)[:-1]:
            parameters[name] = parameters.pop(name)
    if fault == "dtype":
        first = parameters["p0"]
        parameters["p0"] = torch.nn.Parameter(first.detach().double())
        parameters["p0"].grad = first.grad.double()


def run(case, fault, at, how, timeout):
    """What this rank found: the kind of error, its text, seconds, whether gradients are as they were."""
    parameters, _ = layouts.build(case)
    limit_groups(parameters, timeout)
    odd = dist.get_rank() == at
    if odd and fault in ("nan", "inf"):
        grads = [layouts.piece(p.grad) for p in parameters.values()]
        next(g for g in grads if g.numel()).view(-1)[0] = math.nan if fault == "nan" else math.inf
    before = {name: layouts.piece(p.grad).clone() for name, p in parameters.items()}
    start = time.monotonic()
    if odd:
        prepare(parameters, fault)
    if odd and fault == "absent":
        return "absent", "", 0.0, True
    kind, text = error_of(lambda: clip(parameters, how, odd, fault))
    same = [torch.equal(local(p).nan_to_num(7.0), before[name].nan_to_num(7.0)) for name, p in parameters.items()]
    return kind, text, time.monotonic() - start, all(same)


def limit_groups(parameters, timeout):
    """Give the groups of meshes, which otherwise wait for half an hour, the timeout of all ranks."""
    for p in parameters.values():
        for group in p.device_mesh.get_all_groups() if hasattr(p, "device_mesh") else ():
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), group)


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def local(p):
    return p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad


def judge(case, fault, at, how, answers, timeout):
    """None if all is well, else what is wrong."""
    for rank, (ok, answer) in enumerate(answers):
        if rank == at and fault == "killed":
            if answer != "gone":
                return f"rank {rank} was not killed: {answer}"
            continue
        if not ok:
            return f"rank {rank}: {answer}"
        kind, text, seconds, unchanged = answer
        if fault == "none":
            expected = {"nothing"}
        elif fault in ("nan", "inf"):
            expected = {"NonFiniteGradientError"}
        else:
            expected = {"RankError"}
        if rank == at and fault == "absent":
            continue
        if kind not in expected:
            return f"rank {rank} raised {kind}: {text}"
        if kind != "nothing" and not unchanged:
            return f"rank {rank} changed a gradient: {text}"
        if seconds > 2 * timeout + 10:
            return f"rank {rank} took {seconds:.0f} s"
    return None


class Fuzzer:
    """Runs faults, with a new rank_processes after each that leaves the old one unusable."""

    def __init__(self):
        self._processes = None

    def try_one(self, seed, fatal=False):
        case, fault, at, how = any_fault(seed, fatal)
        self._processes = self._processes or rank_processes.RankProcesses(SIZE, timeout=2.0 if fatal else 8.0)
        answers = self._processes.outcomes(run, case, fault, at, how, self._processes.timeout)
        wrong = judge(case, fault, at, how, answers, self._processes.timeout)
        if fatal or wrong or any("could not exchange" in str(answer) for _, answer in answers):
            self.close()
        return fault, wrong and f"seed {seed}, {fault} at rank {at}, {how}, {case}: {wrong}"

    def close(self):
        if self._processes is not None:
            self._processes.close()
        self._processes = None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--fatal-every", type=int, default=10)
    arguments = parser.parse_args()
    fuzzer, found, wrong = Fuzzer(), collections.Counter(), []
    for fatal in (False, True):
        for seed in range(arguments.start, arguments.start + arguments.count):
            if (seed % arguments.fatal_every == 0) == fatal:
                fault, problem = fuzzer.try_one(seed, fatal)
                found[fault] += 1
                if problem:
                    wrong.append(problem)
                    print(problem, flush=True)
        fuzzer.close()
    print(f"{sum(found.values())} faults, {len(wrong)} not as they should be: {dict(sorted(found.items()))}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
