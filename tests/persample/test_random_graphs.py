"""A few hundred random graphs; `make fuzz` runs as many as you like."""

import pytest

from .random_graphs import WrongError, check, coupled, described, drawn

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = range(240)


@pytest.mark.parametrize("seed", SEEDS)
def test_right_or_refused(seed):
    graph = drawn(seed)
    try:
        check(graph)
    except WrongError as error:
        pytest.fail(f"{error}\n{described(graph)}")


@pytest.mark.parametrize("seed", SEEDS[::8])
def test_steps_without_coupling_keep_samples_apart(seed):
    graph = drawn(seed)
    weights = graph.weights()
    for build in range(len(graph.moods)):
        assert graph.couples or not coupled(graph, weights, build)


def test_a_seed_is_a_graph():
    for seed in SEEDS[:5]:
        graph = drawn(seed)
        again = [graph.build(graph.weights(), 1).detach() for _ in range(2)]
        assert again[0].equal(again[1])
