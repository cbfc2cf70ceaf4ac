"""Which tensors are in the whole memory of another. What follows for gradients on several ranks is in tests/ranks."""

import torch

from gradrein._torch.storage import repeats

FLAT = torch.arange(24.0)
TABLE = FLAT.view(4, 6)


def test_all_shapes_and_orders_of_one_memory_are_found():
    assert repeats([TABLE, FLAT, TABLE.t(), TABLE.detach(), TABLE.clone()]) == {1: 0, 2: 0, 3: 0}
    assert repeats([TABLE[:2], TABLE, FLAT[:12]]) == {2: 0}


def test_memory_that_overlaps_in_part_is_not():
    parts = [TABLE, TABLE[:2], TABLE[::2], TABLE[:, :3], FLAT[:3].expand(8, 3), FLAT.view(torch.int32)]
    assert repeats(parts) == {}


def test_without_memory_an_object_is_only_itself():
    sparse, empty, meta = TABLE.to_sparse(), torch.empty(0), torch.empty(3, device="meta")
    assert repeats([sparse, empty, meta, TABLE.to_sparse(), FLAT[:0], FLAT[:0], meta, sparse]) == {6: 2, 7: 0}
    assert repeats([]) == {}
