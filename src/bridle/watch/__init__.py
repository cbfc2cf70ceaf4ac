"""See: the record of a run, findings with evidence, advice, and a page that shows them."""

from ._monitor import Monitor

__all__ = ["Monitor"]
