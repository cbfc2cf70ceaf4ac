"""`gradrein.policies` is what `__all__` says, documented, with examples that run (see tests/meta)."""

import inspect

import pytest

from gradrein import policies


def test_all_is_the_public_surface():
    public = {n for n, v in vars(policies).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(policies.__all__)


@pytest.mark.parametrize(
    "name", [n for n in policies.__all__ if n.startswith(("By", "by_", "Skip", "Adaptive", "Policy"))]
)
def test_every_policy_has_an_example(name):
    assert name == "Skip" or ">>>" in inspect.getdoc(getattr(policies, name))


@pytest.mark.parametrize("name", [n for n in policies.__all__ if n.startswith("By")])
def test_settings_after_the_first_are_by_keyword(name):
    kinds = [p.kind for p in inspect.signature(getattr(policies, name)).parameters.values()]
    assert kinds.count(inspect.Parameter.KEYWORD_ONLY) >= 2
    assert "warmup" not in [
        p.name for p in inspect.signature(getattr(policies, name)).parameters.values() if p.kind != p.KEYWORD_ONLY
    ]
