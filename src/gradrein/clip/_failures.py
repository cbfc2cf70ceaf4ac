"""An error that one rank alone has in its arguments stops the others too, rather than have them wait for it.

Ranks exchange norms in messages of one size, which carry whether a rank has failed. One that fails before takes part
in these: with all gradients of the target, since it may not know which of them the others measure.
"""

from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from ._gradients import Gradients


def tell_others(error: Exception, gradients: Callable[[Callable[[], str]], Gradients]) -> None:
    """Tell an error in arguments to the ranks that are about to exchange norms with this one.

    Args:
        error: The error, which the caller raises after this.
        gradients: Reads the gradients, given what to compare as this rank's call.
    """
    if dist.is_available() and dist.is_initialized():
        with suppress(Exception):  # such as that of gradients that cannot be read either
            found = gradients(lambda: f"{type(error).__name__}: {error}")
            if found.sharded is not None:
                found.sharded.tell([(range(len(found.parameters)), 2.0)], error)
