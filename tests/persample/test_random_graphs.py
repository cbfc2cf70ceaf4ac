"""Some random graphs; `make fuzz` runs as many as you like."""

from collections import Counter

import pytest

from gradrein.errors import UnsupportedOperationError

from .random_graphs import WrongError, check, coupled, described, drawn, refuse_excuse

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


@pytest.mark.parametrize("text", ["per_sample: a checkpoint is in the way", "per_sample: some other reason"])
def test_a_refusal_without_a_true_reason_is_a_failure(text):
    graph = drawn(3).without_checkpoints()
    with pytest.raises(UnsupportedOperationError):
        refuse_excuse(graph, graph.weights(), 0, UnsupportedOperationError(text))


def test_a_checkpoint_is_a_true_reason_where_the_graph_is_supported_without_it():
    graph = next(g for g in map(drawn, SEEDS) if "checkpoint" in g.places())
    error = UnsupportedOperationError("per_sample: the checkpoint around it provides it only once.")
    refuse_excuse(graph, graph.weights(), 0, error)


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
