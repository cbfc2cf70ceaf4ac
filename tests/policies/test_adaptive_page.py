"""The page and the docstrings run as written."""

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import gradrein
from gradrein import policies

PAGE = Path(__file__).parents[2] / "docs" / "adaptive.md"
MODULES = [f"gradrein.policies.{module.name}" for module in pkgutil.iter_modules(policies.__path__)]


def test_every_block_of_the_page_runs(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    assert "of 50 steps would have been clipped" in capsys.readouterr().out


def test_the_numbers_are_those_that_were_recorded(monkeypatch):
    folder = PAGE.parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    recorded = json.loads((folder / "results" / "steady.json").read_text())
    assert importlib.import_module("steady_table").tables(recorded) == (folder / "results" / "steady.md").read_text()


def test_every_policy_has_a_row():
    text = PAGE.read_text()
    assert [
        name
        for name in policies.__all__
        if name.startswith(("By", "Skip")) and name != "Skip" and f"| `{name}(" not in text
    ] == []


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    found = doctest.testmod(importlib.import_module(name), extraglobs={"gradrein": gradrein, "torch": torch})
    assert not found.failed
