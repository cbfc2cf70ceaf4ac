"""Whether hooks pack what ops save, in a torch that tells and in one that has to be asked in another way."""

import contextlib

import pytest
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from gradrein._torch import saved

CONTEXTS = {
    "none": (contextlib.nullcontext, False),
    "hooks": (lambda: saved_tensors_hooks(lambda value: value, lambda value: value), True),
    "disabled": (lambda: disable_saved_tensors_hooks("not here"), False),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_hooks_that_pack_are_noticed_and_left_alone(context):
    make, expected = CONTEXTS[context]
    with make():
        assert [saved.has_pack_hooks(), saved.has_pack_hooks()] == [expected, expected]
        if context == "disabled":
            with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(str, str):
                pass
    assert not saved.has_pack_hooks()
