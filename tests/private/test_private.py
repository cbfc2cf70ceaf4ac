"""A step is what the papers say: clipped sums, noise once, over the expected batch size."""

import pytest
import torch
from common import N, clipped_sum, data, flat, losses_of, make, mlp, train
from torch import nn
from torch.utils.data import TensorDataset

from gradrein import errors, private

PARTS = {"whole": None, "in twos": 2, "one by one": 1, "in fives": 5}


@pytest.mark.parametrize("largest", PARTS.values(), ids=PARTS)
def test_without_noise_it_is_the_sum_of_the_obvious_loop(largest):
    run, seen = make(noise_multiplier=0.0, max_norm=0.5, max_physical_batch=largest), []
    before = flat(run.model)
    train(run, steps=1, seen=seen)
    x, y, _ = data().tensors
    expected = clipped_sum(mlp(), x[seen[0]], y[seen[0]], 0.5) / 8
    torch.testing.assert_close((before - flat(run.model)) / 0.5, expected)
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"gamma": 0.01}, {"max_norm": {"0.*": 0.3, "2.weight": 0.2, "*": 0.1}}], ids=str
)
def test_parts_change_nothing(options):
    whole, parts = train(make(**options), 2), train(make(**options, max_physical_batch=3), 2)
    assert whole.steps == parts.steps == 10
    torch.testing.assert_close(flat(whole.model), flat(parts.model))


def zero_model(width):
    """One whose losses move nothing: what is left is noise."""
    model = nn.Linear(width, 1)
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize("parts", [1, 2, 4, 16])
def test_noise_is_added_once_for_all_parts(parts):
    """20,000 numbers: the standard deviation is right to 2.5%, at five standard errors of the estimate."""
    dataset = TensorDataset(torch.zeros(64, 20_000))
    largest = None if parts == 1 else 16 // parts
    run = make(zero_model(20_000), dataset, 16, 1.0, max_norm=3.0, noise_multiplier=2.0, max_physical_batch=largest)
    taken, count = False, 0
    for (x,) in run.loader:
        taken, count = run.step(run.model(x).squeeze(1) * 0), count + 1
        if taken:
            break
    assert count >= max(1, parts // 2)
    noise = run.model.weight.detach()
    assert float(noise.std()) == pytest.approx(2.0 * 3.0 / 16, rel=0.025)
    assert abs(float(noise.mean())) < 5 * 0.375 / 20_000**0.5


@pytest.mark.parametrize("options", [{}, {"secure": True}, {"quantile": private.Quantile(noise=0.6)}], ids=str)
def test_noise_is_normal_and_never_the_same(options):
    run = make(zero_model(30_000), TensorDataset(torch.zeros(20, 30_000)), 4, 1.0, **options)
    steps, before = [], run.model.weight.detach().clone()
    for (x,) in run.loader:
        run.step(run.model(x).squeeze(1) * 0)
        steps.append((run.model.weight.detach() - before).flatten() * 4)
        before = run.model.weight.detach().clone()
    multiplier = (1 - (2 * 0.6) ** -2) ** -0.5 if "quantile" in options else 1.0
    first = steps[0] / multiplier
    limits = [1.0] * len(steps)
    assert abs(float(torch.corrcoef(torch.stack(steps[:2]))[0, 1])) < 0.03
    assert float(first.std()) == pytest.approx(limits[0], rel=0.025)
    ordered = first.double().sort().values
    normal = torch.special.ndtr(ordered)
    rank = (torch.arange(len(ordered), dtype=torch.float64) + 0.5) / len(ordered)
    assert float((normal - rank).abs().max()) < 1.95 / len(ordered) ** 0.5  # Kolmogorov's distance, one in a thousand
    assert float((first.abs() > 3).double().mean()) == pytest.approx(0.0027, abs=0.0016)


@pytest.mark.parametrize("options", [{}, {"secure": True}], ids=str)
def test_each_parameter_has_noise_of_its_own(options):
    run = make(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), **options)
    before = [p.detach().clone() for p in run.model.parameters()]
    for x, _, _ in run.loader:
        run.step(run.model(x).sum(1) * 0)
        break
    first, _, second, _ = (p.detach() - b for p, b in zip(run.model.parameters(), before, strict=True))
    assert not torch.allclose(first, second, atol=1e-4)


def test_noise_reaches_parameters_that_no_loss_depends_on():
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(90, 90)})
    run = make(model, lr=1.0, max_norm=2.0, noise_multiplier=3.0)
    before = model["unused"].weight.detach().clone()
    for x, y, _ in run.loader:
        run.step(losses_of(model["used"], x, y))
        break
    assert float((model["unused"].weight.detach() - before).std()) == pytest.approx(2.0 * 3.0 / 8, rel=0.05)


def test_thresholds_for_groups_add_up_as_squares():
    run = make(zero_model(20_000), TensorDataset(torch.zeros(8, 20_000)), 8, 1.0, max_norm={"weight": 3.0, "bias": 4.0})
    for (x,) in run.loader:
        run.step(run.model(x).squeeze(1) * 0)
    assert float(run.model.weight.detach().std()) == pytest.approx(5.0 / 8, rel=0.025)


def test_groups_are_clipped_by_themselves():
    limits = {"0.*": 0.3, "*": 0.2}
    run, seen = make(noise_multiplier=0.0, max_norm=limits), []
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    train(run, steps=1, seen=seen)
    model, (x, y, _) = mlp(), data().tensors
    for pattern, limit in (("0.", 0.3), ("2.", 0.2)):
        part = {name: p for name, p in model.named_parameters() if name.startswith(pattern)}
        total = {name: torch.zeros_like(p) for name, p in part.items()}
        for i in seen[0]:
            grads = torch.autograd.grad(losses_of(model, x[i : i + 1], y[i : i + 1]).sum(), list(part.values()))
            norm = float(torch.cat([g.flatten() for g in grads]).norm())
            for name, g in zip(part, grads, strict=True):
                total[name] += g * min(1.0, limit / norm)
        for name, expected in total.items():
            torch.testing.assert_close((before[name] - dict(run.model.named_parameters())[name]) / 0.5, expected / 8)


def test_automatic_clipping_bounds_every_sample():
    run, seen = make(noise_multiplier=0.0, gamma=0.01, lr=1.0, batch_size=1), []
    before = flat(run.model)
    for x, y, _ in run.loader:
        size = run._open[0]
        run.step(losses_of(run.model, x, y))
        moved = float((flat(run.model) - before).norm())
        assert moved < size + 1e-5
        assert moved > 0 or not size
        seen.append(size)
        before = flat(run.model)
    assert 0 in seen, "no batch was empty: nothing was shown"


def test_a_quantile_is_found_and_costs_what_is_said():
    dataset = TensorDataset(torch.linspace(0.1, 4.0, 400).unsqueeze(1))  # the norm of each sample's gradient
    model = nn.Linear(1, 1, bias=False)
    run = make(model, dataset, 100, 0.0, max_norm=20.0, quantile=private.Quantile(0.75, rate=0.3))
    for _ in range(40):
        for (x,) in run.loader:
            run.step(model(x).squeeze(1))
    assert run.state_dict()["max_norm"]["*"] == pytest.approx(3.0, abs=0.6)
    assert run._gradient_noise**-2 + (2 * 5.0) ** -2 == pytest.approx(1.0)  # of gradients and counts together


@pytest.mark.parametrize("largest", [None, 1], ids=["whole", "in parts"])
def test_empty_batches_are_steps_of_noise(largest):
    run, seen = make(batch_size=1, max_physical_batch=largest, lr=0.01), []
    before = flat(run.model)
    for x, y, number in run.loader:
        empty = run._open[0] == 0
        assert len(number) == max(1, run._open[0])
        if run.step(losses_of(run.model, x, y)):
            assert not torch.equal(flat(run.model), before)
            before = flat(run.model)
            seen.append(empty)
    assert len(seen) == N
    assert 5 < sum(seen) < 30  # a third of the batches, on average


def test_the_sample_of_an_empty_batch_does_not_count():
    run = make(batch_size=1, noise_multiplier=0.0)
    for x, y, _ in run.loader:
        before, empty = flat(run.model), run._open[0] == 0
        run.step(losses_of(run.model, x, y))
        assert torch.equal(flat(run.model), before) == empty


def test_training_helps_within_a_budget():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 5, generator=generator)
    dataset = TensorDataset(x, (x[:, 0] > 0).long(), torch.arange(400))
    run = train(make(dataset=dataset, batch_size=40, epsilon=6.0, delta=1e-3, epochs=4), 4)
    assert 5.9 < run.epsilon() <= 6.0
    assert float((run.model(x).argmax(1) == (x[:, 0] > 0).long()).float().mean()) > 0.8
    with pytest.raises(errors.PrivacyError, match="all 40 steps that were planned are taken"):
        train(run)


def test_generators_of_training_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    run = make(seed=None)
    torch.manual_seed(5)
    for x, y, _ in run.loader:
        run.step(losses_of(run.model, x, y))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop], ids=lambda o: o.__name__
)
def test_any_optimizer(optimizer):
    model = mlp()
    run = train(make(model, optimizer=optimizer(model.parameters(), lr=1e-2)))
    assert run.steps == 5
    assert torch.isfinite(flat(model)).all()


def test_epsilon_is_that_of_the_steps_taken():
    run = make()
    assert run.epsilon() == 0
    train(run, steps=3)
    expected = private.epsilon(noise_multiplier=1.0, sample_rate=0.2, steps=3, delta=1e-3, accountant="rdp")
    assert run.epsilon() == expected
    assert make(noise_multiplier=0.0).epsilon() == 0
    assert train(make(noise_multiplier=0.0), steps=1).epsilon() == float("inf")
