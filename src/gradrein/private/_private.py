"""The engine: losses in, a private step out, and what it costs."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .._torch.dtensor import distribute_own, is_dtensor, stored_shard
from .._torch.dynamo import untraced
from .._validate import count, finite, number
from ..errors import ArgumentError, PrivacyError
from . import _accounting
from ._clipping import Quantile, beside_count, by_pattern, clip_groups
from ._gate import Watched, check_model, from_first, ranks_of, require_same, sum_over
from ._random import Secure, Seeded
from ._sampling import Loader, Parts, check_loader


class Private:
    """Train with differential privacy: draw batches, clip each sample's gradient, add noise, step, account for it.

    What is protected is a sample: one entry of the dataset. To protect a user, make the user one entry.

    Args:
        model: the model as it is, or wrapped by DDP or `fully_shard`.
        optimizer: the one optimizer of all that is trained.
        loader: a `DataLoader` with a batch size, which becomes the expected one. `Private.loader` has its dataset,
            collate function, workers and pinning.
        max_norm: how large the gradient of one sample may be; or a dict from patterns of parameter names to numbers, to
            clip each group of parameters by itself. The first pattern that fits counts.
        noise_multiplier: standard deviation of the noise over the sensitivity of the sum. Pass this or `epsilon`.
        epsilon: the budget for all `epochs`. The noise follows from it, and more steps are refused.
        delta: the delta of the guarantee, below one over the number of samples.
        epochs: how many epochs are planned; needed for `epsilon`.
        max_physical_batch: the most samples in one batch of the loader. A larger batch comes in parts.
        gamma: multiply by ``max_norm / (norm + gamma)`` instead of clipping ("automatic" clipping, Bu et al. 2022).
        quantile: learn the threshold, beginning with `max_norm`.
        accountant: as in `private.epsilon`. "unamplified" trains on shuffled batches of a fixed size.
        nonfinite: "raise" an error for a sample whose gradient is NaN or infinite, or "drop" the sample.
        seed: of batches and noise; by default from the operating system. Generators of training are never used.
        secure: batches and noise from a cryptographic generator with a key from the operating system, which
            is not saved: a run that goes on from a state draws others.

    Attributes:
        loader: the batches of an epoch, each time it is iterated. One that is empty has a sample that does not count.
        noise_multiplier: as given, or as follows from `epsilon`.
        sample_rate: how likely a sample is in a batch.
        steps: how many steps were taken.

    Raises:
        ArgumentError: an argument has an invalid value.
        PrivacyError: epsilon would not hold, for a sampler, dataset, optimizer, layer or parameter that is named.
        RankError: there are several ranks, and the model is not wrapped over all of them.
        MissingDependencyError: `dp-accounting` is not installed.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100))
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=10)
        >>> run = gradrein.private.Private(model, optimizer, loader, max_norm=1.0, noise_multiplier=1.0, delta=1e-3)
        >>> for x, y in run.loader:
        ...     _ = run.step((model(x).squeeze(1) - y) ** 2)
        >>> run.steps, f"{run.epsilon():.1f}"
        (10, '1.6')

    See Also:
        [`gradrein.private.epsilon`][], [`gradrein.per_sample`][]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        *,
        max_norm: float | Mapping[str, float],
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float,
        epochs: int | None = None,
        max_physical_batch: int | None = None,
        gamma: float | None = None,
        quantile: Quantile | None = None,
        accountant: _accounting.Accountant = "pld",
        nonfinite: Literal["raise", "drop"] = "raise",
        seed: int | None = None,
        secure: bool = False,
    ) -> None:
        check_loader(loader)
        check_model(model, optimizer)
        samples, batch_size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]  # they are known
        if not 0 < number(delta, "delta", 0, 1) < 1 / samples:
            raise ArgumentError(
                f"Private: delta must be above 0 and below one over the number of samples, 1/{samples}; found "
                f"{delta:g}. With a larger one, publishing a sample would count as private."
            )
        if (noise_multiplier is None) == (epsilon is None) or (epsilon is not None and epochs is None):
            raise ArgumentError("Private: pass either noise_multiplier, or epsilon and epochs.")
        if (secure and seed is not None) or nonfinite not in ("raise", "drop"):
            raise ArgumentError("Private: secure=True has no seed, and nonfinite is 'raise' or 'drop'.")
        if max_physical_batch is not None:
            count(max_physical_batch, "max_physical_batch")
        self.model, self.optimizer, self.steps = model, optimizer, 0
        self._watched = Watched(model)
        self._device = stored_shard(next(iter(self._watched.parameters.values()))).device
        self._rank, self._ranks = ranks_of(model, self._watched.parameters)
        key = os.urandom(32) if seed is None else seed.to_bytes(32, "little", signed=True)
        self._key = from_first(torch.tensor(list(key), device=self._device), self._rank, self._ranks)
        ranks, shuffled = (self._rank, self._ranks), accountant == "unamplified"
        self._parts = Parts(samples, batch_size, max_physical_batch, shuffled, self._source(secure), ranks)
        self.sample_rate = self._parts.rate
        self._planned = None if epochs is None else count(epochs, "epochs") * self._parts.in_epoch
        self._accounted: dict[str, Any] = {"sample_rate": self.sample_rate, "delta": delta, "accountant": accountant}
        self.noise_multiplier = finite(noise_multiplier or 0.0, "Private: noise_multiplier is a number")
        if epsilon is not None:
            steps = self._planned or 0
            self.noise_multiplier = _accounting.noise_multiplier(epsilon=epsilon, steps=steps, **self._accounted)
        self.epsilon()  # refuses what cannot be accounted for
        self._max_norms, self._groups = by_pattern(self._watched.parameters, max_norm)
        self._options: dict[str, Any] = {"divide_by": batch_size, "gamma": gamma, "nonfinite": nonfinite}
        self._quantile, self._gradient_noise, self._count_noise = quantile, self.noise_multiplier, 0.0
        if quantile is not None:
            self._count_noise = quantile.noise or batch_size / 20
            self._gradient_noise = beside_count(self.noise_multiplier, self._count_noise, len(self._groups))
        self._settings = {
            "samples": samples,
            "batch size": batch_size,
            "noise multiplier": self.noise_multiplier,
            "accountant": accountant,
            "max_norm": dict(self._max_norms),
            "gamma": gamma,
            "quantile": str(quantile),
            "secure": secure,
        }
        self.loader = Loader(loader, self._parts, self._epoch)
        self._sums: list[Tensor | None] | None = None
        self._open: tuple[int, bool] | None = None
        self._below = 0.0

    @untraced  # batches change in size, and what is drawn and counted is no part of a graph
    def step(self, losses: Tensor) -> bool:
        """Clip the gradient of each sample of the last batch of the loader and, if it completes a batch, take the step.

        Args:
            losses: one loss per sample, not reduced, in any order. Further dimensions, such as tokens, are summed.

        Returns:
            Whether a step was taken; False while parts of the batch are to come.

        Raises:
            PrivacyError: the losses are not those of the last batch of `loader`; a parameter, its gradient or a
                buffer was changed by somebody else; the budget is spent.
            BatchCouplingError: the loss of one sample depends on others.
            UnsupportedOperationError: the graph has ops, hooks or checkpoints that cannot be looked into.
            NonFiniteGradientError: the gradient of a sample is NaN or infinite.
        """
        if self._open is None:
            raise PrivacyError(
                "Private.step: no batch of `run.loader` is left to step on. Each is good for one step, and no other is "
                "accounted for. Iterate over run.loader, without a wrapper that fetches ahead."
            )
        size, last = self._open
        found = len(losses) if isinstance(losses, Tensor) and losses.ndim else 1
        if found != max(1, size) or not losses.ndim:
            raise PrivacyError(
                f"Private.step: the last batch has {max(1, size)} samples, and {found} losses were passed. Pass "
                "one for each sample, not reduced, or a tensor of shape (samples, losses of each). If a sample is a "
                "user with several records, add their losses up."
            )
        self._watched.check()
        try:
            norms = clip_groups(
                losses if size else losses[:0], self.model, self._groups, self._max_norms, **self._options
            )
        except BaseException:
            for p in self._watched.parameters.values():
                p.grad = None  # of a group that came first
            raise
        if self._quantile is not None:
            self._below += float((norms <= next(iter(self._max_norms.values()))).sum()) - len(norms) / 2
        self._open = None
        self._add_up()
        if last:
            self._finish()
        return last

    def epsilon(self) -> float:
        """Return the epsilon of all steps that were taken."""
        return _accounting.epsilon(noise_multiplier=self.noise_multiplier, steps=self.steps, **self._accounted)

    def state_dict(self) -> dict[str, Any]:
        """Return what the run needs to go on. Save it with model and optimizer, after `step` has returned True.

        Raises:
            PrivacyError: a batch is in use, and what it has added up is not private yet.
        """
        if self._sums is not None or self._open is not None:
            raise PrivacyError("Private.state_dict: a batch is in use. Save right after `step` has returned True.")
        key = None if self._settings["secure"] else self._key.clone()
        return {"steps": self.steps, "max_norm": dict(self._max_norms), "key": key, "settings": dict(self._settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Load model and optimizer before it, and the state of torch's generators after it.

        Raises:
            PrivacyError: the state is that of a run with other settings, for which its steps count differently.
        """
        for key, ours in self._settings.items():
            if state.get("settings", {}).get(key) != ours:
                raise PrivacyError(
                    f"Private.load_state_dict: the state is that of a run with another {key}, "
                    f"{state.get('settings', {}).get(key)!r} and not {ours!r}: one epsilon does not cover both."
                )
        self._drop_part()
        self._max_norms.update(state["max_norm"])
        if state["key"] is not None:
            self._key = state["key"].to(self._device)
            self._parts.source = self._source(secure=False)
        self._watched.accept(buffers=True)
        self.steps = state["steps"]

    def _source(self, secure: bool) -> Seeded | Secure:
        """Return where batches and noise come from: the same on all ranks."""
        key = bytes(self._key.tolist())
        return Secure(key) if secure else Seeded(key, self._device)

    def _epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Hand out the batches of an epoch, one at a time, each to be stepped on."""
        if self._planned is not None and self.steps >= self._planned:
            raise PrivacyError(
                f"Private: all {self._planned} steps that were planned are taken. More would spend more: plan more "
                "epochs from the start."
            )
        require_same(torch.cat([self._key, self._key.new_tensor([self.steps])]), self._rank, self._ranks)
        self._drop_part()
        waiting = self._parts.begin(self.steps)
        for batch in loader:
            if waiting is not self._parts.waiting or self._open is not None:
                raise PrivacyError(
                    "Private: the last batch of `run.loader` was not stepped on, or another loop has begun. Which "
                    "samples are left out may tell something about them: call run.step for every batch."
                )
            self._open = waiting.popleft()
            yield batch

    def _drop_part(self) -> None:
        """Forget an unfinished batch. Nothing of it has reached the parameters."""
        self._sums, self._open, self._below = None, None, 0.0

    def _add_up(self) -> None:
        """Take the gradients out of the sight of optimizers, until they are private."""
        parts = [p.grad for p in self._watched.parameters.values()]
        for p in self._watched.parameters.values():
            p.grad = None
        if self._sums is None:
            self._sums = parts
        else:
            pairs = zip(self._sums, parts, strict=True)
            self._sums = [b if a is None else a if b is None else a + b for a, b in pairs]

    def _finish(self) -> None:
        """Add noise to the sums of a logical batch, and step."""
        normals = self._parts.source.normals(self.steps)
        deviation = self._gradient_noise * math.hypot(*self._max_norms.values()) / self._parts.batch_size
        for p, total in zip(self._watched.parameters.values(), self._sums or [], strict=True):
            p.grad = _with_noise(p, total, normals(p.shape, p.dtype).mul_(deviation))
        if self._quantile is not None:
            self._learn(self._quantile, float(normals(torch.Size(), torch.float64)))
        self._drop_part()
        self.steps += 1  # before anything can fail: it counts
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._watched.accept()

    def _learn(self, quantile: Quantile, noise: float) -> None:
        """Move the threshold by a noisy count of the samples below it."""
        below = float(sum_over(torch.tensor(self._below, device=self._device), self._ranks))
        share = min(max((below + self._count_noise * noise) / self._parts.batch_size + 0.5, 0.0), 1.0)
        (key,) = self._max_norms
        self._max_norms[key] *= math.exp(quantile.rate * (quantile.share - share))


def _with_noise(p: Any, total: Any, noise: Any) -> Any:
    noise = noise.to(stored_shard(p).device)
    if is_dtensor(p):
        noise = distribute_own(noise, p.device_mesh, p.placements)
    if total is None:
        return noise
    return noise + total
