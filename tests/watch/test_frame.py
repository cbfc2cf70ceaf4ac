import math
import sys

import pytest

from gradrein.errors import MissingDependencyError

from .runs import healthy


def test_without_pandas_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match="pip install pandas"):
        healthy(5).to_frame()


def test_a_frame_has_the_columns_of_the_run():
    pytest.importorskip("pandas", reason="pip install pandas")
    run = healthy(20)
    run.norms[3][1] = None
    frame = run.to_frame(norms=True)
    assert list(frame.index) == run.steps
    assert frame.index.name == "step"
    assert list(frame["loss"]) == run.loss
    assert list(frame["n_steps"]) == run.n_steps
    assert math.isnan(frame[f"norm of {run.names[1]}"][3])
    assert "norm of" not in " ".join(run.to_frame().columns)
