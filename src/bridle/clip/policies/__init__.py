"""The fixed policies: one file each."""

from ._norm import by_norm
from ._parameter import by_parameter
from ._rms import by_rms
from ._unit import by_unit
from ._value import by_value

__all__ = ["by_norm", "by_parameter", "by_rms", "by_unit", "by_value"]
