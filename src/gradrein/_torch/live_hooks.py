"""Whether a hook on any tensor or node is left in this process.

torch keeps the hooks of a tensor or of a node in an `OrderedDict`, by the numbers of their handles. The garbage
collector knows every `OrderedDict` that is alive, and modules and optimizers know which of these are theirs.
"""

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

_OWNERS = (nn.Module, Optimizer)
_GLOBAL = (nn.modules.module, optimizer)
# An attribute of another name is the user's, and may be the very dict of a tensor.
_NAMES = {name for name in vars(nn.Module()) if name.endswith("_hooks")}


def may_be_hooks() -> bool:
    """Return whether there may be a hook on a tensor or a node; no means that there is none, in any thread.

    It takes tens of milliseconds.
    """
    if gc.get_freeze_count() or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return True  # not all objects are told, or other threads change them meanwhile
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, (OrderedDict, RemovableHandle, *_OWNERS))}
    found = [one for one in objects if type(one) in kinds]
    del objects
    owned = _owned([*(one for one in found if isinstance(one, _OWNERS)), *_GLOBAL])
    # In this order: a hook that is being registered by another thread is in its dict now, or its handle tells.
    if any(_is_unfinished(one, owned) for one in found if isinstance(one, RemovableHandle)):
        return True
    return any(_holds_hooks(one) for one in found if isinstance(one, OrderedDict) and id(one) not in owned)


def _owned(owners: Iterable[Any]) -> set[int]:
    """Return the ids of the dicts that hold hooks of modules and optimizers, and those of all of them."""
    return {id(value) for owner in owners for name, value in list(vars(owner).items()) if _is_of_torch(name)}


def _is_of_torch(name: str) -> bool:
    return name in _NAMES or (name.startswith(("_optimizer_", "_global_")) and name.endswith("_hooks"))


def _is_unfinished(handle: RemovableHandle, owned: set[int]) -> bool:
    """Return whether a hook may be about to be registered: so is one that was removed, as far as can be told."""
    hooks = handle.hooks_dict_ref() if hasattr(handle, "hooks_dict_ref") else None
    return hooks is not None and id(hooks) not in owned and getattr(handle, "id", None) not in hooks


def _holds_hooks(found: "OrderedDict[Any, Any]") -> bool:
    # Without a call of what the user wrote: no hash of a key, no method of a subclass, no `__class__` of a proxy.
    return any(issubclass(type(key), int) and callable(value) for key, value in list(dict.items(found)))
