"""What would make epsilon wrong is refused, and nothing is changed."""

import copy

import pytest
import torch
from common import N, clipped_sum, data, flat, losses_of, make, mlp, train
from torch import nn
from torch.utils.data import DataLoader

import gradrein
from gradrein import errors, private


def first_batch(run):
    x, y, _ = next(iter(run.loader))
    return x, y


def refuses(run, change, kind, reason):
    """After a change, a step raises, and parameters are those after the change."""
    before = flat(run.model)
    x, y = first_batch(run)
    change(run, x, y)
    after = flat(run.model)
    with pytest.raises(kind, match=reason):
        run.step(losses_of(run.model, x, y))
    assert torch.equal(flat(run.model), after)
    assert run.steps == 0
    return before


def by_backward(run, x, y):
    losses_of(run.model, x, y).mean().backward()


def by_another_optimizer(run, x, y):
    losses_of(run.model, x, y).mean().backward()
    other = torch.optim.SGD(run.model.parameters(), lr=0.1)
    other.step()
    other.zero_grad()


def by_hand(run, x, y):
    with torch.no_grad():
        run.model[0].weight.mul_(0.9)


def by_freezing(run, x, y):
    run.model[0].weight.requires_grad_(False)


def by_a_new_parameter(run, x, y):
    run.model.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def by_a_hook(run, x, y):
    run.model[0].weight.register_hook(lambda g: g * 2)


CHANGES = {
    "backward": (by_backward, errors.PrivacyError, "has a gradient that does not come from here"),
    "another optimizer": (
        by_another_optimizer,
        errors.PrivacyError,
        "changed since the last step, by another optimizer",
    ),
    "by hand": (by_hand, errors.PrivacyError, "`0.weight` was changed"),
    "freezing": (by_freezing, errors.PrivacyError, "other parameters require a gradient"),
    "a new parameter": (by_a_new_parameter, errors.PrivacyError, "other parameters require a gradient"),
    "a hook": (by_a_hook, errors.UnsupportedOperationError, "hook"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_by_others(name):
    change, kind, reason = CHANGES[name]
    refuses(make(), change, kind, reason)


def test_an_optimizer_sees_nothing_between_parts():
    """The sum of a part has no noise: stepping on it would publish it."""
    run = make(max_physical_batch=2)
    before = flat(run.model)
    for x, y, _ in run.loader:
        if run.step(losses_of(run.model, x, y)):
            break
        assert all(p.grad is None for p in run.model.parameters())
        run.optimizer.step()
        assert torch.equal(flat(run.model), before)
    assert run.steps == 1


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        out = self.linear(x)
        return out - out.mean(0)


class Statistics(nn.Module):
    """Normalises by a mean of past batches: gradients are separate, the buffer holds data."""

    def __init__(self, replaced=False):
        super().__init__()
        self.linear, self.replaced = nn.Linear(5, 3), replaced
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        out = self.linear(x - self.mean)
        with torch.no_grad():
            if self.replaced:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            else:
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return out


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g / 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return Halves.apply(x, self.weight)


class Reentrant(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.linear, self.reentrant = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x.requires_grad_(), use_reentrant=self.reentrant)


MODELS = {
    "coupling": (Mixing, errors.BatchCouplingError, "mixes the samples|depends on|enter"),
    "statistics": (Statistics, errors.PrivacyError, "the buffer `mean` has changed"),
    "replaced statistics": (lambda: Statistics(True), errors.PrivacyError, "the buffer `mean` has changed"),
    "custom op": (Custom, errors.UnsupportedOperationError, "."),
    "reentrant checkpoint": (lambda: Reentrant(True), errors.UnsupportedOperationError, "use_reentrant=False"),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(5, 3)
        ),
        errors.GradreinError,
        ".",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_refused(name):
    model, kind, reason = MODELS[name]
    torch.manual_seed(0)
    run = make(model())
    before = flat(run.model)
    with pytest.raises(kind, match=reason):
        train(run)
    assert torch.equal(flat(run.model), before)
    assert all(p.grad is None for p in run.model.parameters())


def test_a_frozen_backbone_with_batch_normalisation():
    """The graph does not show it: its statistics do."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.BatchNorm1d(5, affine=False).eval()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.backbone(x))

    run = make(Head())
    train(run)
    run.model.train()
    with pytest.raises(errors.PrivacyError, match="backbone.*running statistics"):
        train(run)
    assert run.steps == 5


def test_batch_normalisation_and_what_replaces_it():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Sequential(nn.Linear(6, 3)))
    with pytest.raises(errors.PrivacyError, match="`1` is a batch normalisation.*batch_norm_to_group_norm"):
        make(model)
    scale = model[1].weight
    private.batch_norm_to_group_norm(model)
    assert type(model[1]) is nn.GroupNorm
    assert model[1].weight is scale
    train(make(model))
    images = private.batch_norm_to_group_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48, affine=False)))
    assert (images[1].num_groups, images[1].affine) == (24, False)
    assert images(torch.randn(2, 3, 5, 5)).shape == (2, 48, 3, 3)
    assert type(private.batch_norm_to_group_norm(nn.BatchNorm3d(7))) is nn.GroupNorm


def test_compiled_models_and_losses():
    """Sizes change at each step: a model is refused, losses cannot be looked into, and a step runs as it is."""
    with pytest.raises(errors.PrivacyError, match="compiled by torch.compile.*Batches change in size"):
        make(torch.compile(mlp(), backend="eager"))
    run = make()
    compiled = torch.compile(lambda x, y: losses_of(run.model, x, y), backend="aot_eager")
    before = flat(run.model)
    x, y = first_batch(run)
    with pytest.raises(errors.UnsupportedOperationError, match="a compiled region"):
        run.step(compiled(x, y))
    assert torch.equal(flat(run.model), before)
    eager = make()
    step = gradrein.compile(lambda x, y: eager.step(losses_of(eager.model, x, y)), eager.model, backend="captured")
    for x, y, _ in eager.loader:
        step(x, y)
    assert eager.steps == 5
    assert torch.equal(flat(eager.model), flat(train(make()).model))


def with_optimizer(optimizer):
    model = mlp()
    return lambda: make(model, optimizer=optimizer(model))


BEFORE = {
    "lacks one": (with_optimizer(lambda m: torch.optim.SGD([m[0].weight], lr=0.1)), "0.bias.*requires_grad_"),
    "has another": (
        with_optimizer(lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)),
        "a parameter outside the model",
    ),
    "lbfgs": (with_optimizer(lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS"),
    "half": (lambda: make(mlp().bfloat16()), "bfloat16.*torch.autocast"),
    "nothing is trained": (
        lambda: make(mlp().requires_grad_(False), optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)),
        "one optimizer has to hold all that is trained",
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_models_and_optimizers_that_do_not_fit(name):
    build, reason = BEFORE[name]
    with pytest.raises(errors.PrivacyError, match=reason):
        build()


ARGUMENTS = {
    "delta": ({"delta": 1 / 40}, "below one over the number of samples, 1/40"),
    "no delta": ({"delta": 0.0}, "above 0"),
    "both": ({"epsilon": 1.0, "noise_multiplier": 1.0, "epochs": 1}, "either noise_multiplier, or epsilon and epochs"),
    "neither": ({"noise_multiplier": None}, "either noise_multiplier, or epsilon and epochs"),
    "no epochs": ({"epsilon": 1.0}, "either noise_multiplier, or epsilon and epochs"),
    "negative noise": ({"noise_multiplier": -1.0}, "not negative"),
    "max_norm": ({"max_norm": 0.0}, "above zero"),
    "infinite": ({"max_norm": float("inf")}, "finite"),
    "patterns": ({"max_norm": {"0.*": 1.0}}, "no pattern matches the parameter"),
    "a pattern too many": ({"max_norm": {"*": 1.0, "0.*": 1.0}}, "is never used"),
    "seed": ({"secure": True, "seed": 3}, "secure=True has no seed"),
    "nonfinite": ({"nonfinite": "ignore"}, "nonfinite is 'raise' or 'drop'"),
    "accountant": ({"accountant": "gdp"}, "'pld', 'rdp' or 'unamplified'"),
    "parts": ({"max_physical_batch": 0}, "whole number of at least 1"),
    "epochs": ({"epochs": 0}, "whole number of at least 1"),
    "quantile": ({"quantile": private.Quantile(noise=0.4)}, "noise of more than 0.5 on the count"),
    "quantile of groups": (
        {"quantile": private.Quantile(noise=2), "max_norm": {"0.*": 1.0, "*": 1.0}},
        "a quantile needs one max_norm",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    options, reason = ARGUMENTS[name]
    with pytest.raises(errors.ArgumentError, match=reason):
        make(**options)


@pytest.mark.parametrize("options", [{"share": 1.5}, {"rate": 0.0}, {"noise": -1.0}], ids=str)
def test_quantiles(options):
    with pytest.raises(errors.ArgumentError):
        private.Quantile(**options)


def test_no_module_and_no_optimizer():
    with pytest.raises(errors.ArgumentTypeError, match="found list, list"):
        private.Private([], [], DataLoader(data(), 8), max_norm=1.0, noise_multiplier=1.0, delta=1e-3)


def test_a_gradient_that_is_not_finite():
    """It is an error, or the sample is left out: the others count as they would without it."""
    dataset = data()
    dataset.tensors[0][7] = float("nan")
    options = {"dataset": dataset, "batch_size": N, "noise_multiplier": 0.0, "accountant": "unamplified", "lr": 1.0}
    run = make(**options)
    before = flat(run.model)
    with pytest.raises(errors.NonFiniteGradientError):
        train(run)
    assert run.steps == 0
    assert all(p.grad is None for p in run.model.parameters())
    assert torch.equal(flat(run.model), before)
    x, y, _ = (torch.cat([t[:7], t[8:]]) for t in dataset.tensors)
    dropped = train(make(**options, nonfinite="drop"))
    torch.testing.assert_close(before - flat(dropped.model), clipped_sum(mlp(), x, y, 1.0) / N)


def test_an_error_in_a_second_group_leaves_nothing_behind():
    dataset = data()
    dataset.tensors[0][:] = float("nan")
    model = nn.ModuleDict({"first": nn.Linear(5, 3), "second": nn.Linear(5, 3)})
    run = make(model, dataset, max_norm={"first.*": 1.0, "*": 1.0})
    x, y = first_batch(run)
    with pytest.raises(errors.NonFiniteGradientError):
        run.step(losses_of(model["first"], torch.ones_like(x), y) + losses_of(model["second"], x, y))
    assert all(p.grad is None for p in model.parameters())


def test_a_copy_of_a_parameter_is_another_model():
    model = mlp()
    with pytest.raises(errors.PrivacyError, match="in only one of model and optimizer"):
        make(copy.deepcopy(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
