"""Audits of private training as it is, and of copies with a planted fault: lower bounds on epsilon beside the claim.

    python benchmarks/private_audit.py

Writes benchmarks/results/private-audit.json.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import gradrein
from gradrein import private

OUT = Path(__file__).parent / "results" / "private-audit.json"
WIDTH, CANARIES, SAMPLES, EPOCHS, DELTA, NOISE = 400, 400, 300, 10, 1e-5, 2.0
CLIP = 1.0


class Tied(nn.Module):
    """A weight that is used on the way in and on the way out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x):
        return (torch.tanh(x @ self.weight.T) @ self.weight)[:, :10] + self.bias


def samples(count, seed, noisy):
    """Half of the data is quiet: canaries are loud, and orthogonal to each other up to chance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator) * (1.0 if noisy else 0.1)
    return TensorDataset(x, torch.randint(10, (count,), generator=generator))


def losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 10))


def data_with(canaries, batch_size):
    return DataLoader(ConcatDataset([samples(SAMPLES, 1, noisy=False), canaries]), batch_size=batch_size)


def ours(model, seed, **options):
    def build(canaries):
        torch.manual_seed(seed)
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.2)
        given = {"max_norm": CLIP, "noise_multiplier": NOISE, "delta": DELTA, "seed": seed, **options}
        return private.Private(made, optimizer, data_with(canaries, 16), **given)

    return build


class Faulty:
    """A hand-written private loop that claims what `Private` would, with one fault."""

    def __init__(self, model, canaries, seed, fault):
        torch.manual_seed(seed)
        self.model, self.fault, self.batch_size = model(), fault, 16
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        theirs = data_with(canaries, self.batch_size)
        self.dataset, self.steps = theirs.dataset, 0
        self.rate, self.loader = self.batch_size / len(self.dataset), self
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        count = len(self.dataset)
        order = torch.arange(count)
        for number in range(-(-count // self.batch_size)):
            if self.fault == "fixed order, accounted as sampled":
                chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            else:
                chosen = (torch.rand(count, generator=self.generator) < self.rate).nonzero().squeeze(1)
            if len(chosen):
                rows = [self.dataset[i] for i in chosen.tolist()]
                yield torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    def step(self, losses):
        self.optimizer.zero_grad()
        parameters = dict(self.model.named_parameters())
        if self.fault == "the mean is clipped, not each sample":
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        elif self.fault == "one use of a tied weight is not clipped":
            self._tied(losses)
        else:
            divide = 1.0 if self.fault == "sum instead of mean, noise for the mean" else self.batch_size
            gradrein.per_sample(losses, self.model).clip_(CLIP, divide_by=divide)
        for name, p in parameters.items():
            if not (self.fault == "no noise in one layer" and name == "0.weight"):
                p.grad += torch.randn(p.shape, generator=self.generator) * NOISE * CLIP / self.batch_size
        self.optimizer.step()
        self.steps += 1
        return True

    def _tied(self, losses):
        """Norms as from a hook on one module: that of the use on the way in is not seen."""
        ps = gradrein.per_sample(losses, self.model)
        grads = ps.grads()
        seen = grads["bias"].flatten(1).norm(dim=1)  # what is clipped by: all but the tied weight
        ps.weighted_((CLIP / seen).clamp(max=1) / self.batch_size)

    def epsilon(self):
        return private.epsilon(noise_multiplier=NOISE, sample_rate=self.rate, steps=self.steps, delta=DELTA)


FAULTS = {
    "no noise in one layer": mlp,
    "sum instead of mean, noise for the mean": mlp,
    "fixed order, accounted as sampled": mlp,
    "one use of a tied weight is not clipped": Tied,
    "the mean is clipped, not each sample": mlp,
}


def row(name, build, seed):
    start = time.perf_counter()
    found = private.audit(build, losses, samples(CANARIES, 2, noisy=True), delta=DELTA, epochs=EPOCHS, seed=seed)
    shown = {"what": name, "seed": seed, "bound": round(found.epsilon, 3), "claim": round(found.claim, 3)}
    shown |= {"exceeded": found.exceeded, "where": found.where, "guesses": "{}/{}".format(*found.guesses)}
    print({**shown, "seconds": round(time.perf_counter() - start, 1)}, flush=True)
    return shown


def main(seeds):
    rows = []
    for seed in seeds:
        rows += [row("gradrein", ours(mlp, seed), seed), row("gradrein, tied weight", ours(Tied, seed), seed)]
        for fault, model in FAULTS.items():
            rows.append(row(fault, lambda canaries, m=model, f=fault, s=seed: Faulty(m, canaries, s, f), seed))
    OUT.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0, 1, 2])
