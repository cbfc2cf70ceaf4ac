"""The policies that adapt: one file each, with a memory that no bad step can spoil."""

from ._guard import skip_spikes
from ._median import by_median
from ._overshoot import by_overshoot
from ._quantile import by_quantile
from ._running import by_running_norm
from ._spike import by_element_spike
from ._stable import by_stable_norm
from ._tracker import by_tracked_quantile
from ._zscore import by_zscore

__all__ = [
    "by_element_spike",
    "by_median",
    "by_overshoot",
    "by_quantile",
    "by_running_norm",
    "by_stable_norm",
    "by_tracked_quantile",
    "by_zscore",
    "skip_spikes",
]
