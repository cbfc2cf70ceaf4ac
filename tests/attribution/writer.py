"""A process that adds to a store and says after each call what it added; killed at any moment by its test."""

import sys

import torch

from gradrein.attribution import GradientStore


def projected(ids, columns=512):
    """Rows that follow from their ids, so that the reader can tell whether they are right."""
    z = (torch.tensor(ids)[:, None] * 7919 + torch.arange(columns)).remainder(10007).float()
    described = {"kind": "sparse", "seed": 0, "size": columns, "columns": columns, "parameters": {"w": [64, 64]}}
    z.projection = {**described, "weights": torch.tensor(5), "scales": None}
    return z


def main(path, first, batch):
    store = GradientStore(path)
    start = int(first)
    while True:
        ids = list(range(start, start + int(batch)))
        store.add(ids, projected(ids))
        print(start, flush=True)
        start += int(batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
