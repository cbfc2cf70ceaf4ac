"""The cases of Opacus' own tests of its engine, accountants, samplers and memory manager, as facts: right or refused.

`SHOWN` says where a fact is shown already; the rest is shown here.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F
from common import clipped_sum, data, flat, losses_of, make, mlp, train
from torch import nn
from torch.utils.data import TensorDataset

from gradrein import errors, private

SHOWN = {
    "engine: the norm of one clipped sample is the threshold": "test_private.test_without_noise_it_is_the_sum_of_the_obvious_loop",
    "engine: layers are clipped by themselves": "test_private.test_groups_are_clipped_by_themselves",
    "engine: noise has the standard deviation that was asked for": "test_private.test_noise_is_added_once_for_all_parts",
    "engine: noise is never the same, secure or not": "test_private.test_noise_is_normal_and_never_the_same",
    "engine: the same seed gives the same run": "test_sampling.test_the_same_seed_gives_the_same_batches",
    "engine: a budget is spent and not exceeded": "test_private.test_training_helps_within_a_budget",
    "engine: a run goes on from a checkpoint": "test_resume.test_random_kills",
    "engine: equal parameters of another model are refused": "test_refusals.test_a_copy_of_a_parameter_is_another_model",
    "engine: an empty batch is a step of noise": "test_private.test_empty_batches_are_steps_of_noise",
    "accountants: noise for a budget does not overshoot": "test_accounting.test_noise_for_a_budget",
    "accountants: one that is not known is refused": "test_accounting.test_arguments",
    "accountants: a state is a copy": "test_resume.test_a_state_is_a_copy",
    "accountants: a state of another accountant is refused": "test_resume.test_a_state_of_other_settings",
    "samplers: as many batches as the loader has": "test_sampling.test_an_epoch_is_as_long_as_that_of_the_loader",
    "samplers: sizes vary around the batch size": "test_sampling.test_each_sample_is_drawn_with_the_same_chance_apart_from_others",
    "samplers: ranks share a batch, none takes another's": "test_sampling.test_ranks_and_parts_share_a_batch",
    "samplers: the sample of an empty batch does not count": "test_private.test_the_sample_of_an_empty_batch_does_not_count",
    "samplers: drop_last is refused": "test_sampling.test_loaders_that_are_refused",
    "memory: parts are no larger than asked, with workers too": "test_sampling.test_a_loop_that_was_left_goes_on_with_the_same_batches",
    "memory: parameters move with the last part only": "test_refusals.test_an_optimizer_sees_nothing_between_parts",
    "memory: parts are equal to one batch": "test_private.test_parts_change_nothing",
}


@pytest.mark.parametrize("fact", SHOWN)
def test_it_is_shown(fact):
    module, name = SHOWN[fact].split(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("change", [{}, {"max_norm": 0.1}, {"noise_multiplier": 1.0}], ids=str)
def test_without_clipping_and_noise_it_is_plain_training(steps, change):
    """On batches of everything; with either, it is not."""
    options = {"max_norm": 1e9, "noise_multiplier": 0.0, "batch_size": 40, "accountant": "unamplified"}
    run = train(make(**{**options, **change}), steps)
    plain, (x, y, _) = mlp(), data().tensors
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        losses_of(plain, x, y).mean().backward()
        optimizer.step()
    assert torch.allclose(flat(run.model), flat(plain), atol=1e-5) is (not change)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) / 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (torch.tanh(x @ self.weight + self.frozen) @ self.weight.T)[:, :3]


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.attention = nn.Embedding(6, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        found = self.words(x.abs().long().clamp(max=5))
        return self.head(self.attention(found, found, found, need_weights=False)[0].mean(1))


MODELS = {
    "convolutions": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 3)),
    "text": Text,
    "tied, frozen and unused parameters, a product by hand": Tied,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Sums of clipped gradients, by the loop; the optimizer may hold what is frozen."""
    torch.manual_seed(0)
    model, seen = MODELS[name](), []
    before = flat(model)
    trained = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    x, y, _ = data().tensors
    run = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_norm=0.3)
    train(run, steps=1, seen=seen)
    torch.manual_seed(0)
    one = MODELS[name]()
    kept = [p for p in one.parameters() if p.requires_grad]
    expected = torch.zeros(int(trained.sum()))
    for i in seen[0]:
        grads = torch.autograd.grad(
            F.cross_entropy(one(x[i : i + 1]), y[i : i + 1]), kept, allow_unused=True, materialize_grads=True
        )
        row = torch.cat([g.flatten() for g in grads])
        expected += row * min(1.0, 0.3 / float(row.norm())) / 8
    torch.testing.assert_close((before - flat(model))[trained], expected)
    assert torch.equal(flat(model)[~trained], before[~trained])


def test_batch_normalisation_is_replaced_before_the_optimizer_is_made():
    """Or refused; a model that has none is left as it is."""
    linear = nn.Linear(5, 3)
    assert private.batch_norm_to_group_norm(linear) is linear
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(errors.PrivacyError, match="batch normalisation"):
        make(model, optimizer=optimizer)
    model[1] = nn.GroupNorm(2, 6)  # with parameters of its own
    with pytest.raises(errors.PrivacyError, match="in only one of model and optimizer"):
        make(model, optimizer=optimizer)
    train(make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))


def test_figures():
    """Those of its accountants, within the difference between their orders and those of dp-accounting."""
    settings = {"sample_rate": 0.04, "steps": 2250, "delta": 1e-5}
    assert private.epsilon(noise_multiplier=1.5, **settings, accountant="rdp") == pytest.approx(7.3291, rel=0.01)
    assert private.epsilon(noise_multiplier=1.5, **settings) == pytest.approx(6.7774, rel=0.01)
    assert private.noise_multiplier(epsilon=8, **settings, accountant="rdp") == pytest.approx(1.416, rel=0.01)
    settings["steps"] = 2000
    assert private.noise_multiplier(epsilon=8, **settings, accountant="rdp") == pytest.approx(1.3562, rel=0.01)


@pytest.mark.parametrize("state", [{}, {"1": 2}, {"steps": 3}], ids=str)
def test_what_is_no_state(state):
    with pytest.raises(errors.PrivacyError, match="load_state_dict: the state is that of a run with another"):
        make().load_state_dict(state)


def test_a_sample_rate_of_almost_nothing():
    run = train(make(dataset=TensorDataset(*data(2000).tensors), batch_size=1, delta=1e-4), steps=20)
    assert run.steps == 20


def test_clipped_sums_of_the_common_model():
    x, y, _ = data().tensors
    assert float(clipped_sum(mlp(), x[:1], y[:1], 0.01).norm()) == pytest.approx(0.01)
