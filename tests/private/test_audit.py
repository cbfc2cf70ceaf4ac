"""An audit stays below the claim of a right run, and shows faults."""

import json
import math
import pathlib

import pytest
import torch
from common import losses_of, make
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import gradrein
from gradrein import errors, private
from gradrein.private._audit import _bound, _chance

STORED = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "private-audit.json"


def binomial(n, k, p):
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("guesses", "right"), [(10, 10), (10, 7), (40, 30), (40, 1), (6, 0)])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_chance_of_right_guesses_by_its_definition(epsilon, guesses, right, delta):
    """Theorem 5.2 of Steinke et al. 2023, summed up term by term."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = sum(binomial(guesses, k, p) for k in range(right, guesses + 1))
    alpha = max(
        (sum(binomial(guesses, right - j, p) for j in range(1, i + 1)) / i for i in range(1, right + 1)), default=0
    )
    expected = min(1.0, tail + 2 * 50 * delta * alpha)
    assert _chance(50, guesses, right, epsilon, delta) == pytest.approx(expected, abs=1e-12)


def test_the_bound_holds_for_randomised_response():
    """Which tells the truth with a chance of 1 / (1 + exp(-1)): epsilon is 1, and the bound is above it at most so often."""
    generator, epsilon, above = torch.Generator().manual_seed(0), 1.0, 0
    for _ in range(300):
        right = int((torch.rand(200, generator=generator) < 1 / (1 + math.exp(-epsilon))).sum())
        above += _bound(200, 200, right, 0.0, 0.1) > epsilon
    assert above <= 30 + 5 * (300 * 0.1 * 0.9) ** 0.5
    assert _bound(200, 200, 200, 0.0, 0.05) == pytest.approx(-math.log(0.05 ** (-1 / 200) - 1), abs=2e-3)
    assert _bound(200, 200, 100, 0.0, 0.05) == 0


WIDTH = 200


def samples(count, seed, size):
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def losses(model, batch):
    return losses_of(model, *batch)


def linear():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3)


def build(canaries, **options):
    dataset = ConcatDataset([samples(60, 1, 0.1), canaries])
    return make(linear(), dataset, 20, 0.2, noise_multiplier=2.0, delta=1e-4, **options)


class WithoutNoise:
    """Claims what it would spend with noise."""

    def __init__(self, canaries):
        self.model = linear()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.loader = DataLoader(ConcatDataset([samples(60, 1, 0.1), canaries]), batch_size=20, shuffle=True)

    def step(self, losses):
        gradrein.per_sample(losses, self.model).clip_(1.0, divide_by=20)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def epsilon(self):
        return 1.0


def test_right_and_wrong():
    canaries = samples(100, 2, 1.0)
    right = private.audit(build, losses, canaries, delta=1e-4, epochs=2)
    assert right.epsilon <= right.claim < 5
    assert not right.exceeded
    parts = private.audit(lambda c: build(c, max_physical_batch=7), losses, canaries, delta=1e-4, epochs=2)
    assert parts.epsilon <= parts.claim == right.claim
    wrong = private.audit(WithoutNoise, losses, samples(200, 2, 1.0), delta=1e-4, epochs=3)
    assert wrong.exceeded
    assert wrong.guesses[0] / wrong.guesses[1] > 0.75


def test_few_canaries_and_no_confidence():
    with pytest.raises(errors.ArgumentError, match="at least 10"):
        private.audit(build, losses, samples(9, 0, 1.0), delta=1e-4)
    with pytest.raises(errors.ArgumentError, match="confidence"):
        private.audit(build, losses, samples(20, 0, 1.0), delta=1e-4, confidence=1.0)


def test_what_is_stored_shows_four_of_five_faults():
    rows = json.loads(STORED.read_text())["rows"]
    ours = [row for row in rows if row["what"].startswith("gradrein")]
    assert ours
    assert not any(row["exceeded"] for row in ours)
    faults = {row["what"] for row in rows} - {row["what"] for row in ours}
    caught = {row["what"] for row in rows if row["exceeded"]}
    assert len(faults) == 5
    assert len(caught) >= 4
