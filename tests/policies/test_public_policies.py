"""`gradrein.policies` is what `__all__` says, documented by a row and an example (both run in tests/meta)."""

import inspect
from pathlib import Path

import pytest

from gradrein import policies

ROOT = Path(__file__).parents[2]


def test_all_is_the_public_surface():
    public = {n for n, v in vars(policies).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(policies.__all__)


@pytest.mark.parametrize("name", [n for n in policies.__all__ if n.startswith(("By", "SkipS"))])
def test_learning_policies_have_a_row_and_settings_by_keyword(name):
    assert f"| `{name}(" in (ROOT / "docs" / "adaptive.md").read_text()
    arguments = inspect.signature(getattr(policies, name)).parameters.values()
    by_keyword = [argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY]
    assert len(by_keyword) >= 2
    assert "warmup" in by_keyword or "warmup" not in [argument.name for argument in arguments]
