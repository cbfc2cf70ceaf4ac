"""Find wrong labels and duplicates among scikit-learn's digits, and the training images behind a prediction.

    python examples/attribution.py [folder]

Takes about ten seconds on a CPU. Writes a gradient store for each of three checkpoints, and the picture nearest.png: in
each row a test image, then the training images with the nearest gradients; a white frame marks a wrong label.
"""

import struct
import sys
import tempfile
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import gradrein
from gradrein import attribution

WRONG, COPIES, TEST = 150, 20, 8


def data(generator):
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=generator)
    images, labels = images[order], labels[order]
    x, y, test_x, test_y = images[TEST:], labels[TEST:], images[:TEST], labels[:TEST]
    x, y = torch.cat([x, x[200 : 200 + COPIES]]), torch.cat([y, y[200 : 200 + COPIES]])  # the last are copies
    wrong = torch.arange(len(y)) < WRONG
    y = torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    return x, y, wrong, test_x, test_y


def small_cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def projected(model, x, y):
    losses = F.cross_entropy(model(x), y, reduction="none")
    ps = gradrein.per_sample(losses, model, retain_graph=False, memory_budget=0)
    return ps.project(512, seed=0)


def area_under_curve(order, wrong):
    """The chance that a wrong label is listed before a right one."""
    bad = wrong[order].double()
    right_after = (1 - bad).flip(0).cumsum(0).flip(0)
    return float((bad * right_after).sum() / (bad.sum() * (1 - bad).sum()))


def write_png(path, image):
    """Write a grey image with values from 0 to 1."""
    rows = b"".join(b"\0" + bytes(row) for row in (image.clamp(0, 1) * 255).to(torch.uint8).tolist())
    size = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))


def tile(image, framed=False):
    return F.pad(F.interpolate(image[None], scale_factor=5)[0, 0], (3, 3, 3, 3), value=float(framed))


def main(folder):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y, wrong, test_x, test_y = data(generator)
    model, stores = small_cnn(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(1, 7):
        for part in torch.randperm(len(y), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        if epoch % 2 == 0:
            store = attribution.GradientStore(folder / f"epoch-{epoch}")
            for part in store.resume(range(len(y))).split(256):  # all of them, or what an interrupted run left
                store.add(part, projected(model, x[part], y[part]))
            stores.append(store)

    _, suspects = attribution.outliers(stores)
    found = wrong[suspects[:WRONG]].sum()
    area = area_under_curve(suspects, wrong)
    print(f"wrong labels: {found} of the first {WRONG} listed are wrong, area under the curve {area:.4f}")

    _, pairs = attribution.duplicates(stores[-1], threshold=0.99999)
    copies = {(200 + i, len(y) - COPIES + i) for i in range(COPIES)}
    listed = {tuple(pair) for pair in pairs.tolist()}
    print(f"duplicates: {len(copies & listed)} of {COPIES} found, {len(listed - copies)} pairs listed that are none")

    _, nearest = stores[-1].search(projected(model, test_x, test_y), k=9)
    rows = [
        torch.cat([tile(one), torch.zeros(46, 10), *(tile(x[i], wrong[i]) for i in ids)], 1)
        for one, ids in zip(test_x, nearest.tolist(), strict=True)
    ]
    write_png(folder / "nearest.png", torch.cat(rows))
    same = (y[nearest] == test_y[:, None]).double().mean()
    print(f"nearest training images: {same:.0%} have the label of the test image; see {folder / 'nearest.png'}")
    assert area > 0.98
    assert copies <= listed


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
