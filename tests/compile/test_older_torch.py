"""On a torch whose traces are not what runs, every call is eager, and that is said."""

import torch

from gradrein._torch import fx as torch_fx

from .helpers import Twins, batch, mlp


def test_stays_eager_where_a_trace_has_other_ops_than_run(monkeypatch):
    monkeypatch.setattr(torch_fx, "RECORDS_WHAT_RUNS", False)
    twins = Twins(mlp())
    for _ in range(3):
        twins.eager(*batch())
    why = f"eager: torch {torch.__version__} records other ops than it runs (no `autograd_would_have_decomposed`)"
    assert why in twins.step.explain()
