"""Batches are drawn as they are accounted for, from the loader that was given, and nothing else is stepped on."""

import functools
import operator

import pytest
import torch
from common import N, data, flat, losses_of, make, mlp, train
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from gradrein import errors
from gradrein.private._random import Secure, Seeded
from gradrein.private._sampling import Parts

SOURCES = {
    "seeded": lambda: Seeded(b"k", torch.device("cpu")),
    "secure": lambda: Secure(b"k" * 32),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_each_sample_is_drawn_with_the_same_chance_apart_from_others(source):
    """4,000 batches: frequencies, sizes and pairs are within five standard errors of independent draws."""
    parts, steps = Parts(20, 5, None, False, source(), (0, 1)), 4000
    drawn = torch.zeros(steps, 20)
    for epoch in range(0, steps, parts.in_epoch):
        waiting = parts.begin(epoch)
        for row, indices in zip(drawn[epoch:], parts, strict=False):
            row[indices] = float(waiting.popleft()[0] > 0)
    five = 5 * (0.25 * 0.75 / steps) ** 0.5
    assert float((drawn.mean(0) - 0.25).abs().max()) < five
    assert float(drawn.sum(1).mean()) == pytest.approx(5, abs=five * 20**0.5)
    assert float(drawn.sum(1).var()) == pytest.approx(20 * 0.25 * 0.75, rel=0.15)  # that of a binomial
    pairs = drawn.T @ drawn / steps
    assert float((pairs - pairs.diag().diag() - 0.0625 * (1 - torch.eye(20))).abs().max()) < 5 * (0.0625 / steps) ** 0.5
    in_a_row = (drawn[1:] * drawn[:-1]).mean(0)
    assert float((in_a_row - 0.0625).abs().max()) < 5 * (0.0625 / steps) ** 0.5


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("largest", [None, 1, 4])
def test_ranks_and_parts_share_a_batch(source, ranks, largest):
    def batches(rank, ranks, largest):
        parts, found, mine = Parts(30, 6, largest, False, source(), (rank, ranks)), [], []
        for epoch in range(0, 50, parts.in_epoch):
            waiting = parts.begin(epoch)
            for indices in parts:
                size, last = waiting.popleft()
                assert len(indices) == max(1, size) <= max(1, largest or 30)
                mine.append(indices[:size])
                if last:
                    found.append(mine)
                    mine = []
        return found

    whole = [sorted(functools.reduce(operator.iadd, parts, [])) for parts in batches(0, 1, None)]
    each = [batches(rank, ranks, largest) for rank in range(ranks)]
    for number, expected in enumerate(whole):
        assert len({len(one[number]) for one in each}) == 1, "as many parts on every rank"
        assert sorted(i for one in each for part in one[number] for i in part) == expected


def test_shuffled_batches_have_each_sample_once_in_an_epoch():
    seen = []
    run = train(make(accountant="unamplified", batch_size=12, noise_multiplier=5.0), 2, seen=seen)
    assert [len(ids) for ids in seen] == [12, 12, 12, 4] * 2
    assert (
        sorted(functools.reduce(operator.iadd, seen[:4], []))
        == sorted(functools.reduce(operator.iadd, seen[4:], []))
        == list(range(N))
    )
    assert seen[0] != seen[4]
    assert run.epsilon() > train(make(batch_size=12, noise_multiplier=5.0), 2).epsilon()


def test_an_epoch_is_as_long_as_that_of_the_loader():
    assert len(make(batch_size=12).loader) == 4
    assert make(batch_size=12).sample_rate == 12 / N
    with pytest.raises(TypeError, match="depends on what is drawn"):
        len(make(max_physical_batch=3).loader)
    assert train(make(batch_size=12), 3).steps == 12
    assert train(make(batch_size=N), 1).steps == 1


def test_the_same_seed_gives_the_same_batches():
    first, same, other, none = [], [], [], []
    for seed, seen in ((0, first), (0, same), (1, other), (None, none)):
        train(make(seed=seed), 2, seen=seen)
    assert first == same
    assert len({str(first), str(other), str(none)}) == 3


class Dicts(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        x, y, number = data()[index]
        return {"x": x, "y": y, "number": number, "name": f"sample {index}"}


def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in ("x", "y")} | {
        "names": [row["name"] for row in rows]
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_collate_function_and_workers_are_kept(workers):
    model = mlp()
    loader = DataLoader(Dicts(), batch_size=8, collate_fn=collate, num_workers=workers, persistent_workers=workers > 0)
    run, names = make(model, loader=loader), []
    for _ in range(2):
        for batch in run.loader:
            names.append(batch["names"])
            run.step(losses_of(model, batch["x"], batch["y"]))
    assert run.steps == 10
    seen, alone = [], make()
    train(alone, 2, seen=seen)
    assert [[int(name.split()[1]) for name in batch] for batch in names] == seen
    assert torch.equal(model[0].weight, alone.model[0].weight)
    assert run.loader._loader.num_workers == workers


def test_pinning_and_the_rest_are_kept():
    def begin(worker):
        raise AssertionError(worker)

    loader = DataLoader(
        data(), batch_size=8, num_workers=2, prefetch_factor=3, timeout=7, worker_init_fn=begin, pin_memory=False
    )
    ours = make(loader=loader).loader._loader
    assert (ours.prefetch_factor, ours.timeout, ours.worker_init_fn) == (3, 7, begin)
    assert ours.dataset is loader.dataset


class Endless(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(5)])


REFUSED = {
    "weights": (
        DataLoader(data(), 8, sampler=WeightedRandomSampler([1.0] * N, N)),
        "WeightedRandomSampler.*weight the loss",
    ),
    "batch sampler": (
        DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 8, False)),
        "batch sampler",
    ),
    "no batches": (DataLoader(data(), batch_size=None), "batch_size=None"),
    "iterable": (DataLoader(Endless(), 8), "iterable"),
    "drop_last": (DataLoader(data(), 8, drop_last=True), "drop_last"),
    "replacement": (DataLoader(data(), 8, sampler=RandomSampler(data(), replacement=True)), "with replacement"),
    "fewer": (DataLoader(data(), 8, sampler=RandomSampler(data(), num_samples=10)), "a number of samples"),
    "ranks": (DataLoader(data(), 8, sampler=DistributedSampler(data(), 2, 0)), "DistributedSampler.*ranks share"),
    "too large": (DataLoader(data(), N + 1), "a batch of 41 is larger than the dataset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loaders_that_are_refused(name):
    loader, reason = REFUSED[name]
    with pytest.raises(errors.PrivacyError, match=f"{reason}"):
        make(loader=loader)


@pytest.mark.skipif("in_order" not in DataLoader.__init__.__annotations__, reason="this torch has no in_order")
def test_batches_out_of_order():
    with pytest.raises(errors.PrivacyError, match="in_order=False"):
        make(loader=DataLoader(data(), 8, in_order=False))


def test_what_is_no_loader():
    with pytest.raises(errors.ArgumentTypeError, match="must be a torch DataLoader, found list"):
        make(loader=[(torch.zeros(2, 5), torch.zeros(2))])


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_the_loader_does_not_matter(shuffle):
    seen, expected = [], []
    train(make(loader=DataLoader(data(), batch_size=8, shuffle=shuffle)), seen=seen)
    train(make(), seen=expected)
    assert seen == expected


def test_a_step_without_a_batch_or_twice_on_one():
    run = make()
    x, y, _ = data().tensors
    with pytest.raises(errors.PrivacyError, match="no batch of `run.loader` is left to step on"):
        run.step(losses_of(run.model, x[:8], y[:8]))
    for x, y, _ in run.loader:
        run.step(losses_of(run.model, x, y))
        with pytest.raises(errors.PrivacyError, match="Each is good for one step"):
            run.step(losses_of(run.model, x, y))
    assert run.steps == 5


def test_another_number_of_losses():
    run = make()
    for x, y, _ in run.loader:
        several = losses_of(run.model, torch.cat([x, x]), torch.cat([y, y]))
        for losses in (several, losses_of(run.model, x, y).mean(), losses_of(run.model, x, y)[1:]):
            with pytest.raises(errors.PrivacyError, match=f"has {len(x)} samples, and .* losses were passed"):
                run.step(losses)
        run.step(several.view(2, -1).T)  # two losses of each sample
    assert run.steps == 5


@pytest.mark.parametrize("largest", [None, 2])
def test_a_batch_that_is_skipped(largest):
    run = make(max_physical_batch=largest)
    batches = iter(run.loader)
    next(batches)
    with pytest.raises(errors.PrivacyError, match="was not stepped on"):
        next(batches)
    train(run)  # from the beginning
    assert run.steps == 5


def test_two_loops_at_once():
    run = make()
    first = iter(run.loader)
    x, y, _ = next(first)
    run.step(losses_of(run.model, x, y))
    next(iter(run.loader))
    with pytest.raises(errors.PrivacyError, match="another loop has begun"):
        next(first)


def test_a_wrapper_that_fetches_ahead():
    run = make()
    batches = iter(run.loader)
    with pytest.raises(errors.PrivacyError, match="was not stepped on"):
        list(batches)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_goes_on_with_the_same_batches(shuffled, workers):
    options = {"accountant": "unamplified" if shuffled else "rdp", "max_physical_batch": 3}
    seen, expected = [], []
    run = make(loader=DataLoader(data(), batch_size=8, num_workers=workers), **options)
    for steps in (2, 3, 7):
        train(run, 2, steps=steps, seen=seen)
        if steps == 3:
            next(iter(run.loader))  # begun and left
    train(make(**options), 2, steps=7, seen=expected)
    assert seen == expected


class Users(Dataset):
    """Each has between one and four records."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        generator, count = torch.Generator().manual_seed(index), 1 + index % 4
        return torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator)


def join(users):
    of = torch.repeat_interleave(torch.arange(len(users)), torch.tensor([len(x) for x, _ in users]))
    return torch.cat([x for x, _ in users]), torch.cat([y for _, y in users]), of, len(users)


def test_a_user_with_several_records_is_one_sample():
    """Their losses are added up, and clipped as one: halfway, with one loss for each record, is refused."""
    loader = DataLoader(Users(), batch_size=4, collate_fn=join)
    run = make(loader=loader, noise_multiplier=0.0, max_norm=0.1, lr=1.0)
    for x, y, of, users in run.loader:
        size, before = run._open[0], flat(run.model)
        if len(of) > users:
            with pytest.raises(errors.PrivacyError, match="a user with several records, add their losses up"):
                run.step(losses_of(run.model, x, y))
        losses = losses_of(run.model, x, y)
        expected = torch.zeros_like(before)
        for user in range(size):
            grads = torch.autograd.grad(losses[of == user].sum(), list(run.model.parameters()), retain_graph=True)
            one = torch.cat([g.flatten() for g in grads])
            expected += one * min(1.0, 0.1 / float(one.norm())) / 4
        run.step(torch.zeros(users).index_add(0, of, losses))
        torch.testing.assert_close(before - flat(run.model), expected)
    with pytest.raises(TypeError, match="sample_groups"):
        make(sample_groups=torch.arange(N))
