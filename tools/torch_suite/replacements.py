"""gradrein's functions in the place of torch's, in every module that holds them."""

import sys

import torch
import torch.nn.utils._per_sample_grad
import torch.testing._internal.common_utils  # holds some of them, as every test file does

import gradrein

_PLACES = {
    torch.autograd: ("backward", "grad"),
    torch.nn.utils: ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"),
    torch.nn.utils._per_sample_grad: ("call_for_per_sample_grads",),
}
_REPLACED = {
    id(getattr(place, name)): (getattr(place, name), getattr(gradrein, name))
    for place, names in _PLACES.items()
    for name in names
}


def install() -> None:
    """Replace torch's functions in every imported module but gradrein's own."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "gradrein" or module is sys.modules[__name__]:
            continue
        for attribute, value in list(vars(module).items()) if hasattr(module, "__dict__") else []:
            if id(value) in _REPLACED:
                setattr(module, attribute, _REPLACED[id(value)][1])


def installed() -> bool:
    """Tell whether none of torch's functions is left in its place."""
    return all(getattr(place, name) is getattr(gradrein, name) for place, names in _PLACES.items() for name in names)
