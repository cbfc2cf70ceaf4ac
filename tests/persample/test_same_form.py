"""Graphs of one form with other data: right or refused, in any order, and every time.

Each order has a batch size of its own, so that no order finds what another has left behind.
"""

import pytest
import torch

import gradrein
from gradrein.errors import BatchCouplingError, GradreinError, UnsupportedOperationError

from .oracle import close, flat, grouped, loop
from .routings import COUPLED, EITHER, FREE, ROUTINGS

pytestmark = pytest.mark.filterwarnings("ignore:.*sparse:UserWarning")

ORDERS = {"harmless first": 4, "harmless last": 6}


def in_order(settings, order):
    """Return the settings, each several times."""
    twice = [s for s in settings for _ in range(2)]
    if order == "harmless first":
        return [*twice, settings[0]]
    return [*reversed(twice), settings[-1]]


def built(routing, model, batch, setting):
    """Return losses on fresh data, the groups, and the gradient of each loss alone."""
    losses = routing.losses(model, routing.draw(batch), setting)
    groups = routing.groups(batch, setting) if routing.groups else None
    return losses, groups, grouped(loop(losses, dict(model.named_parameters())), groups)


def asked(routing, verdict, losses, model, groups, **options):
    """Return the answers, or None where the verdict allows the refusal that came."""
    coupled = UnsupportedOperationError if routing.opaque else BatchCouplingError
    allowed = {FREE: (), COUPLED: coupled, EITHER: GradreinError}[verdict]
    try:
        ps = gradrein.per_sample(losses, model, sample_groups=groups, **options)
        ps.grads()
    except allowed:
        return None
    return ps


def check_answers(ps, expected, rounding):
    found = ps.grads()
    assert list(found) == list(expected)
    for name in expected:
        close(found[name], expected[name], rounding, name)
    close(ps.norms(), flat(expected).double().norm(dim=1), rounding, "norms")


def check_clipped(ps, model, expected, rounding):
    """Compare the clipped mean; the threshold lies among the norms."""
    rows = flat(expected).double()
    norms = rows.norm(dim=1)
    limit = float(norms.max()) / 2 or 1.0
    model.zero_grad()
    ps.clip_(limit)
    factors = (limit / norms.clamp(min=1e-300)).clamp(max=1) / len(norms)
    written = {name: p.grad for name, p in model.named_parameters() if name in expected}
    close(torch.cat([g.flatten() for g in written.values()]), factors @ rows, rounding, "clipped")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_right_or_refused(name, order):
    routing, batch = ROUTINGS[name], ORDERS[order]
    model = routing.model(batch)
    for place, setting in enumerate(in_order(list(routing.verdicts), order)):
        verdict = routing.verdicts[setting]
        losses, groups, expected = built(routing, model, batch, setting)
        ps = asked(routing, verdict, losses, model, groups)
        if ps is None:
            continue
        check_answers(ps, expected, routing.rounding())
        check_clipped(ps, model, expected, routing.rounding())
        assert verdict != COUPLED, f"call {place}, setting {setting}: answered, though coupled"


@pytest.mark.parametrize("name", ROUTINGS)
def test_right_when_coupling_is_allowed(name):
    routing, batch = ROUTINGS[name], 4
    model = routing.model(batch)
    settings = list(routing.verdicts)
    for setting in [*settings, settings[0]]:
        losses, groups, expected = built(routing, model, batch, setting)
        ps = asked(routing, FREE, losses, model, groups, allow_coupling=True, allow_opaque=routing.opaque)
        check_answers(ps, expected, routing.rounding())


# The verdicts themselves, by brute force.


def owners_of_rows(routing, batch, setting):
    """Change each row of the data in turn, by little; return which samples' losses change."""
    model, x = routing.model(batch), routing.draw(batch)
    step = 1e-2 if x.dtype == torch.float64 else 1
    other = x + step * routing.draw(batch) if x.is_floating_point() else (x + 1) % 7

    def losses(x):
        torch.manual_seed(1)
        out = routing.losses(model, x, setting).detach().double()
        groups = routing.groups(batch, setting) if routing.groups else None
        return grouped({"losses": out.flatten(1).sum(1) if out.dim() > 1 else out}, groups)["losses"]

    before = losses(x)
    after = torch.stack([losses(torch.cat([x[:j], other[j : j + 1], x[j + 1 :]])) for j in range(len(x))])
    return (after - before).abs() > 1e-12 * before.abs()


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_verdicts_hold(name):
    routing = ROUTINGS[name]
    for setting, verdict in routing.verdicts.items():
        changed = owners_of_rows(routing, 4, setting).sum(1)
        if verdict == FREE:
            assert changed.max() <= 1, f"setting {setting}: a row enters several losses"
        if verdict == COUPLED:
            assert changed.max() > 1, f"setting {setting}: no row enters several losses"
