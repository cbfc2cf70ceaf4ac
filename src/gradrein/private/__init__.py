"""Differentially private training: `Private`, its accounting, and an audit of both.

Everything that epsilon rests on is either checked or refused; `docs/start/private.md` says what is not promised.
"""

from ._accounting import epsilon, noise_multiplier
from ._audit import Audit, audit
from ._clipping import Quantile
from ._gate import batch_norm_to_group_norm
from ._private import Private

__all__ = ["Audit", "Private", "Quantile", "audit", "batch_norm_to_group_norm", "epsilon", "noise_multiplier"]
