from __future__ import annotations

from ..errors import MissingDependencyError

__all__ = ["missing"]


def missing(package: str, extra: str) -> MissingDependencyError:
    """What to raise where a package is not there: the message has the line that brings it."""
    return MissingDependencyError(
        f"bridle.integrations.{extra} needs the package {package}, which is not installed: "
        f"pip install 'bridle[{extra}]'."
    )
