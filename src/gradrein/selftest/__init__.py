"""`python -m gradrein selftest`: whether gradrein is right and fast on the device at hand, in one file to attach.

Runs without pytest. What is checked is compared with the slow, obvious way on the same device; what is timed takes
turns with torch's own.
"""

from ._run import main, run

__all__ = ["main", "run"]
