import pytest

from gradrein.watch.analysis import findings


@pytest.fixture(autouse=True)
def only_our_checks(monkeypatch):
    """Leave out checks that documentation examples have registered in this process."""
    monkeypatch.setattr(findings, "_registered", [])
