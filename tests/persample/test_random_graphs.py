"""Some random graphs; `make fuzz` runs as many as you like."""

from collections import Counter

import pytest

from .random_graphs import WrongError, check, coupled, described, drawn

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = range(80)
OUTCOMES = Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_right_or_refused(seed):
    graph = drawn(seed)
    try:
        OUTCOMES.update(check(graph))
    except WrongError as error:
        pytest.fail(f"{error}\n{described(graph)}")


def test_few_builds_are_refused():
    """Refusing all of them would be right, and of no use."""
    if OUTCOMES.total() < len(SEEDS):
        pytest.skip("too few graphs were run before")
    assert OUTCOMES["answered"] > 0.6 * OUTCOMES.total()
    assert OUTCOMES["unsupported"] < 0.05 * OUTCOMES.total()


@pytest.mark.parametrize("seed", SEEDS[::8])
def test_steps_without_coupling_keep_samples_apart(seed):
    graph = drawn(seed)
    weights = graph.weights()
    for build in range(len(graph.moods)):
        assert graph.couples or not coupled(graph, weights, build)
