"""Every Python block in README and docs runs; blocks of one page share their names, in order."""

import pathlib
import re

import pytest
import torch.distributed as dist

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "notebooks"),
]

# What pages need of torch that not every torch has.
NEEDS = {
    "docs/compile.md": "autograd_would_have_decomposed",
    "docs/recipes.md": "fully_shard on the CPU",
    "docs/scale.md": "fully_shard on the CPU",
    "docs/start/large-run.md": "fully_shard on the CPU",
}
PACKAGES = {
    "README.md": ["dp_accounting"],
    "docs/index.md": ["dp_accounting"],
    "docs/recipes.md": ["dp_accounting", "peft"],
    "docs/start/private.md": ["dp_accounting"],
    "docs/start/attribution.md": ["faiss"],
}


def name_of(page):
    return str(page.relative_to(ROOT))


def with_needs(page):
    name = name_of(page)
    return pytest.param(page, id=name, marks=[pytest.mark.needs(NEEDS[name])] if name in NEEDS else [])


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [with_needs(page) for page in PAGES])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in PACKAGES.get(name_of(page), ()):
        pytest.importorskip(package, reason="pip install 'gradrein[test]'")
    names = {"__name__": "__main__"}
    try:
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    finally:
        if dist.is_initialized():  # by a block of the page
            dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
        if (
            not target.startswith(("http://", "https://", "mailto:")) and "live/" not in target
        ):  # written by `make docs`
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
