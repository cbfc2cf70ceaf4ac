"""What pages say about speed is what was measured, and pages are as short as was promised."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def page():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("page")


def words(name):
    return len((ROOT / name).read_text().split())


def test_the_front_page_has_the_best_and_the_worst_row(page):
    readme = (ROOT / "README.md").read_text()
    assert readme == page.with_figures(readme), "python benchmarks/page.py"
    assert (ROOT / "docs" / "index.md").read_text() == page.home(readme), "python benchmarks/page.py"


def test_the_benchmarks_are_those_that_were_recorded(page):
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page.page(), "python benchmarks/page.py"


def test_the_worst_row_is_shown(page, tmp_path, monkeypatch):
    rows = [
        {"model": name, "dtype": "float32", "kind": "norm 2", "regime": "under", "faster_than_torch_best": faster}
        for name, faster in (
            ("good", {"median": 4.0, "low": 2.0, "high": 5.0}),
            ("bad", {"median": 0.5, "low": 0.4, "high": 0.8}),
        )
    ]
    monkeypatch.setattr(page, "rows_of", lambda stem: rows if stem == "clip" else [])
    ratios = page.clipping()
    assert str(page.best(ratios)) == "0.25 [0.20-0.50]"
    assert str(page.worst(ratios)) == "2.00 [1.25-2.50]"


@pytest.mark.parametrize(
    ("name", "most"),
    [("README.md", 450), ("docs/index.md", 450), ("docs/benchmarks.md", 1500), ("docs/limits.md", 900)],
)
def test_pages_are_short(name, most):
    assert words(name) <= most


def test_the_docs_are_short():
    assert sum(words(path) for path in PAGES if path.parent.name != "notebooks") <= 28_000


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_cell_is_empty_by_accident(path):
    assert "| None |" not in path.read_text()
