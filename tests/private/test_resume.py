"""A run that was killed goes on: no step is lost, none counts twice, and all bits are those of the unbroken run."""

import io
import random

import pytest
import torch
from common import data, flat, losses_of, make, train
from torch import nn
from torch.utils.data import DataLoader

from gradrein import errors, private


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


class Checkpoint:
    """A process's worth of training: from the last checkpoint on, until it is killed."""

    def __init__(self, **options):
        self.options, self.file = options, None

    def begin(self):
        model = dropping()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        torch.manual_seed(1)
        run = make(model, optimizer=optimizer, **self.options)
        if self.file is not None:
            saved = torch.load(io.BytesIO(self.file), weights_only=False)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            run.load_state_dict(saved["run"])
            torch.set_rng_state(saved["torch"])
        return run

    def save(self, run):
        file = io.BytesIO()
        things = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "run": run.state_dict()}
        torch.save({**things, "torch": torch.get_rng_state()}, file)
        self.file = file.getvalue()

    def live(self, until, every, killed_at):
        """Train until a step, saving every so often; None if killed after so many batches of the loader."""
        run, batches = self.begin(), 0
        while run.steps < until:
            for x, y, _ in run.loader:
                batches += 1
                if batches == killed_at:
                    return None
                if run.step(losses_of(run.model, x, y)):
                    if run.steps % every == 0:
                        self.save(run)
                    if run.steps == until:
                        return run
        return run


OPTIONS = {
    "plain": {},
    "in parts": {"max_physical_batch": 3},
    "shuffled": {"accountant": "unamplified"},
    "quantile": {"quantile": private.Quantile(noise=2.0)},
    "workers": {"loader": DataLoader(data(), batch_size=8, num_workers=1)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_random_kills(name):
    options = OPTIONS[name]
    unbroken = Checkpoint(**options).live(12, every=100, killed_at=None)
    draws, broken, lives = random.Random(name), Checkpoint(**options), 0
    run = None
    while run is None:
        killed = draws.randint(5, 15) if lives < 4 else None
        run, lives = broken.live(12, every=draws.randint(1, 3), killed_at=killed), lives + 1
    assert lives > 1
    assert torch.equal(flat(run.model), flat(unbroken.model))
    assert run.epsilon() == unbroken.epsilon()
    assert run.steps == unbroken.steps == 12
    assert run.state_dict()["max_norm"] == unbroken.state_dict()["max_norm"]


def test_a_secure_run_counts_on_with_other_numbers():
    first = Checkpoint(secure=True)
    run = first.live(3, every=3, killed_at=None)
    again = [first.begin() for _ in range(2)]
    seen = [[], []]
    for one, ids in zip(again, seen, strict=True):
        train(one, 2, steps=9, seen=ids)
        assert one.steps == 9
        assert one.epsilon() > run.epsilon()
    assert seen[0] != seen[1]


def test_no_state_in_the_middle_of_a_batch():
    run = make(max_physical_batch=2)
    for x, y, _ in run.loader:
        with pytest.raises(errors.PrivacyError, match="a batch is in use"):
            run.state_dict()
        taken = run.step(losses_of(run.model, x, y))
        if taken:
            assert run.state_dict()["steps"] == run.steps
        else:
            with pytest.raises(errors.PrivacyError, match="Save right after `step` has returned True"):
                run.state_dict()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"noise_multiplier": 2.0}, "noise multiplier, 1.0 and not 2.0"),
        ({"batch_size": 4}, "batch size"),
        ({"max_norm": 2.0}, "max_norm"),
        ({"accountant": "pld"}, "accountant"),
        ({"gamma": 0.1}, "gamma"),
        ({"quantile": private.Quantile(noise=9.0)}, "quantile"),
        ({"secure": True}, "secure"),
        ({"dataset": data(41)}, "samples, 40 and not 41"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_state_of_other_settings(options, what):
    state = train(make()).state_dict()
    other = make(**options)
    with pytest.raises(errors.PrivacyError, match=f"another {what}.*one epsilon does not cover both"):
        other.load_state_dict(state)
    assert other.steps == 0


def test_a_state_is_a_copy():
    run = train(make())
    state = run.state_dict()
    key, limits = state["key"].clone(), dict(state["max_norm"])
    train(run)
    assert state["steps"] == 5
    assert torch.equal(state["key"], key)
    assert state["max_norm"] == limits


def test_loading_before_the_model_is_refused_at_the_next_step():
    run, other = train(make()), make()
    other.load_state_dict(run.state_dict())
    other.model.load_state_dict(run.model.state_dict())
    with pytest.raises(errors.PrivacyError, match="call load_state_dict of Private last"):
        train(other)


def test_a_run_without_a_seed_goes_on_with_the_numbers_of_its_state():
    run = train(make(seed=None), steps=3)
    other = make(seed=None)
    other.model.load_state_dict(run.model.state_dict())
    other.load_state_dict(run.state_dict())
    assert torch.equal(flat(train(other, steps=5).model), flat(train(run, steps=5).model))
