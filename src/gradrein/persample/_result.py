"""What `per_sample` returns."""

import torch

from .._notebook import card, histogram
from .._torch.dynamo import untraced
from .._validate import finite
from ..errors import AuditError, GradreinError, NonFiniteGradientError, RankError
from ._audit import Audit, as_row, audit, worst_of
from ._read import ReadAnswers
from ._write import WriteAnswers


class PerSample(ReadAnswers, WriteAnswers):
    """The gradients of a batch, one per sample. They are materialised only where a query needs it.

    Created by `per_sample`. It keeps the recorded graph alive: delete it when done.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> ps = gradrein.per_sample(model(x).sum(1), model)
        >>> ps.norms()
        tensor([5., 1.])

    See Also:
        [`gradrein.per_sample`][]
    """

    def __repr__(self) -> str:
        return f"PerSample({self._samples} samples, {len(self._parameters)} parameters)"

    @untraced
    def plan(self) -> str:
        """Return, for each parameter, the form in which its gradients are held, and how owners were found."""
        width = max((len(name) for name in self._parameters), default=0)
        source = "not needed" if self._source is None else self._source.value
        lines = [f"{self._samples} samples, owners {source}"]
        for name in self._parameters:
            strategy = self._forms[name].strategy if name in self._forms else "unused: no loss depends on it"
            lines.append(f"{name:<{width}}  {strategy}")
        return "\n".join(lines)

    @untraced
    def audit(self, *, tolerance: float | None = None, gathered: bool = False) -> Audit:
        """Check this step against autograd: that no use was missed and every sample got its own gradient.

        Compares weighted sums of the per-sample gradients with the gradient of the weighted losses, as autograd
        computes it, for every parameter. Costs two ordinary backward passes.

        Args:
            tolerance: largest relative error to accept; by default what the dtype allows.
            gathered: over the samples on all ranks: the largest error on any rank. Every rank has to call this.

        Returns:
            The errors found, all within the tolerance.

        Raises:
            AuditError: a parameter was missed, or its gradients do not add up.
            NonFiniteGradientError: the gradient of a sample is NaN or infinite, so the sums cannot be compared.
            RankError: another rank has found one of these errors.
        """
        ranks = self._ranks if gathered else self._ranks.alone()
        with self._asked("audit", ranks):
            eps = max((torch.finfo(p.dtype).eps for p in self._parameters.values()), default=0.0)
            eps = max(eps, self._eps)
            accepted = 5e-2 if eps > 1e-5 else 1e-3
            if tolerance is not None:
                accepted = finite(tolerance, "audit: tolerance is a number")
            self._handshake("audit", {"tolerance": accepted}, ranks=ranks)
            return self._audit_of_all(accepted, min(eps, 1e-7)) if gathered else self._audit(accepted, min(eps, 1e-7))

    def _audit(self, tolerance: float, eps: float) -> Audit:
        names = list(self._parameters)
        return audit(self._norms(), names, self._forms, self._engine, tolerance, eps, self._tensor.lengths)

    def _audit_of_all(self, tolerance: float, eps: float) -> Audit:
        """Audit on each rank, then tell the others, also of a fault."""
        names, ranks = list(self._parameters), self._ranks
        found, fault = None, None
        try:
            found = self._audit(tolerance, eps)
        except (AuditError, NonFiniteGradientError) as error:
            fault = error
        rows = ranks.gather(as_row(found, names)[None], ranks.order(1))
        if fault is not None:
            raise fault
        failed = rows[:, 0].nonzero().flatten().tolist()
        if failed:
            raise RankError(f"audit: ranks {failed} of the group found an error; see the error on those ranks.")
        return worst_of(rows, names)

    def _repr_html_(self) -> str:
        title, picture = f"{self._samples} samples", ""
        try:
            if self._known is not None or not (
                self._ranks.groups or self._ranks.copies
            ):  # else every rank would have to ask
                picture = histogram(self.norms().tolist())
                title += ": how large the gradient of each is"
        except GradreinError as error:
            title += f"; their norms are not known: {error}"
        return card(title, picture, self.plan())
