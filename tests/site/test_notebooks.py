"""Every notebook runs, and stands in the tree as it was run: with outputs, and a way to open it in Colab."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="notebooks draw with matplotlib: make test-docs")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))
import notebooks  # noqa: E402

PATHS = sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = json.loads(path.read_text())
    kinds = [[one["output_type"] for one in cell.get("outputs", ())] for cell in stored["cells"]]
    assert any(kinds)
    notebooks.run(stored, path.name)
    assert [[one["output_type"] for one in cell.get("outputs", ())] for cell in stored["cells"]] == kinds


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_opens_in_colab_and_as_a_page(path, tmp_path):
    notebook = json.loads(path.read_text())
    assert f"/docs/notebooks/{path.name})" in notebooks.source(notebook["cells"][0])
    written = notebooks.page(path.stem, notebook, tmp_path)
    assert "[Open in Colab](https://" in written
    assert "colab-badge" not in written
