"""Random graphs against a loop over samples, each built several times with other data of the same form.

A graph is a list of steps over a few registers, tensors of shape (batch, steps, channels). A step reads one or two
registers and writes one. What it does is drawn once; masks, gates, indices and the data are drawn for every build, at
0, at 1 or in between, so that what was seen on one build may be wrong on the next.

    PYTHONPATH=src python -m tests.persample.random_graphs --count 10000          # or: make fuzz N=10000
    PYTHONPATH=src python -m tests.persample.random_graphs --seed 7 --keep 0,3    # one graph, only these steps
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint

import gradrein
from gradrein.errors import BatchCouplingError, UnsupportedOperationError

from .oracle import close, flat, loop
from .random_steps import COUPLING, MOODS, PLAIN, C, Draws, Weights

REGISTERS = 3
STEPS = PLAIN | COUPLING


class WrongError(AssertionError):
    """An answer that is not right, or a refusal that has no reason."""


@dataclass(frozen=True)
class Step:
    op: str
    into: int
    other: int
    number: int
    place: str  # plainly, or under a checkpoint


@dataclass(frozen=True)
class Graph:
    """What is drawn once; `build` draws the rest."""

    seed: int
    batch: int
    length: int
    dtype: torch.dtype
    steps: tuple[Step, ...]
    moods: tuple[str, ...]
    ending: str
    shuffled: str
    equal: bool
    keep: tuple[int, ...]

    @property
    def couples(self):
        """Say whether samples may mix, for some values of masks and coefficients."""
        return self.shuffled == "matrix" or any(self.steps[i].op in COUPLING for i in self.keep)

    def places(self):
        """Return where steps stand."""
        return {self.steps[i].place for i in self.keep}

    def without_checkpoints(self):
        return replace(self, steps=tuple(replace(step, place="plain") for step in self.steps))

    def weights(self):
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return Weights(self.batch, self.length).double().to(self.dtype)

    def draws(self, build, place):
        return Draws(hash((self.seed, build, place)) % 2**31, self.moods[build], self.batch, self.length, self.dtype)

    def inputs(self, w, build, probe):
        """Fill the registers from data by way of parameters."""
        d = self.draws(build, -1)
        x = d.normal(self.batch, self.length, C)
        x = x[:1].expand_as(x).clone() if self.equal else x
        ids = d.whole(7, self.batch, self.length)
        image = x if probe is None else x + probe[0]  # without a probe the data is one tensor in both places
        of_x, of_ids = (0.0, 0.0) if probe is None else probe
        return [w.linears[0](x) + of_x, w.table(ids) + of_ids, w.conv(image.transpose(1, 2)).transpose(1, 2)]

    def build(self, w, build, probe=None):
        """Return the losses of one build; `probe` is added to each of the two tensors of data."""
        registers = self.inputs(w, build, probe)
        for place in self.keep:
            step, d = self.steps[place], self.draws(build, place)
            registers[step.into] = run(step, w, registers[step.into], registers[step.other], d)
        d = self.draws(build, -2)
        return ended(self.ending, shuffled(self.shuffled, torch.cat(registers, 2), d), d)


def run(step, w, h, s, d):
    if step.place == "plain":
        return STEPS[step.op](w, h, s, step.number, d)
    state = d.generator.get_state()

    def again(h, s):
        d.generator.set_state(state)
        return STEPS[step.op](w, h, s, step.number, d)

    return checkpoint(again, h, s, use_reentrant=False)


def shuffled(way, out, d):
    """Return the samples in another order."""
    if way == "sorted":
        return out[out[:, 0, 0].argsort()]
    order = d.order(d.batch)
    if way == "matrix":
        return (torch.eye(d.batch, dtype=out.dtype)[order] @ out.flatten(1)).view_as(out)
    return out[order] if way == "index" else out


def ended(ending, out, d):
    """Return one loss per sample, or one per token."""
    slope = torch.linspace(0.5, 1.5, out.shape[2], dtype=out.dtype)
    tokens = (torch.tanh(out) * slope + 0.1 * torch.tanh(out) ** 2).sum(2)
    if ending == "tokens":
        return tokens
    if ending == "masked":
        return (tokens * d.weights(d.batch, d.steps)).sum(1)
    if ending == "routed":
        place = d.order(d.batch).repeat_interleave(d.steps)
        return torch.zeros(d.batch, dtype=out.dtype).index_add(0, place, tokens.flatten())
    if ending == "steps first":
        return tokens.T.contiguous().sum(0)
    return tokens.mean(1) * d.weights(d.batch) if ending == "weighted" else tokens.sum(1)


def drawn(seed):
    """Return the graph of a seed."""
    r = random.Random(seed)
    dtype = r.choice([torch.float64] * 4 + [torch.float32] * 2 + [torch.bfloat16, torch.float16])
    size = r.randint(1, r.choice([3, 10, 25, 50] if dtype.itemsize > 2 else [3, 10]))
    at = r.randrange(size) if r.random() < 0.35 else None  # where samples are coupled, if they are
    batch = r.randint(2, 4)
    return Graph(
        seed=seed,
        batch=batch,
        length=r.choice([2, 3, batch]),
        dtype=dtype,
        steps=tuple(drawn_step(r, COUPLING if place == at else PLAIN) for place in range(size)),
        moods=drawn_moods(r),
        ending=r.choice(["sums", "tokens", "masked", "steps first", "weighted", "routed"]),
        shuffled=r.choice(["no"] * 9 + ["index", "matrix", "sorted"]),
        equal=r.random() < 0.1,
        keep=tuple(range(size)),
    )


def drawn_step(r, ops):
    op = r.choice([*ops])
    place = r.choice(["plain"] * 8 + ["checkpoint"] * 2)
    return Step(op, r.randrange(REGISTERS), r.randrange(REGISTERS), r.randrange(60), place)


def drawn_moods(r):
    """Return the moods of three builds, often with the one first that hides the most."""
    moods = r.sample(MOODS, 3)
    return tuple(sorted(moods, key=["harmless", "zeros"].__contains__, reverse=True) if r.random() < 0.5 else moods)


def coupled(graph, w, build):
    """Return how much of a loss's gradient falls on the data of other samples."""
    probe = torch.zeros(2, graph.batch, graph.length, C, dtype=graph.dtype, requires_grad=True)
    losses = graph.build(w, build, probe)
    rows = loop(losses, {"probe": probe})["probe"].double().abs().sum(-1)
    # By token: the tokens of one row may be those of several samples, as in a packed batch.
    owners = (rows > 1e-6 * rows.max()).sum(0)
    return bool((owners > 1).any())


def check(graph):
    """Raise `WrongError` unless every build is right, or refused for a reason that is true.

    Returns:
        How many builds were answered, coupled, and unsupported.
    """
    w = graph.weights()
    outcomes = Counter()
    for build in range(len(graph.moods)):
        try:
            outcomes[check_build(graph, w, build)] += 1
        except Exception as error:
            raise WrongError(f"build {build} ({graph.moods[build]}): {type(error).__name__}: {error}") from error
    return outcomes


def check_build(graph, w, build):
    losses = graph.build(w, build)
    expected = loop(losses, dict(w.named_parameters()))
    try:
        compare(gradrein.per_sample(losses, w), expected, graph.dtype)
    except AssertionError as error:
        found = flat(gradrein.per_sample(losses, w).grads())
        if graph.dtype != torch.float64 or not is_rounding(graph, w, build, flat(expected), found):
            raise error
        return "ill-conditioned"
    except BatchCouplingError:
        if not graph.couples:
            raise
    except UnsupportedOperationError as error:
        refuse_excuse(graph, w, build, error)
        return "unsupported"
    else:
        assert not (graph.couples and coupled(graph, w, build)), "answered, though coupled"
        return "answered"
    try:
        compare(gradrein.per_sample(losses, w, allow_coupling=True), expected, graph.dtype)
    except UnsupportedOperationError as error:
        refuse_excuse(graph, w, build, error)
    return "coupled"


def is_rounding(graph, w, build, expected, found):
    """Return whether the loop itself moves as far when weights move by one rounding, as where a norm sees equal values."""
    before = {name: p.detach().clone() for name, p in w.named_parameters()}
    moved = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in w.parameters():
                p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=generator))
        other = flat(loop(graph.build(w, build), dict(w.named_parameters())))
        moved = max(moved, float((other - expected).abs().max()))
        with torch.no_grad():
            for name, p in w.named_parameters():
                p.copy_(before[name])
    return float((found - expected).abs().max()) < moved


def refuse_excuse(graph, w, build, error):
    """Raise a refusal whose reason is not true: checkpoints are named, and without them the graph is supported."""
    if "checkpoint" not in str(error) or graph.places() == {"plain"}:
        raise error
    if check_build(graph.without_checkpoints(), w, build) == "unsupported":
        raise error


def compare(ps, expected, dtype):
    found = ps.grads()
    assert list(found) == list(expected)
    whole = flat(expected).double()
    close(flat(found), whole, dtype, "gradients")
    close(ps.norms(), whole.norm(dim=1), dtype, "norms")


def shrunk(graph, error):
    """Return the graph without the steps it fails without, and how it fails then."""
    for place in graph.keep:
        smaller = replace(graph, keep=tuple(i for i in graph.keep if i != place))
        try:
            check(smaller)
        except WrongError as found:
            return shrunk(smaller, found)
    return graph, error


def described(graph):
    """Return the command that runs this graph alone."""
    steps = " ".join(f"{graph.steps[i].op}/{graph.steps[i].place}" for i in graph.keep)
    keep = ",".join(map(str, graph.keep))
    line = f"PYTHONPATH=src python -m tests.persample.random_graphs --seed {graph.seed} --keep {keep or 'none'}"
    return f"{line}  # {graph.dtype}, {graph.ending}, {' '.join(graph.moods)}: {steps}"


def explore(seeds):
    """Check the graphs of many seeds, print the failing ones at their smallest, return how many there were."""
    failed, outcomes, since = 0, Counter(), time.monotonic()
    for done, seed in enumerate(seeds, 1):
        try:
            outcomes += check(drawn(seed))
        except WrongError as error:
            failed += 1
            print(f"seed {seed}: {error}", flush=True)  # before it is shrunk, which takes minutes
            smallest, found = shrunk(drawn(seed), error)
            print(f"  {described(smallest)}\n  {found}", flush=True)
        if done % 100 == 0 or done == len(seeds):
            builds = ", ".join(
                f"{outcomes[kind]} {kind}" for kind in ("answered", "coupled", "unsupported", "ill-conditioned")
            )
            print(f"{done} graphs, builds: {builds}; {failed} failed, {time.monotonic() - since:.0f} s", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description="Random graphs against a loop over samples.")
    parser.add_argument("--count", type=int, default=1000, help="how many graphs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this graph")
    parser.add_argument("--keep", help="only these of its steps: 0,3,4 or none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if arguments.seed is None:
        sys.exit(bool(explore(range(arguments.start, arguments.start + arguments.count))))
    graph = drawn(arguments.seed)
    if arguments.keep:
        keep = () if arguments.keep == "none" else tuple(int(i) for i in arguments.keep.split(","))
        graph = replace(graph, keep=keep)
    print(described(graph))
    print(dict(check(graph)))


if __name__ == "__main__":
    main()
