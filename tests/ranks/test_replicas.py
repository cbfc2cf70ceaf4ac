"""Ranks that are not called with the same stop before anything is written, all of them."""

import pytest
import replicas

NAMED = {"order", "order of names", "order under torch's name"}
RANKS = [
    *[(2, "line", call) for call in replicas.CALLS],
    *[(4, "square", call) for call in replicas.CALLS],
    *[(2, "mixed", call) for call in sorted(replicas.CALLS.keys() - {"order under torch's name"})],
    (4, "same shapes", "order of names"),
]


@pytest.mark.parametrize(("size", "case", "call"), RANKS)
def test_another_call_is_refused_on_every_rank(request, size, case, call):
    rank_processes = request.getfixturevalue("two" if size == 2 else "four")
    for at in (0, size - 1):
        for kind, text, untouched in rank_processes.run(replicas.called_with_something_else, case, call, at):
            assert kind == "RankError", text
            assert "could not exchange" not in text
            assert "No gradient was changed" in text
            assert untouched
            if size == 2 and call in NAMED:
                assert "do not agree on the parameters, or on their order" in text
            elif size == 2 and call in ("max_norm", "max_norm in a tensor"):
                assert "do not agree on the call: clip_grad_norm_(max_norm=0." in text
            elif size == 2 and call in ("loaded state", "loss"):
                assert {"loaded state": "p=2.0, k=2.0, window=128, loaded=", "loss": "see=2"}[call] in text


def test_stages_with_another_limit(ranks):
    for kind, text, untouched in ranks.run(replicas.stages_with_another_limit, 1):
        assert kind == "RankError"
        assert "do not agree on the call: clip_(ByNorm(max_norm=0." in text
        assert untouched


def test_someone_elses_policy(two):
    two.run(replicas.someone_elses_policy)
