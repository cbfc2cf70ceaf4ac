"""Numbers that stand for values, the same in every process: the hash of a string is not."""

import hashlib
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor, specs_of

_KEPT = 4  # models that take turns, as in adversarial training
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_recent: list[tuple[Any, int]] = []  # replaced, never changed: threads may use it at once


def fingerprint(value: object) -> int:
    """Return a number of 64 bits for a value by its repr."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def parameters_fingerprint(names: Sequence[str] | None, parameters: Sequence[Any], grads: Sequence[Any]) -> int:
    """Return a number for parameters in their order, from names, shapes, dtypes and layouts, and those of gradients.

    Steps of one run ask about the same ones again and again, so the last few answers are kept.
    """
    global _recent
    own, specs = specs_of(parameters), specs_of(grads)
    # Gradients of fully_shard have the specs of their parameters.
    same = type(None) not in set(map(type, own)) and all(map(is_, own, specs))
    key = names, list(map(_meta, parameters, own)), None if same else list(map(_meta, grads, specs))
    for known, number in _recent:
        if known == key:  # quick where the parts are the same objects as before
            return number
    number = fingerprint(key)
    _recent = [(key, number), *_recent[: _KEPT - 1]]
    return number


def _meta(tensor: Any, spec: Any) -> Any:
    """Return shape, dtype and placements of a tensor, not strides, which may differ; None for one that is missing."""
    if spec is not None:
        return spec.tensor_meta.shape, spec.tensor_meta.dtype, spec.placements
    return None if tensor is None else (tensor.shape, tensor.dtype)


def state_fingerprint(state: Any) -> int:
    """Return a number for a saved state: mappings of numbers, words and tensors.

    Tensors are rounded to float32, since sums may differ between ranks in the last bit of float64. Of a DTensor each
    rank holds its own part, so it is left out.
    """
    if isinstance(state, Mapping):
        return fingerprint([(key, state_fingerprint(value)) for key, value in state.items()])
    if not isinstance(state, Tensor):
        return fingerprint(state)
    if is_dtensor(state):
        return 0
    return fingerprint((tuple(state.shape), _checksum(state.float() if state.is_floating_point() else state)))


def _checksum(tensor: Tensor) -> int:
    """Return a number of 64 bits for the bits of a tensor in their order. Reads from the device."""
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    numbers = bits.reshape(-1).view(_INTEGERS[bits.element_size()]).to(torch.int64)
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device) * -0x61C8864680B583EB
    return int((numbers * (weights ^ (weights >> 29) | 1)).sum())
