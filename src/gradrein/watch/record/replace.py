"""Put a function of ours in the place of another while somebody observes."""

import functools
from collections.abc import Callable
from typing import Any


def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace a function of a module or class by what `wrap` makes of it; return a function that puts it back."""
    original = getattr(owner, name)
    ours = functools.wraps(original)(wrap(original))
    setattr(owner, name, ours)

    def put_back() -> None:
        if getattr(owner, name) is ours:  # a replacement that somebody else has made since is theirs to undo
            setattr(owner, name, original)

    return put_back
