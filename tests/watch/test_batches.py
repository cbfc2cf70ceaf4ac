"""The samples of bad batches, by the indices of the data loader."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

import gradrein
from gradrein.watch import read_run
from gradrein.watch.analysis.findings.outliers import outliers
from gradrein.watch.analysis.samples import _tail, samples_of
from gradrein.watch.record.batches import BatchTracker

from .runs import healthy

BAD = {7, 91}


class Rows(Dataset):
    """Numbers; two of them are far too large. A row is its own index, so that a batch says what it is made of."""

    def __len__(self):
        return 120

    def __getitem__(self, i):
        return torch.tensor([float(i), 300.0 if i in BAD else 1.0])


def train(loader, path, epochs=10, before_step=lambda _: None, **options):
    """Return the run, and the rows each step was taken on."""
    weight, true = torch.nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=1e-9)  # the weight stays where it is: norms are what the data makes them
    with gradrein.Monitor(optimizer=optimizer, record=path, **options) as monitor:
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                (weight * batch[:, 1]).mean().backward()
                before_step(batch)
                optimizer.step()
                true.append(batch[:, 0].int().tolist())
        report = monitor.report()
    return read_run(path), true, report


def batches(run):
    return {n["after"]: n["batch"] for n in run.notes if "batch" in n}


@pytest.mark.parametrize("seed", range(3))
def test_the_samples_that_make_batches_bad_are_named(tmp_path, seed):
    loader = DataLoader(Rows(), 6, shuffle=True, generator=torch.Generator().manual_seed(seed))
    run, true, report = train(loader, tmp_path / "run.jsonl")
    finding = outliers(report.run)
    assert set(finding.evidence["samples in most of those batches, and in how many"]) == BAD
    assert finding.look.startswith("samples ")
    kept = batches(run)
    assert kept
    assert all(kept[step] == true[step] for step in kept)
    assert all(BAD & set(rows) for rows in kept.values())


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(torch.arange(100).tolist()), "batch_size": 5, "drop_last": True},
        {"batch_sampler": [[i, (i * 7 + 1) % 120, 91 if i % 9 == 0 else 0] for i in range(80)]},
        {"batch_size": 4},
    ],
)
def test_indices_are_those_of_the_batch_before_the_step(tmp_path, options):
    """Whatever draws them; a validation loop between two steps is not mistaken for the training data."""
    held_out = DataLoader(torch.arange(40.0).unsqueeze(1), 3)

    def validate(_):
        with torch.no_grad():
            for _ in held_out:
                pass

    run, true, _ = train(DataLoader(Rows(), **options), tmp_path / "run.jsonl", 4, validate)
    kept = batches(run)
    assert kept
    assert all(kept[step] == true[step] for step in kept)


def test_with_workers_a_batch_is_what_was_asked_for_first(tmp_path):
    loader = DataLoader(Rows(), 6, shuffle=True, num_workers=2, persistent_workers=True)
    it = iter(loader)
    next(it)  # left before its end: what was asked for ahead is never delivered
    run, true, _ = train(loader, tmp_path / "run.jsonl", 6)
    kept = batches(run)
    assert kept
    assert all(kept[step] == true[step] for step in kept)


def test_a_step_of_several_backward_passes_has_the_rows_of_all(tmp_path):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    true = []
    with gradrein.Monitor(optimizer=optimizer, record=tmp_path / "run.jsonl", every=2):
        for _ in range(8):
            rows = []
            for i, batch in enumerate(DataLoader(Rows(), 6)):
                (weight * batch[:, 1]).mean().backward()
                rows += batch[:, 0].int().tolist()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    true.append(rows)
                    rows = []
    kept = batches(read_run(tmp_path / "run.jsonl"))
    assert kept
    assert all(kept[step] == true[step] for step in kept)


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([0.0, 300.0 if i % 40 == 0 else 1.0]) for i in range(200))


class Unsized(Rows):
    def __len__(self):
        raise RuntimeError("no length")


class Failing(Rows):
    def __getitem__(self, i):
        if i == 5:
            raise OSError("unreadable")
        return super().__getitem__(i)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 2),
        DataLoader(Unsized(), 2, sampler=range(120)),
        DataLoader({name: torch.ones(2) for name in "abcdef"}, 2, sampler="abcdef"),
    ],
)
def test_where_indices_say_nothing_there_are_none_and_the_script_goes_on(tmp_path, loader):
    run, true, _ = train(loader, tmp_path / "run.jsonl", 1)
    assert len(run.steps) == len(true)
    assert batches(run) == {}


def test_a_sample_that_cannot_be_loaded_does_not_shift_what_follows(tmp_path):
    it, weight = iter(DataLoader(Failing(), 6)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    failed, true = 0, []
    with gradrein.Monitor(optimizer=optimizer, record=tmp_path / "run.jsonl") as monitor:
        while True:
            try:
                batch = next(it)
            except OSError:
                failed += 1
                continue
            except StopIteration:
                break
            (weight * batch[:, 1]).mean().backward()
            optimizer.step()
            true.append(batch[:, 0].int().tolist())
            optimizer.zero_grad()
            # None of these 19 steps stands out yet; what belongs to the step is known all the same.
            assert monitor._recorder._batches._used == [(true[-1], 120)]
    assert failed == 1


def test_a_record_does_not_fill_with_indices():
    tracker, written = BatchTracker(), 0
    for step in range(400):
        tracker.on_batch((list(range(1000)), 10**6))
        tracker.on_backward()
        batches = tracker.end_step()
        line = tracker.line(batches, {"step": step, "opt": 0, "norm": 1.0 if step % 3 else 9.0, "loss": "nan"})
        written += len(line["batch"]) if line else 0
    assert 0 < written <= 50_000


def test_the_tail_is_an_upper_bound():
    for mean in (0.01, 0.5, 3.0, 20.0):
        for n in range(1, 60):
            exact = 1 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(n))
            assert _tail(n, mean) >= exact - 1e-12


def test_the_largest_batch_is_the_one_that_stands_out_most():
    """Not the one with the largest norm: a finding calls the step the largest that is farthest above its surroundings."""
    run = healthy()
    run.norm[3] = 1000.0
    line = {"opt": run.opt, "dataset": 50}
    run.notes.extend([{**line, "after": 3, "batch": [1, 2]}, {**line, "after": 7, "batch": [3, 4]}])
    label = "indices of the samples in the batch of the largest"
    assert samples_of(run, {3: 1.0, 7: 2.0}) == {f"{label} (step 7)": [3, 4]}
    assert samples_of(run, {3: 1.0, 9: 2.0}) == {f"{label} whose samples were recorded (step 3)": [1, 2]}
    assert samples_of(run, {9: 2.0}) == {}
