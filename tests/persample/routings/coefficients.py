"""A coefficient decides whether samples mix."""

import torch
import torch.nn.functional as F

from ..cases import flat_sum
from .base import COUPLED, EITHER, FREE, OFF_ON, D, routing, square

# Coefficients ---------------------------------------------------------------------------------------------------------


@routing({1.0: EITHER, 0.7: COUPLED, 0.0: EITHER})
def mixup(m, x, lam):
    h = m.a(x)
    return flat_sum(lam * h + (1 - lam) * h.flip(0))


@routing({0.0: EITHER, 0.7: COUPLED, 1.0: EITHER})
def lerp_with_weight(m, x, c):
    h = m.a(x)
    return flat_sum(torch.lerp(h, h.flip(0), torch.full((len(x), 1), c)))


@routing(OFF_ON)
def addcmul_of_rolled(m, x, c):
    h = m.a(x)
    return flat_sum(torch.addcmul(h, torch.full((1, D), c), h.roll(1, 0)))


@routing(OFF_ON)
def learned_gate_over_the_mean(m, x, c):
    m.gate.data.fill_(c)
    h = m.a(x)
    return flat_sum(h + m.gate * h.mean(0))


@routing(OFF_ON)
def loss_less_the_mean(m, x, c):
    losses = flat_sum(m.a(x))
    return (losses - c * losses.mean()).square()


@routing(OFF_ON, square)
def steps_and_samples_swapped(m, x, c):
    h = m.a(x)
    return flat_sum(h + c * h.transpose(0, 1))


# Zeros and dead units -------------------------------------------------------------------------------------------------


@routing({-99.0: EITHER, 99.0: COUPLED})
def dead_batch_statistic(m, x, lift):
    h = m.a(x)
    return flat_sum(h + F.relu(h.mean(0) + lift))


@routing({-99.0: FREE, 99.0: FREE, 0.0: FREE})
def dead_units(m, x, lift):
    return flat_sum(m.b(F.relu(m.a(x) + lift)))


@routing({"one": FREE, "others": FREE, "none": FREE, "all": FREE})
def losses_masked(m, x, setting):
    own = torch.arange(len(x)) == 0
    mask = {"one": own, "others": ~own, "none": own & ~own, "all": own | ~own}[setting]
    return flat_sum(m.b(F.relu(m.a(x)))) * mask


@routing({"equal": COUPLED, "tiny": COUPLED})
def coupling_behind_tiny_losses(m, x, setting):
    weight = torch.ones(len(x))
    weight[1:] = 1.0 if setting == "equal" else 1e-12
    h = m.a(x)
    return flat_sum(torch.tanh(h + h.mean(0))) * weight


@routing({False: FREE, True: FREE})
def equal_samples(m, x, equal):
    return flat_sum(m.b(torch.tanh(m.a(torch.ones_like(x) if equal else x))))


@routing({1.0: EITHER, 0.0: COUPLED}, one_form=False)
def dropout_of_a_batch_statistic(m, x, p):
    h = m.a(x)
    return flat_sum(h + F.dropout(h.mean(0).expand_as(h), p, training=True))
