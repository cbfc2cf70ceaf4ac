"""The folders of watch follow time, and import one way: what runs during training knows nothing of what runs after."""

import ast
from pathlib import Path

import gradrein.watch

ROOT = Path(gradrein.watch.__file__).parent
MAY_IMPORT = {
    "format": {"format"},
    "record": {"record", "format"},
    "run": {"run", "format"},
    "analysis": {"analysis", "run"},
    "report": {"report", "analysis", "run", "format"},
    "command": {"command", "report", "analysis", "run", "record", "format"},
}


def imported(path):
    """Return the folders of watch that a file imports from."""
    package = ("gradrein", "watch", *path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            names = [(*target, alias.name) for alias in node.names]
            found |= {name[2] for name in names if name[:2] == ("gradrein", "watch") and len(name) > 2}
    return found & set(MAY_IMPORT)


def test_imports_go_one_way():
    seen = set()
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parts[0]
        if folder in MAY_IMPORT:
            assert imported(path) <= MAY_IMPORT[folder], path
            seen |= {(folder, other) for other in imported(path) if other != folder}
    assert ("report", "analysis") in seen  # the test sees imports at all
    assert ("record", "format") in seen
