"""A folder of projected gradients."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .._validate import count
from ..errors import ArgumentError, ArgumentTypeError, StoreError
from . import _npy

_FORMAT = "gradrein gradients 1"
_DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_BLOCK_BYTES = 1 << 22
_QUERIES = 1024  # that are compared at once with a block
_NONE = torch.empty(0, dtype=torch.int64)


class GradientStore:
    """A folder of projected gradients, by the ids of their samples.

    `add` is safe against kills and full disks: it returns when its rows are on the disk, and a store that lost its
    writer opens with everything that was added before. Several processes may add to one folder at once: each has its
    own two files, ``rows-*.npy`` and ``ids-*.npy``, which NumPy reads as they are. The manifest says how the gradients
    were made, and whatever was made in another way is refused.

    Args:
        path: the folder; it is made by the first `add`.
        dtype: torch.float16, torch.float32 or torch.float64; by default that of what is added first.

    Raises:
        StoreError: the folder holds something else, or is damaged.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Linear(50, 20)
        >>> x = torch.eye(50)[:4]
        >>> z = gradrein.per_sample(model(x).exp().sum(1), model).project(256)
        >>> store = gradrein.attribution.GradientStore(tempfile.mkdtemp())
        >>> store.add([10, 11, 12, 13], z)
        >>> scores, ids = store.search(z[2:3], k=1)
        >>> ids
        tensor([[12]])

    See Also:
        [`gradrein.persample.PerSample`][], [`gradrein.attribution.tracin`][]
    """

    def __init__(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        if dtype not in (None, *_DTYPES.values()):
            raise ArgumentError(f"GradientStore: `dtype` is float16, float32 or float64 of torch; found {dtype!r:.80}.")
        self.path, self._asked = Path(path), dtype
        self._shard, self._added = "", 0  # this writer's files, and how many rows they have
        self._ids: dict[str, Tensor] = {}
        self.manifest: dict[str, Any] = self._read_manifest()
        if not self.manifest and any(self.path.glob("*.npy")):
            raise StoreError(f"{self.path}: it holds .npy files and no manifest.json. Use an empty folder.")
        if self.manifest and dtype not in (None, self._dtype):
            raise StoreError(f"{self.path}: it holds {self._dtype}, and `dtype` is {dtype}. Leave it out.")
        self._known = {i for ids in self._scan().values() for i in ids.tolist()}

    def __len__(self) -> int:
        """Return how many samples are there."""
        return len(self.ids)

    def __repr__(self) -> str:
        return f"GradientStore({str(self.path)!r}, {len(self)} samples)"

    @property
    def ids(self) -> Tensor:
        """The ids that are there, in the order in which `blocks` and the methods return them."""
        return torch.cat([_NONE, *(ids[self._kept(shard)] for shard, ids in self._scan().items())])

    def resume(self, ids: Iterable[int] | Tensor) -> Tensor:
        """Return those of the ids that are not there yet, in their order: what an interrupted run has still to add."""
        wanted = _read_ids(ids)
        return wanted[~torch.isin(wanted, self.ids)]

    def add(self, ids: Iterable[int] | Tensor, z: Tensor) -> None:
        """Append projected gradients; they are on the disk when this returns.

        Args:
            ids: a whole number for each sample, such as its index in the dataset.
            z: what `PerSample.project` returned, as it is: (samples, columns).

        Raises:
            ArgumentError: an id is there already or occurs twice, or `z` has no gradients for these ids.
            StoreError: `z` was made in another way than what is there: by another projection, or other weights.
            StoreWriteError: the folder cannot be written to. Nothing was added.
        """
        made_by = self._check(z)
        wanted = _read_ids(ids)
        if len(wanted) != len(z):
            raise ArgumentError(f"add: there are {len(wanted)} ids for {len(z)} gradients. Pass one id for each.")
        _refuse_known(wanted, self._known)
        dtype = self._dtype if self.manifest else self._asked or z.dtype
        rows = z.detach().to("cpu", dtype).contiguous()
        bad = (~torch.isfinite(rows).all(1)).nonzero().view(-1)
        if len(bad):
            raise ArgumentError(
                f"add: the gradient of sample {int(wanted[bad[0]])} is NaN or infinite in {dtype} ({len(bad)} of "
                f"{len(rows)} are). Leave these samples out, or use a wider `dtype`."
            )
        if not self.manifest:
            self._write_manifest({**made_by, "dtype": str(dtype).removeprefix("torch.")})
        if not len(wanted):
            return
        self._shard = self._shard or self._new_shard()
        _npy.append([(self._file("rows", self._shard), rows), (self._file("ids", self._shard), wanted)], self._added)
        self._added += len(wanted)
        self._known.update(wanted.tolist())

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and gradients, a few MB at a time."""
        for shard, ids in self._scan().items():
            kept, path = self._kept(shard), self._file("rows", shard)
            dtype, shape = _npy.read_header(path)
            step = max(1, _BLOCK_BYTES // (dtype.itemsize * shape[1]))
            for start in range(0, len(ids), step):
                end = min(start + step, len(ids))
                rows, mask = _npy.read_rows(path, start, end, dtype, shape), kept[start:end]
                yield ids[start:end][mask], rows if bool(mask.all()) else rows[mask]

    def search(
        self, queries: Tensor, k: int = 20, *, metric: Literal["cosine", "dot"] = "cosine"
    ) -> tuple[Tensor, Tensor]:
        """Return the samples whose gradients are nearest to each query.

        Args:
            queries: projected in the same way, (queries, columns).
            k: how many samples for each; all if there are fewer.
            metric: "cosine", or "dot" for inner products.

        Returns:
            Scores and ids, (queries, k) each, best first.
        """
        count(k, "k")
        if metric not in ("cosine", "dot"):
            raise ArgumentError(f"search: `metric` is 'cosine' or 'dot'; found {metric!r:.80}.")
        parts = torch.split(self._comparable(queries, "search"), _QUERIES)
        scores, ids = zip(*(self._nearest(part, k, metric == "cosine") for part in parts), strict=True)
        return torch.cat(scores), torch.cat(ids)

    def merge(self, *others: "GradientStore | str | os.PathLike[str]") -> None:
        """Take over the files of other stores, by links where the disk allows it.

        Raises:
            StoreError: one of them was made in another way. Nothing was merged.
            ArgumentError: an id is in two of them. Nothing was merged.
            StoreWriteError: the folder cannot be written to. Call it again with the same stores to go on.
        """
        stores = [other if isinstance(other, GradientStore) else GradientStore(other) for other in others]
        stores, here = [store for store in stores if store.manifest], self._scan()
        for store in stores:
            self._refuse_other(store.manifest, self.manifest or stores[0].manifest)
        found = {shard: (store, ids) for store in stores for shard, ids in store._scan().items() if shard not in here}
        new = torch.cat([_NONE, *(ids for _, ids in found.values())])
        _refuse_known(new, self._known)
        if stores and not self.manifest:
            self._write_manifest(stores[0].manifest)
        for shard, (store, _) in found.items():
            rows = store._file("rows", shard), self._file("rows", shard)
            try:
                os.link(*rows)
            except OSError:  # another disk
                try:
                    shutil.copyfile(*rows)
                except OSError as error:
                    raise _npy.write_error(self.path, error) from error
            _npy.publish(self._file("ids", shard), store._file("ids", shard).read_bytes())
        self._known.update(new.tolist())

    def _comparable(self, queries: Tensor, call: str) -> Tensor:
        """Return queries on the CPU, in a dtype to compute in; refuse what cannot be compared with this store."""
        if not self._scan():
            raise StoreError(f"{self.path}: {call}: the store is empty. Add gradients first.")
        _require_rows(queries, f"{call}: `queries` are projected gradients, (queries, columns)")
        if queries.shape[1] != self.manifest["columns"]:
            raise StoreError(
                f"{self.path}: {call}: the queries have {queries.shape[1]} columns, the store "
                f"{self.manifest['columns']}. Project both in the same way: {_how(self.manifest)}."
            )
        if hasattr(queries, "projection"):
            self._refuse_other({**_source(queries), "dtype": self.manifest["dtype"]}, self.manifest)
        return queries.detach().to("cpu", torch.promote_types(self._dtype, torch.float32))

    def _nearest(self, queries: Tensor, k: int, cosine: bool) -> tuple[Tensor, Tensor]:
        queries = unit(queries) if cosine else queries
        best, names = queries.new_empty(len(queries), 0), _NONE.expand(len(queries), 0)
        for ids, rows in self.blocks():
            rows = rows.to(queries.dtype)
            scores = torch.cat([best, queries @ (unit(rows) if cosine else rows).T], 1)
            best, place = scores.topk(min(k, scores.shape[1]))
            names = torch.cat([names, ids.expand(len(queries), -1)], 1).gather(1, place)
        return best, names

    def _check(self, z: Any) -> dict[str, Any]:
        """Return how gradients were made; refuse what does not say it, or does not belong here."""
        _require_rows(z, "add: `z` is what project returned, (samples, columns)")
        if not hasattr(z, "projection"):
            raise ArgumentTypeError(
                "add: `z` does not say how it was projected: torch forgets that in every op, such as z.cpu() or "
                "torch.cat. Pass what project returned as it is; the store moves and converts it."
            )
        made_by = _source(z)
        self.manifest = self.manifest or self._read_manifest()  # another process may have been first
        if self.manifest:
            self._refuse_other({**made_by, "dtype": self.manifest["dtype"]}, self.manifest)
        return made_by

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES[self.manifest["dtype"]]

    def _file(self, what: str, shard: str) -> Path:
        return self.path / f"{what}-{shard}.npy"

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: it is a file. A store is a folder.")
        try:
            found = json.loads(path.read_bytes()) if path.exists() else {"format": _FORMAT}
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}: damaged: {error}. Copy the manifest of a store that was made alike.") from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise StoreError(f"{path}: it is not the manifest of a gradient store of this version. Use another folder.")
        return found if len(found) > 1 else {}

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _npy.write_error(self.path, error) from error
        content = json.dumps({"format": _FORMAT, **manifest}, indent=1)
        _npy.publish(self.path / "manifest.json", content.encode())
        self.manifest = self._read_manifest()
        self._refuse_other(manifest, self.manifest)

    def _new_shard(self) -> str:
        """Make the two files of a writer, under a name that no other has. Without ids the rows count for nothing."""
        shard = f"{time.time_ns():016x}-{os.urandom(4).hex()}"
        _npy.publish(self._file("rows", shard), _npy.header(self._dtype, (0, self.manifest["columns"])))
        _npy.publish(self._file("ids", shard), _npy.header(torch.int64, (0,)))
        return shard

    def _scan(self) -> dict[str, Tensor]:
        """Return the ids in each writer's files, as they are now. What was read once does not change."""
        self.manifest = self.manifest or self._read_manifest()
        for path in self.path.glob("ids-*.npy"):
            shard = path.stem.removeprefix("ids-")
            kind, shape = _npy.read_header(path)
            dtype, (there, *columns) = _npy.read_header(self._file("rows", shard))
            if (kind, len(shape), dtype, columns) != (torch.int64, 1, self._dtype, [self.manifest["columns"]]):
                raise StoreError(f"{path}: it does not belong to the manifest. Move it and its rows away.")
            known = self._ids.get(shard, _NONE)
            end = min(shape[0], there)
            if end > len(known):
                self._ids[shard] = torch.cat([known, _npy.read_rows(path, len(known), end, kind, shape)])
        return dict(sorted(self._ids.items()))

    def _kept(self, shard: str) -> Tensor:
        """Return which rows of a writer count: an id that two processes added at once counts where it comes first."""
        before = [ids for other, ids in self._ids.items() if other < shard]
        return ~torch.isin(self._ids[shard], torch.cat([_NONE, *before]))

    def _refuse_other(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        """Refuse gradients that were made in another way."""
        for name in ("parameters", "kind", "seed", "size", "scales", "weights", "dtype"):
            if expected.get(name) != found.get(name):
                other = f"{name} is {found.get(name)!r}, in the store {expected.get(name)!r}: use {_how(expected)}"
                raise StoreError(
                    f"{self.path}: these gradients cannot be compared with those of the store: "
                    f"{_ADVICE.get(name, other)}."
                )


_ADVICE = {
    "weights": "the model had other weights: use one store for each checkpoint",
    "scales": "other `scales` were given, or none: pass those of the store",
    "parameters": "the model has other parameters, or other ones need a gradient",
    "dtype": "they are stored in another dtype: make both with the same dtype=...",
}


def unit(rows: Tensor) -> Tensor:
    """Return rows with a norm of one; zeros stay."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / norms.where(norms > 0, 1)


def _require_rows(rows: Any, expected: str) -> None:
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        found = (rows.dtype, *rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ArgumentTypeError(f"{expected}; found {found}.")


def _source(z: Tensor) -> dict[str, Any]:
    """Return how gradients were made, as JSON has it."""
    made_by = dict(z.__dict__["projection"])
    for name in ("weights", "scales"):
        made_by[name] = None if made_by[name] is None else f"{int(made_by[name]):x}"
    return made_by


def _how(manifest: dict[str, Any]) -> str:
    return f"project({manifest['size']}, kind={manifest['kind']!r}, seed={manifest['seed']})"


def _read_ids(ids: Iterable[int] | Tensor) -> Tensor:
    """Return ids as int64; refuse what is no list of whole numbers."""
    given: Any = ids
    try:
        found = torch.as_tensor(given if isinstance(ids, Tensor) or hasattr(ids, "__array__") else list(ids)).detach()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(())  # refused below
    found = found.long() if not found.numel() else found
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ArgumentTypeError(
            f"ids: expected a whole number for each sample, found {given!r:.80}. For samples with other names, keep a "
            "list of these and pass positions in it."
        )
    return found.to("cpu", torch.int64).contiguous()


def _refuse_known(ids: Tensor, known: set[int]) -> None:
    """Refuse ids that are known, or that occur twice."""
    unique, counts = torch.unique(ids, return_counts=True)
    twice, there = unique[counts > 1].tolist(), [i for i in ids.tolist() if i in known]
    if twice:
        raise ArgumentError(f"ids: {twice[0]} occurs twice ({len(twice)} ids do). Pass each sample once.")
    if there:
        raise ArgumentError(
            f"ids: {there[0]} is in the store already ({len(there)} of {len(ids)} are). Add each sample once: "
            "store.resume(ids) returns those that are still to be added."
        )
