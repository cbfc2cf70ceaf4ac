"""Imports between packages go one way, private modules stay at home, and private torch in its place."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradrein"
# Each package may import those before it.
ORDER = [
    "errors",
    "_torch",
    "_events",
    "_warn",
    "_notebook",
    "_devices",
    "_validate",
    "_kernels",
    "_measure",
    "distributed",
    "graph",
]
ORDER += [
    "autograd",
    "persample",
    "attribution",
    "_compile",
    "policies",
    "clip",
    "private",
    "functional",
    "watch",
    "integrations",
    "selftest",
]
# The same for the sub-packages of a package; its own files may import all of them.
INSIDE = {
    "persample": [
        "tracing",
        "engine",
        "layout",
        "representations",
        "ops",
        "owners",
        "coupling",
        "cuts",
        "gate",
        "queries",
    ]
}
# What a gate knows about: ranks, DTensors, hooks, checkpoints. Behind it there are plain local tensors.
OF_THE_GATE = {("_torch", name) for name in ("checkpoint", "dtensor", "fsdp", "hooks", "process_group")}
OF_THE_GATE |= {("distributed",)}
GATES = {"persample": {"gate"}}
# The few others that may know, and what: the engine shows gradients to hooks of its own; identities that FSDP and DDP
# put into a graph; parameters of the model that are no data.
KNOWING = {
    ("persample", "engine"): ("_torch", "hooks"),
    ("persample", "ops", "table"): ("_torch", "fsdp"),
    ("persample", "coupling", "data_rows"): ("_torch", "dtensor"),
}
# What the root of the package offers and who runs it may import everything.
TOP = {"__init__", "__main__"}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, path.relative_to(SOURCE).with_suffix("").parts


def imports(path, parts):
    """Yield (line, parts of the module imported from, names) for each import within the package."""
    here = parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            yield node.lineno, (*base, *(node.module or "").split(".")) if node.module else base, node.names
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradrein":
            yield node.lineno, tuple(node.module.split(".")[1:]), node.names


def targets(found, names):
    """Return what an import names: modules of the package, as parts."""
    for alias in names:
        full = (*found, alias.name)
        path = SOURCE.joinpath(*full)
        yield full if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else found


def edges():
    for path, parts in modules():
        for line, found, names in imports(path, parts):
            for target in targets(found, names):
                if target:
                    yield f"{path.relative_to(SOURCE)}:{line}", parts, target


def test_every_package_has_its_place():
    found = {parts[0] for _, parts in modules()}
    assert found <= {*ORDER, *TOP}


def test_imports_go_one_way():
    wrong = [
        f"{where} imports {'.'.join(target)}"
        for where, parts, target in edges()
        if parts[0] not in TOP and target[0] in ORDER and ORDER.index(target[0]) > ORDER.index(parts[0])
    ]
    assert not wrong


@pytest.mark.parametrize("package", INSIDE)
def test_every_sub_package_has_its_place(package):
    assert {parts[1] for _, parts in modules() if parts[0] == package and len(parts) > 2} <= {*INSIDE[package]}


@pytest.mark.parametrize("package", INSIDE)
def test_imports_between_sub_packages_go_one_way(package):
    order = INSIDE[package]

    def place(parts):
        return order.index(parts[1]) if len(parts) > 1 and parts[1] in order else len(order)

    within = [edge for edge in edges() if edge[1][0] == edge[2][0] == package]
    wrong = [f"{where} imports {'.'.join(target)}" for where, here, target in within if place(target) > place(here)]
    assert within
    assert not wrong


@pytest.mark.parametrize("package", GATES)
def test_only_the_gate_knows_of_ranks_dtensors_hooks_and_checkpoints(package):
    behind = [(path, parts) for path, parts in modules() if parts[0] == package and parts[1] not in GATES[package]]
    wrong = [
        f"{where} imports {'.'.join(target)}"
        for where, parts, target in edges()
        if parts[0] == package and parts[1] not in GATES[package]
        if any(target[: len(known)] == known for known in OF_THE_GATE) and KNOWING.get(parts) != target
    ]
    assert not wrong
    for path, parts in behind:
        tree = ast.parse(path.read_text())
        hidden = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]  # not those for types
        names = [n for node in hidden for n in [getattr(node, "module", None), *(a.name for a in node.names)] if n]
        assert not [name for name in names if name.startswith("torch.distributed")], ".".join(parts)


# What clipping knows of ranks: the gate, and how it reads its target.
CLIP_GATE = {"_gate", "target"}


@pytest.mark.parametrize("path", [p for p, parts in modules() if parts[0] == "clip" and parts[1] not in CLIP_GATE])
def test_behind_the_gate_of_clip_nothing_names_ranks(path):
    tree = ast.parse(path.read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    words = [word for name in (*imported, *names) for word in name.lower().strip("_").split("_")]
    assert not {"rank", "ranks", "dtensor", "mesh", "dist", "processgroup", "reduction"}.intersection(words)
    assert set(imported).isdisjoint({"Reduction", "Group", "Layout", "RankError"})


def test_private_modules_stay_at_home():
    wrong = [
        f"{where} imports {'.'.join(target)}"
        for where, parts, target in edges()
        if parts[0] != target[0] and parts[0] not in TOP and any(part.startswith("_") for part in target[1:])
    ]
    assert not wrong


def private_torch(tree):
    """Yield each name of torch with a leading underscore that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            whole = ast.unparse(node)
            if whole.startswith("torch."):
                yield whole
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(part.startswith("_") for part in name.split(".")))


@pytest.mark.parametrize("path", [p for p, parts in modules() if parts[0] != "_torch"], ids=lambda p: p.stem)
def test_private_torch_is_in_its_place(path):
    assert not list(private_torch(ast.parse(path.read_text())))
