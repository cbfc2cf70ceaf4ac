"""The store: what was added is there, what does not belong is refused, and nothing is lost."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gradrein.attribution import GradientStore, _npy
from gradrein.errors import ArgumentError, ArgumentTypeError, StoreError, StoreWriteError

from .writer import projected


def rows_of(store):
    found = {}
    for ids, rows in store.blocks():
        found |= dict(zip(ids.tolist(), rows, strict=True))
    return found


def only(store, what):
    (path,) = store.path.glob(f"{what}-*.npy")
    return path


def test_what_was_added_is_there(store, samples):
    again = GradientStore(store.path)
    assert again.ids.tolist() == store.ids.tolist() == list(range(40))
    assert len(again) == 40
    whole = samples.project()
    for i, row in rows_of(again).items():
        torch.testing.assert_close(row, whole[i])
    assert "40 samples" in repr(again)


def test_it_reads_as_plain_numpy(store, samples):
    rows, ids = np.load(only(store, "rows"), mmap_mode="r"), np.load(only(store, "ids"))
    assert rows.dtype == np.float32
    assert ids.tolist() == list(range(40))
    np.testing.assert_allclose(rows, samples.project().numpy(), rtol=1e-4, atol=1e-6)
    manifest = json.loads((store.path / "manifest.json").read_text())
    assert (manifest["kind"], manifest["seed"], manifest["size"], manifest["dtype"]) == ("sparse", 0, 64, "float32")
    assert manifest["parameters"]["0.weight"] == [16, 12]
    assert manifest == store.manifest


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("block", [1, 1000, 1 << 22])
def test_search(store, samples, metric, block, monkeypatch):
    monkeypatch.setattr("gradrein.attribution._store._BLOCK_BYTES", block)
    monkeypatch.setattr("gradrein.attribution._store._QUERIES", 3)
    rows, queries = samples.project().double(), samples.project(slice(5, 12))
    sought = queries.double()
    if metric == "cosine":
        rows, sought = (x / x.norm(dim=1, keepdim=True) for x in (rows, sought))
    expected = (sought @ rows.T).topk(6)
    scores, ids = store.search(queries, k=6, metric=metric)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(scores.double(), expected.values, rtol=1e-4, atol=1e-5)
    assert store.search(queries, k=100)[0].shape == (7, 40)


def test_half_precision(tmp_path, samples):
    store = GradientStore(tmp_path / "half", dtype=torch.float16)
    z = samples.project()
    store.add(range(40), z)
    assert np.load(only(store, "rows")).dtype == np.float16
    assert store.search(z, k=1)[1].view(-1).tolist() == list(range(40))
    with pytest.raises(StoreError, match=r"it holds torch.float16, and `dtype` is torch.float32. Leave it out"):
        GradientStore(store.path, dtype=torch.float32)
    big = projected([50], 64)
    big.projection, big[0, 0] = z.projection, 1e6
    with pytest.raises(ArgumentError, match=r"sample 50 is NaN or infinite in torch.float16 \(1 of 1 are\)"):
        store.add([50], big)


def test_resume(store, samples):
    again = GradientStore(store.path)
    assert again.resume(range(35, 45)).tolist() == [40, 41, 42, 43, 44]
    assert GradientStore(store.path.parent / "new").resume([3, 1]).tolist() == [3, 1]
    samples.x, samples.y = torch.randn(50, 12), torch.zeros(50, dtype=torch.int64)
    again.add(again.resume(range(50)), samples.project(slice(40, 50)))
    assert again.ids.tolist() == store.ids.tolist() == list(range(50))  # the other sees it too


BAD_IDS = {
    "twice": ([1, 1, 2], ArgumentError, "ids: 1 occurs twice"),
    "there": ([41, 7, 8], ArgumentError, r"ids: 7 is in the store already \(2 of 3 are\).*store.resume"),
    "few": ([41], ArgumentError, "there are 1 ids for 3 gradients"),
    "floats": ([0.5, 1, 2], ArgumentTypeError, "expected a whole number for each sample"),
    "names": (["a", "b", "c"], ArgumentTypeError, "keep a list of these and pass positions in it"),
    "one": (5, ArgumentTypeError, "expected a whole number for each sample, found 5"),
    "flags": (torch.tensor([True, False, True]), ArgumentTypeError, "expected a whole number"),
    "matrix": (torch.zeros(3, 1, dtype=torch.int64), ArgumentTypeError, "expected a whole number"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids(store, samples, name):
    ids, error, text = BAD_IDS[name]
    with pytest.raises(error, match=text):
        store.add(ids, samples.project(slice(0, 3)))
    assert len(store) == len(GradientStore(store.path)) == 40


def test_gradients_of_another_kind_seed_size_model_or_checkpoint(store, samples):
    two = slice(0, 2)
    scales = {name: torch.ones_like(p) for name, p in samples.model.named_parameters()}
    wrong = {
        r"seed is 1, in the store 0: use project\(64, kind='sparse', seed=0\)": samples.project(two, seed=1),
        "size is 32, in the store 64": samples.project(two, size=32),
        "kind is 'factored', in the store 'sparse'": samples.project(two, size=8, kind="factored"),
        "other `scales` were given": samples.project(two, scales=scales),
    }
    with torch.no_grad():
        samples.model[0].bias += 1
    wrong["the model had other weights: use one store for each checkpoint"] = samples.project(two)
    samples.model[0].bias.requires_grad_(False)
    wrong["the model has other parameters"] = samples.project(two)
    for text, z in wrong.items():
        with pytest.raises(StoreError, match=text):
            store.add([90, 91], z)
        with pytest.raises(StoreError, match=text if z.shape[1] == 64 else "columns, the store 64"):
            store.search(z)
    assert len(GradientStore(store.path)) == 40


def test_what_is_no_projection(store, samples):
    z = samples.project(slice(0, 2))
    for bad, text in (
        (z.clone(), "does not say how it was projected"),
        (z[0], r"found \(torch.float32, 64\)"),
        (3, "int"),
    ):
        with pytest.raises(ArgumentTypeError, match=text):
            store.add([60, 61], bad)
    with pytest.raises(ArgumentTypeError, match="`queries` are projected gradients"):
        store.search(z[0])
    with pytest.raises(ArgumentError, match="`metric` is 'cosine' or 'dot'; found 'l2'"):
        store.search(z, metric="l2")
    with pytest.raises(ArgumentError, match="`k` is a whole number"):
        store.search(z, k=0)
    z[1, 3] = torch.nan
    with pytest.raises(ArgumentError, match=r"the gradient of sample 61 is NaN or infinite.*Leave these samples out"):
        store.add([60, 61], z)


def test_folders_that_are_no_store(tmp_path):
    with pytest.raises(StoreError, match="empty. Add gradients first"):
        GradientStore(tmp_path / "nothing").search(projected([1]))
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="it is a file. A store is a folder"):
        GradientStore(tmp_path / "file")
    np.save(tmp_path / "other.npy", np.ones(3))
    with pytest.raises(StoreError, match=r"it holds .npy files and no manifest.json"):
        GradientStore(tmp_path)
    for text, error in (("{", "damaged"), ("[]", "not the manifest"), ('{"format": "x"}', "not the manifest")):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(StoreError, match=error):
            GradientStore(tmp_path)
    with pytest.raises(ArgumentError, match="`dtype` is float16, float32 or float64"):
        GradientStore(tmp_path / "new", dtype=torch.int32)


DAMAGE = {
    "torn": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "other": lambda path: path.write_bytes(_npy.header(torch.float64, (0, 3))),
}


@pytest.mark.parametrize("what", ["rows", "ids"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(store, what, damage):
    path = only(store, what)
    DAMAGE[damage](path)
    with pytest.raises(StoreError, match=f"{path.name}|does not belong"):
        GradientStore(store.path)


def test_a_damaged_writer_is_moved_away_and_the_rest_is_read(store, samples, tmp_path):
    other = GradientStore(store.path)
    other.add([70, 71], samples.project(slice(0, 2)))
    os.truncate(store._file("rows", other._shard), 200)
    with pytest.raises(
        StoreError, match=r"it holds 0 of the 2 rows that its header promises. Move this file and its twin"
    ):
        GradientStore(store.path)
    for what in ("rows", "ids"):
        shutil.move(store._file(what, other._shard), tmp_path)
    assert GradientStore(store.path).resume([0, 70, 71]).tolist() == [70, 71]


@pytest.mark.parametrize("step", range(4))
def test_a_full_disk_loses_nothing(store, samples, monkeypatch, step):
    before, calls, write = rows_of(store), [], _npy._write

    def fails(path, start, content):
        calls.append(path)
        if len(calls) == step + 1:
            write(path, start, bytes(content)[: len(bytes(content)) // 2] if start else bytes(content))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, start, content)

    monkeypatch.setattr(_npy, "_write", fails)
    with pytest.raises(StoreWriteError, match="No space left on device. What was added before is unchanged") as caught:
        store.add([80, 81], samples.project(slice(0, 2)))
    assert isinstance(caught.value, OSError)
    monkeypatch.undo()
    again = GradientStore(store.path)
    assert again.ids.tolist() == list(before)
    store.add([80, 81], samples.project(slice(0, 2)))
    assert rows_of(again).keys() == {*before, 80, 81}
    for i, row in before.items():
        assert torch.equal(rows_of(again)[i], row)


def test_a_file_where_the_folder_should_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteError, match="cannot be written to"):
        GradientStore(tmp_path / "file" / "index").add([1], projected([1]))


def test_several_writers_and_merge(tmp_path):
    one, two, far = (GradientStore(tmp_path / name) for name in ("a", "a", "b"))
    one.add([1, 2], projected([1, 2]))
    two.add([3], projected([3]))
    far.add([4, 5], projected([4, 5]))
    assert sorted(one.ids.tolist()) == sorted(two.ids.tolist()) == [1, 2, 3]
    one.merge(far)
    one.merge(tmp_path / "b")  # again changes nothing
    GradientStore(tmp_path / "c").merge(one, GradientStore(tmp_path / "nothing"))
    far.add([6], projected([6]))
    for path, ids in (("a", [1, 2, 3, 4, 5]), ("c", [1, 2, 3, 4, 5]), ("b", [4, 5, 6])):
        found = rows_of(GradientStore(tmp_path / path))
        assert sorted(found) == ids
        assert all(torch.equal(row, projected([i])[0]) for i, row in found.items())


def test_merge_refuses_the_same_ids_and_other_stores(tmp_path):
    one, two, other = (GradientStore(tmp_path / name) for name in ("a", "b", "c"))
    one.add([1, 2], projected([1, 2]))
    two.add([2, 3], projected([2, 3]))
    other.add([9], projected([9], 8))
    for stores, error, text in (
        ([two], ArgumentError, "2 is in the store already"),
        ([other], StoreError, "size is 8"),
    ):
        with pytest.raises(error, match=text):
            one.merge(*stores)
    with pytest.raises(ArgumentError, match="2 occurs twice"):
        GradientStore(tmp_path / "d").merge(one, two)
    assert one.ids.tolist() == [1, 2]
    assert not (tmp_path / "d").exists()


def test_ids_that_two_processes_added_at_once_count_once(tmp_path):
    one, two = GradientStore(tmp_path), GradientStore(tmp_path)
    one.add([1, 2], projected([1, 2]))
    two.add([2, 3], projected([2, 3]))  # as a sampler that fills up the last batch
    assert sorted(one.ids.tolist()) == [1, 2, 3]
    assert len(one) == len(rows_of(one)) == 3
    scores, ids = one.search(projected([2]), k=5)
    assert sorted(ids[0].tolist()) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(2))
def test_killed_while_it_writes(tmp_path, seed):
    """benchmarks/attribution_kills.py does the same 20 times."""
    store = GradientStore(tmp_path)
    store.add([10**6], projected([10**6]))
    command = [sys.executable, str(Path(__file__).with_name("writer.py")), str(tmp_path), "0", "16"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    said = [int(child.stdout.readline())]
    time.sleep(0.02 + 0.03 * torch.rand((), generator=torch.Generator().manual_seed(seed)).item())
    child.kill()
    said += [int(line) for line in child.stdout.read().split()]
    child.wait()
    child.stdout.close()
    found = rows_of(GradientStore(tmp_path))
    assert {10**6, *(i + j for i in said for j in range(16))} <= set(found)
    assert all(torch.equal(row, projected([i])[0]) for i, row in found.items())


def test_search_takes_a_few_megabytes(tmp_path):
    pytest.importorskip("resource")
    code = f"""
import resource
from attribution.writer import projected
from gradrein.attribution import GradientStore
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
queries = projected(list(range(8)), 4096)
GradientStore({str(tmp_path / "small")!r}).search(queries, k=3)
before = peak()
GradientStore({str(tmp_path / "large")!r}).search(queries, k=3)
print(peak() - before)
"""
    for name, rows in (("small", 8), ("large", 4096)):  # 64 MB
        store = GradientStore(tmp_path / name)
        for start in range(0, rows, 1024):
            ids = list(range(start, min(rows, start + 1024)))
            store.add(ids, projected(ids, 4096))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert int(done.stdout) < 24 << 10  # kilobytes
