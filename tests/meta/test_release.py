"""One version and one address everywhere, and workflows whose commands exist."""

import importlib
import json
import re
from pathlib import Path

import pytest

import gradrein

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
ADDRESS = re.search(r'^Repository = "https://(.*)"', PROJECT, re.MULTILINE)[1]
FOLDERS = [".github", "docs", "src", "tools", "examples", "benchmarks"]
TEXTS = {".md", ".toml", ".yml", ".yaml", ".cff", ".py", ".ipynb", ".json"}


def files():
    """Everything a release is made of, without what a build of the site writes."""
    yield from (path for path in ROOT.iterdir() if path.suffix in TEXTS)
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS and "live" not in path.parts)


def test_the_version_is_one():
    assert '\ndynamic = ["version"]\n' in PROJECT
    assert 'version = {attr = "gradrein.__version__"}' in PROJECT
    assert f"\nversion: {gradrein.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"Documents gradrein {gradrein.__version__}." in (ROOT / "mkdocs.yml").read_text()


def test_the_address_is_one():
    pages = f"{ADDRESS.split('/')[1]}.github.io/{ADDRESS.split('/')[2]}/"
    for path in files():
        text = path.read_text()
        own = re.findall(r"github\.com/[\w.-]+/gradrein\b", text) + re.findall(r"[\w-]+\.github\.io/gradrein/", text)
        assert set(own) <= {ADDRESS, pages}, path


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_what_exists(path):
    text = path.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run:.*\bmake ([\w-]+)", text)) <= targets
    assert all((ROOT / name).exists() for name in re.findall(r"\b(?:tools|src)/[\w/]+\.\w+", text))
    assert not re.findall(r"uses: (?!\./)\S+@(?![0-9a-f]{40} # v)", text), "pin actions to a commit"


@pytest.fixture
def publish(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "site"))
    return importlib.import_module("publish")


def test_versions_of_the_site(publish, tmp_path):
    site, pages = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    pages.mkdir()
    for version in ("dev", "v0.9.0", "v0.10.0", "dev"):
        (site / "index.html").write_text(version)
        publish.place(site, pages, version)
    listed = json.loads((pages / "versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in listed] == [("0.10.0", ["latest"]), ("0.9.0", []), ("dev", [])]
    assert (pages / "latest" / "index.html").read_text() == "v0.10.0"
    assert "latest/" in (pages / "index.html").read_text()
