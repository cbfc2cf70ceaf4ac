"""The public surface is what `__all__` says, documented, and cheap to import."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch

import gradrein
from gradrein import errors


def modules():
    return [
        info.name
        for info in pkgutil.walk_packages(gradrein.__path__, "gradrein.")
        if not info.name.endswith(("._cpu", "__main__")) and ".integrations." not in info.name
    ]


def test_all_is_the_public_surface():
    public = {n for n, v in vars(gradrein).items() if not n.startswith("_") and not inspect.ismodule(v)}
    rooms = {n for n in gradrein.__all__ if inspect.ismodule(getattr(gradrein, n))}
    assert public | rooms == set(gradrein.__all__)
    assert list(gradrein.__all__) == sorted(gradrein.__all__)


def test_errors_are_one_tree_drawn_in_its_docstring():
    found = {n: v for n, v in vars(errors).items() if inspect.isclass(v) and v.__module__ == errors.__name__}
    assert set(found) == set(errors.__all__)
    for name, error in found.items():
        assert name in errors.__doc__
        if not issubclass(error, Warning):
            assert issubclass(error, errors.GradreinError)
            if error is not errors.GradreinError:
                assert any(
                    b.__module__ == "builtins" and issubclass(b, Exception) and b is not Exception
                    for b in error.__mro__
                )


def stored(folder):
    """A store of eight samples, the last of which is the first once more, for the examples of what reads it."""
    model, x = torch.nn.Linear(50, 20), torch.randn(7, 50)
    z = gradrein.per_sample(model(torch.cat([x, x[:1]])).exp().sum(1), model).project(64)
    store = gradrein.attribution.GradientStore(folder)
    store.add(range(8), z)
    return {"store": store, "z": z}


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name, tmp_path):
    module = importlib.import_module(name)
    known = {"torch": torch, "gradrein": gradrein, **(stored(tmp_path) if "attribution" in name else {})}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs=known, optionflags=flags)
    assert result.failed == 0


def test_import_brings_nothing_heavy():
    code = "import torch, sys; before = set(sys.modules); import gradrein; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    new = {name.split(".")[0] for name in done.stdout.split()}
    assert "gradrein" in new
    heavy = {"matplotlib", "rich", "lightning", "transformers", "accelerate", "sklearn", "hypothesis", "pytest"}
    assert not new & heavy
    assert not {"torch._dynamo", "torch._inductor"}.intersection(done.stdout.split())
