"""Where the kernels cannot be used, the reason is given by name and torch operations are used."""

import sys
from types import SimpleNamespace

import pytest
from torch import Tensor

from gradrein import _kernels

NAMES = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.delenv("GRADREIN_NATIVE", raising=False)
    extension = SimpleNamespace(connect=lambda *given: given[2] == "table", is_dense=None)
    monkeypatch.setitem(sys.modules, "gradrein._kernels._cpu", extension)
    monkeypatch.setattr(_kernels, "_cpu", extension, raising=False)
    for name in NAMES:
        monkeypatch.delattr(Tensor, name, raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_found_by_either_name(no_table, monkeypatch, name):
    monkeypatch.setattr(Tensor, name, "table", raising=False)
    assert _kernels.why_unused() is None
    assert _kernels.load() is not None


def test_no_table(no_table):
    assert _kernels.load() is None
    assert "no DLPack exchange table" in _kernels.why_unused()


def test_a_table_of_another_kind(no_table, monkeypatch):
    monkeypatch.setattr(Tensor, NAMES[1], 140737488355328, raising=False)  # an address, as a number
    assert _kernels.load() is None
    assert "unknown version" in _kernels.why_unused()


def test_no_capsule_is_no_table():
    native = pytest.importorskip("gradrein._kernels._cpu", reason="the kernels were not built")
    with pytest.raises(ValueError, match="PyCapsule"):
        native.connect(Tensor, Tensor, 140737488355328)


def test_not_built(no_table, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradrein._kernels._cpu", None)
    monkeypatch.delattr(_kernels, "_cpu", raising=False)
    assert _kernels.load() is None
    assert "not built" in _kernels.why_unused()


def test_switched_off(no_table, monkeypatch):
    monkeypatch.setenv("GRADREIN_NATIVE", "0")
    assert _kernels.load() is None
    assert "GRADREIN_NATIVE=0" in _kernels.why_unused()
