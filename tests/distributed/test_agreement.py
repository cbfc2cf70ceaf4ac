"""Agreement between ranks, with the ranks simulated: what each sends, and what all of them see."""

import pytest
import torch

from gradrein._distributed import agreement
from gradrein._distributed.fingerprints import combine_fingerprints, fingerprint, parameter_fingerprints


def headers(words, largest, faults):
    return [agreement._header(list(w), fault, largest) for w, fault in zip(words, faults, strict=True)]


def reduced(rows, largest):
    rows = torch.tensor(rows, dtype=torch.float64)
    return rows.amax(0) if largest else rows.sum(0)


class Among:
    """A group of some size, as far as comparing headers looks at it."""

    def __init__(self, size):
        self.group = self
        self.size = lambda: size


def verdicts(words, largest, faults=None):
    """Whether each rank finds that all made the same call, and whether it finds that all lack the same."""
    rows = headers(words, largest, faults or [False] * len(words))
    found = reduced(rows, largest)
    answers = []
    for row in [list(each) for each in {tuple(row) for row in rows}]:
        each = agreement.Agreement("numbers", "call")
        answers.append((each._agreed(found, row, Among(len(words)), largest), each.alike))
    return answers


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("n", [2, 3, 7, 1024, 16384])
def test_every_rank_finds_the_same(largest, n):
    generator = torch.Generator().manual_seed(n)
    for _ in range(20 if n < 100 else 3):
        word = lambda: int(torch.randint(agreement._PRIME, (), generator=generator))  # noqa: E731
        usual = [word() for _ in range(8)]
        assert set(verdicts([usual] * n, largest)) == {(True, True)}
        odd, at = [*usual], int(torch.randint(8, (), generator=generator))
        odd[at] = (odd[at] + 1 + word() % (agreement._PRIME - 1)) % agreement._PRIME
        for others in ([odd] + [usual] * (n - 1), [odd] * (n // 2) + [usual] * (n - n // 2)):
            assert set(verdicts(others, largest)) == {(at >= 4, at < 4)}


@pytest.mark.parametrize("words", [[[1] * 8, [3] * 8, [2] * 8], [[0] * 8, [4] * 8, [2] * 8]])
def test_a_rank_that_has_the_mean_of_all_is_no_exception(words):
    assert set(verdicts(words, False)) == {(False, False)}


@pytest.mark.parametrize("largest", [False, True])
def test_a_fault_of_one_is_known_to_all(largest):
    assert {agreed for agreed, _ in verdicts([[5] * 8] * 4, largest, [False, True, False, False])} == {False}


def test_sums_of_words_are_exact():
    largest = (agreement._PRIME - 1) ** 2
    assert 2**20 * largest < 2**53
    assert all(0 <= w < agreement._PRIME for w in agreement._words(2**64 - 1))
    assert len({tuple(agreement._words(n)) for n in range(0, 2**64, 2**58)}) == 64


def test_fingerprints_tell_names_shapes_types_and_order():
    a, b = torch.zeros(2, 3), torch.zeros(3, 2)
    base = combine_fingerprints(parameter_fingerprints(["a", "b"], [a, b]))
    assert base == combine_fingerprints(parameter_fingerprints(["a", "b"], [a.clone(), b.clone()]))
    others = [
        (["b", "a"], [a, b]),
        (["a", "b"], [b, a]),
        (["a", "b"], [a, a]),
        (["a", "b"], [a.double(), b]),
        (None, [a, b]),
    ]
    found = [combine_fingerprints(parameter_fingerprints(names, ps)) for names, ps in others]
    assert base not in found
    assert 0 <= base < 2**64
    # Shards in plain tensors may differ in shape.
    shards = [parameter_fingerprints(["a"], [torch.zeros(n, 3)], [True]) for n in (1, 2)]
    assert shards[0] == shards[1]
    assert fingerprint("x") == fingerprint("x") != fingerprint("y")
