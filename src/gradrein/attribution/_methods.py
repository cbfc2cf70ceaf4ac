"""Answers from stores of projected gradients. In the examples `store` holds the gradients `z` of samples 0 to 7."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .._validate import finite, number
from ..errors import ArgumentError, ArgumentTypeError
from ._store import GradientStore, unit

Stores: TypeAlias = GradientStore | Sequence[GradientStore]


def tracin(
    stores: Stores, queries: Tensor | Sequence[Tensor], *, rates: Sequence[float] | None = None, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """Return how much training on each sample lowered the loss of each query, to first order (TracIn).

    The sum over checkpoints of learning rate times inner product of the two gradients.

    Args:
        stores: one store for each checkpoint, with the same samples.
        queries: the projected gradients of the queries, for each checkpoint.
        rates: the learning rate at each checkpoint; 1 by default.
        cosine: compare directions alone, so that samples with large gradients do not dominate.

    Returns:
        Scores (queries, samples), above zero where the sample helped, and the ids of the samples.

    Raises:
        ArgumentError: stores, queries and rates do not fit together.

    Examples:
        >>> scores, ids = gradrein.attribution.tracin([store, store], [z[:2], z[:2]], rates=[0.1, 0.01])
        >>> scores.shape
        torch.Size([2, 8])

    See Also:
        [`gradrein.attribution.GradientStore`][], [`gradrein.attribution.trak`][]
    """
    every, asked = _checkpoints("tracin", stores, queries)
    directions = [unit(query) for query in asked] if cosine else asked
    return _products("tracin", every, directions, rates, cosine)


def less(
    stores: Stores, tasks: Mapping[str, Tensor | Sequence[Tensor]], *, rates: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return how useful each sample is for the task that it helps most (the selection score of LESS).

    The cosine with the validation samples of a task, averaged over these and added up over checkpoints, weighted by the
    learning rates; the best task counts. Train on the samples with the highest scores.

    Args:
        stores: one store for each checkpoint, with the same samples; LESS scales gradients as Adam does.
        tasks: for each task the projected gradients of its validation samples, for each checkpoint.
        rates: the learning rate at each checkpoint; 1 by default.

    Returns:
        Scores (samples,) and the ids of the samples.

    Raises:
        ArgumentError: stores, tasks and rates do not fit together.

    Examples:
        >>> scores, ids = gradrein.attribution.less(store, {"task": z[:2]})
        >>> scores.shape
        torch.Size([8])

    See Also:
        [`gradrein.attribution.tracin`][], [`gradrein.persample.PerSample`][]
    """
    if not isinstance(tasks, Mapping) or not tasks:
        raise ArgumentTypeError("less: `tasks` is a dict from names of tasks to gradients of their validation samples.")
    read = [_checkpoints("less", stores, queries) for queries in tasks.values()]
    every = read[0][0]
    # The mean of cosines is the inner product with the mean of unit vectors.
    means = [torch.stack([unit(asked[c]).mean(0) for _, asked in read]) for c in range(len(every))]
    scores, ids = _products("less", every, means, rates, True)
    return scores.amax(0), ids


def trak(
    stores: Stores, queries: Tensor | Sequence[Tensor], residuals: Tensor, *, damping: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what each sample adds to the output for each query (the estimator of TRAK).

    With gradients of `margins` instead of the loss, Φ of the samples and φ of a query: φ (Φ'Φ + damping)⁻¹ Φ', averaged
    over models, times the average residual of the sample.

    Args:
        stores: one store for each model, with the same samples. Models trained on halves of the data work best.
        queries: the projected gradients of the queries, for each model.
        residuals: ``sigmoid(-margin)``, one minus the probability of the right class: a number for each id, so that
            ``residuals[id]`` is that of the sample; (ids,) or (models, ids).
        damping: added to the diagonal of Φ'Φ, as a share of its mean.

    Returns:
        Scores (queries, samples), and the ids of the samples.

    Raises:
        ArgumentError: `residuals` do not fit the ids, or the gradients do not span the columns.

    Examples:
        >>> scores, ids = gradrein.attribution.trak(store, z[:2], residuals=torch.full((8,), 0.5), damping=0.1)
        >>> scores.shape
        torch.Size([2, 8])

    See Also:
        [`gradrein.attribution.margins`][], [`gradrein.attribution.tracin`][]
    """
    every, asked = _checkpoints("trak", stores, queries)
    number(damping, "damping")
    ids, mean = every[0].ids, torch.as_tensor(residuals).detach().to("cpu", torch.float64)
    mean = mean.mean(0) if mean.dim() == 2 else mean
    if mean.dim() != 1 or not 0 <= int(ids.min()) <= int(ids.max()) < len(mean):
        raise ArgumentError(
            "trak: `residuals` has a number for each id, so that residuals[id] is that of the sample; found shape "
            f"{tuple(residuals.shape)} for ids from {int(ids.min())} to {int(ids.max())}."
        )
    solved = [_solved(store, query.double(), damping) for store, query in zip(every, asked, strict=True)]
    scores, ids = _products("trak", every, solved, None, False)
    return (scores / len(every) * mean[ids]).to(asked[0].dtype), ids


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the right class for each sample: what TRAK takes the gradients of.

    Examples:
        >>> gradrein.attribution.margins(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor([2.])

    See Also:
        [`gradrein.attribution.trak`][]
    """
    right = logits.gather(-1, labels[..., None])
    others = logits.scatter(-1, labels[..., None], -torch.inf)
    return right.squeeze(-1) - others.logsumexp(-1)


def outliers(stores: Stores, k: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the samples by how large their gradients are, largest first: wrong labels, noise and rare cases.

    The score is the squared norm, averaged over the stores: TracIn's influence of a sample on itself. A model in
    training shows wrong labels best before it has learned them.

    Args:
        stores: one store for each checkpoint, with the same samples.
        k: how many to return; all by default.

    Returns:
        Scores and ids, (k,) each.

    Examples:
        >>> scores, ids = gradrein.attribution.outliers(store, k=1)
        >>> scores.shape, ids.shape
        (torch.Size([1]), torch.Size([1]))

    See Also:
        [`gradrein.attribution.duplicates`][]
    """
    every, _ = _checkpoints("outliers", stores, None)
    ids = every[0].ids
    total = torch.zeros(len(ids), dtype=torch.float64)
    for store in every:
        for place, rows in _placed(store, ids):
            total[place] += rows.double().square().sum(1) / len(every)
    scores, order = total.sort(descending=True, stable=True)
    return scores[:k].float(), ids[order[:k]]


def duplicates(store: GradientStore, threshold: float = 0.99) -> tuple[Tensor, Tensor]:
    """Return pairs of samples with nearly the same gradient, nearest first. Compares all pairs, by blocks.

    Args:
        store: the samples.
        threshold: the smallest cosine of a pair.

    Returns:
        Cosines (pairs,) and ids (pairs, 2).

    Raises:
        ArgumentError: the threshold is not a cosine.

    Examples:
        >>> cosines, pairs = gradrein.attribution.duplicates(store, threshold=0.999)
        >>> pairs  # the last sample is the first once more
        tensor([[0, 7]])

    See Also:
        [`gradrein.attribution.outliers`][], [`gradrein.attribution.GradientStore`][]
    """
    _checkpoints("duplicates", store, None)
    number(threshold, "threshold", -1, 1)
    cosines, pairs = [torch.empty(0)], [torch.empty(0, 2, dtype=torch.int64)]
    for i, (ids, rows) in enumerate(store.blocks()):
        ours = unit(rows.float())
        for j, (others, more) in enumerate(store.blocks()):
            if j > i:
                break
            found = ours @ unit(more.float()).T
            a, b = ((found >= threshold).tril(-1) if i == j else found >= threshold).nonzero(as_tuple=True)
            cosines.append(found[a, b])
            pairs.append(torch.stack([others[b], ids[a]], 1))
    scores, order = torch.cat(cosines).sort(descending=True, stable=True)
    return scores, torch.cat(pairs)[order]


def _checkpoints(
    call: str, stores: Stores, queries: Tensor | Sequence[Tensor] | None
) -> tuple[list[GradientStore], list[Tensor]]:
    """Return stores of the same samples, and the queries for each of them."""
    every = [stores] if isinstance(stores, GradientStore) else list(stores)
    if not every or not all(isinstance(store, GradientStore) for store in every):
        raise ArgumentTypeError(f"{call}: expected a GradientStore, or one for each checkpoint; found {stores!r:.80}.")
    first = every[0].ids.sort().values
    for store in every[1:]:
        if not torch.equal(store.ids.sort().values, first):
            raise ArgumentError(
                f"{call}: {store.path} and {every[0].path} do not hold the same ids, {len(store)} and {len(first)}. "
                "Add the same samples to each."
            )
    asked = [queries] if isinstance(queries, Tensor) else list(queries or [])
    if queries is not None and (len(asked) != len(every) or len({len(query) for query in asked}) > 1):
        raise ArgumentError(
            f"{call}: there are {len(every)} stores, and queries for {len(asked)} of them, of lengths "
            f"{[len(query) for query in asked]}. Pass the gradients of the same queries for each."
        )
    return every, [store._comparable(query, call) for store, query in zip(every, asked, strict=False)]


def _products(
    call: str, stores: list[GradientStore], directions: list[Tensor], rates: Sequence[float] | None, cosine: bool
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum over stores of the products of directions with all samples, and the ids of these."""
    weights = [1.0] * len(stores) if rates is None else [finite(r, f"{call}: a rate is a number") for r in rates]
    if len(weights) != len(stores):
        raise ArgumentError(f"{call}: there are {len(stores)} stores and {len(weights)} `rates`. Pass one for each.")
    ids = stores[0].ids
    total = torch.zeros(len(directions[0]), len(ids), dtype=torch.float64)
    for store, direction, weight in zip(stores, directions, weights, strict=True):
        for place, rows in _placed(store, ids):
            rows = rows.to(direction.dtype)
            total[:, place] += weight * (direction @ (unit(rows) if cosine else rows).T).double()
    return total.to(directions[0].dtype), ids


def _placed(store: GradientStore, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gradients of a store, a few MB at a time, and where they belong in the order of these ids."""
    order, place = ids.sort()
    for some, rows in store.blocks():
        yield place[torch.searchsorted(order, some)], rows


def _solved(store: GradientStore, queries: Tensor, damping: float) -> Tensor:
    products = torch.zeros(queries.shape[1], queries.shape[1], dtype=torch.float64)
    for _, rows in store.blocks():
        products += rows.double().T @ rows.double()
    products.diagonal().add_(damping * products.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(products)
    if int(failed) or float(factor.diagonal().min()) <= 1e-7 * float(factor.diagonal().max()):
        raise ArgumentError(
            f"trak: the {len(store)} gradients of {store.path} do not span the {len(products)} columns, so their "
            "products have no inverse. Project to a smaller size, or pass a `damping` such as 0.01."
        )
    found: Tensor = torch.cholesky_solve(queries.T, factor).T
    return found
