"""A step with per-sample gradients as one graph: captured with guards, compiled, never stale."""

from ._step import CompiledStep, compile  # noqa: A004

__all__ = ["CompiledStep", "compile"]
