"""Losses that the script gives to TensorBoard's `SummaryWriter` or to `wandb`, once it has imported them.

Nothing is imported here. Calls are passed on as they are, and everything is put back at the end.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..replace import replace
from .labels import other_data_loss

_OnLoss = Callable[[str, str, float], None]


class LoggerCalls:
    """Calls a function with the name, the origin and the value of each loss on other data that is logged."""

    def __init__(self, on_loss: _OnLoss) -> None:
        self._on_loss = on_loss
        self._seen: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._inside = False

    def look(self) -> None:
        """Observe the loggers that have been imported since the last look."""
        for module, find in _LOGGERS.items():
            if module in sys.modules and module not in self._seen:
                self._seen.add(module)
                for owner, name, read, origin in find(sys.modules[module]):
                    if callable(vars(owner).get(name)):
                        self._undo.append(replace(owner, name, functools.partial(self._wrap, read, origin)))

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
        self._seen.clear()

    def _wrap(self, read: "_Read", origin: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self._inside = True
                try:
                    for key, value in read(args, kwargs).items():
                        self._take(key, value, origin)
                except Exception:  # what cannot be read is the logger's business alone
                    pass
                finally:
                    self._inside = False
            return original(*args, **kwargs)

        return ours

    def _take(self, key: str, value: Any, origin: str) -> None:
        name = other_data_loss(str(key))
        if name is not None and getattr(value, "ndim", 0) == 0 and not isinstance(value, (str, bool)):
            self._on_loss(name, origin, float(value))


_Read = Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, Any]]


def _scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Read `writer.add_scalar(tag, scalar_value, ...)`."""
    tag = kwargs.get("tag", args[1] if len(args) > 1 else "")
    return {tag: kwargs.get("scalar_value", args[2] if len(args) > 2 else "")}


def _scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Read `writer.add_scalars(main_tag, {name: value}, ...)`."""
    tag, values = kwargs.get("main_tag", args[1]), kwargs.get("tag_scalar_dict", args[2])
    return {f"{tag}/{name}": value for name, value in values.items()}


def _logged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Read `wandb.log({name: value, ...})`, with or without the run as its first argument."""
    data = kwargs.get("data", next((a for a in args if isinstance(a, Mapping)), {}))
    return data if isinstance(data, Mapping) else {}


def _tensorboard(module: Any) -> list[tuple[Any, str, _Read, str]]:
    writer = module.SummaryWriter
    return [(writer, "add_scalar", _scalar, "TensorBoard"), (writer, "add_scalars", _scalars, "TensorBoard")]


def _wandb(module: Any) -> list[tuple[Any, str, _Read, str]]:
    owners = [(module, "log"), *([(module.Run, "log")] if isinstance(getattr(module, "Run", None), type) else [])]
    return [(owner, name, _logged, "wandb") for owner, name in owners]


_LOGGERS = {"torch.utils.tensorboard": _tensorboard, "tensorboardX": _tensorboard, "wandb": _wandb}
