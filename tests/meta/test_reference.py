"""Every public name is in the reference, with signature, types, errors, an example, and what to see also."""

import ast
import importlib
import inspect
import re
import textwrap
import types
from pathlib import Path

import pytest

import gradrein
from gradrein import _validate, errors

API = Path(__file__).parents[2] / "docs" / "api"
NAMESPACES = ["attribution", "autograd", "distributed", "errors", "functional", "graph", "policies", "private", "watch"]


def public_names():
    """The names of `gradrein`, then those of its namespaces; what is torch's own in `gradrein.autograd` is left out."""
    ours = [
        f"gradrein.{name}" for name in gradrein.__all__ if not isinstance(getattr(gradrein, name), types.ModuleType)
    ]
    for namespace in NAMESPACES:
        module = importlib.import_module(f"gradrein.{namespace}")
        for name in module.__all__:
            theirs = (getattr(getattr(module, name), "__module__", None) or "torch").split(".")[0] == "torch"
            if f"gradrein.{name}" not in ours and not (namespace == "autograd" and theirs):
                ours.append(f"gradrein.{namespace}.{name}")
    return [*ours, "gradrein.persample.PerSample"]


def found(name):
    module, _, last = name.rpartition(".")
    return inspect.unwrap(getattr(importlib.import_module(module), last))


def is_alias(thing):
    return isinstance(thing, types.GenericAlias)  # Python 3.10 calls it a class as well


NAMES = public_names()
OBJECTS = {name: found(name) for name in NAMES if not is_alias(found(name))}
DOCUMENTED = [name for name, thing in OBJECTS.items() if inspect.isclass(thing) or inspect.isfunction(thing)]
FUNCTIONS = [name for name in DOCUMENTED if inspect.isfunction(found(name))]


def is_error(thing):
    return inspect.isclass(thing) and issubclass(thing, errors.GradreinError | Warning)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_listed(name):
    listed = {line for page in API.glob("*.md") for line in page.read_text().splitlines()}
    assert f"::: {name}" in listed


@pytest.mark.parametrize("name", DOCUMENTED)
def test_it_says_what_to_see_also(name):
    section = inspect.getdoc(found(name)).partition("See Also:")[2]
    references = re.findall(r"\[`([\w.]+)`\]\[\]", section)
    assert references or is_error(found(name)), f"{name} has no See Also"
    assert set(references) <= set(NAMES) - {name}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_it_has_an_example(name):
    assert ">>>" in inspect.getdoc(found(name)) or is_error(found(name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_signature_has_types(name):
    signature = inspect.signature(found(name))
    assert signature.return_annotation is not inspect.Signature.empty
    assert not [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]


def makers(thing):
    """The functions of ours that run when it is called, where they have a source."""
    parts = [vars(thing).get(name) for name in ("__init__", "__post_init__")] if inspect.isclass(thing) else [thing]
    ours = [one for one in parts if inspect.isfunction(one) and one.__module__.startswith("gradrein")]
    return [one for one in ours if one.__code__.co_filename.endswith(".py")]


def raises(function):
    """Whether a function raises by itself, or validates its arguments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    used = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree)) or any(
        one is _validate or getattr(one, "__module__", None) == _validate.__name__ for one in used
    )


@pytest.mark.parametrize("name", DOCUMENTED)
def test_its_errors_are_listed(name):
    if any(map(raises, makers(found(name)))):
        assert "Raises:" in inspect.getdoc(found(name))
