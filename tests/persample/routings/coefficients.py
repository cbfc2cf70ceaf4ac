"""A coefficient decides whether samples mix."""

import torch
import torch.nn.functional as F

from ..cases import flat_sum
from .base import ANY, COUPLED, EITHER, FREE, OFF_ON, D, routing, square

# Coefficients ---------------------------------------------------------------------------------------------------------


@routing({1.0: EITHER, 0.7: COUPLED, 0.0: EITHER})
def mixup(m, x, lam):
    h = m.a(x)
    return flat_sum(lam * h + (1 - lam) * h.flip(0))


@routing({1.0: EITHER, 0.7: COUPLED, 0.0: EITHER})
def mixup_by_tensor(m, x, lam):
    h, lam = torch.tanh(m.a(x)), torch.full((len(x), 1), lam)
    return flat_sum(m.b(lam * h + (1 - lam) * h.flip(0)))


@routing(OFF_ON)
def mixup_of_some_rows(m, x, c):
    h = m.a(x)
    part = torch.zeros(len(x), 1).index_fill(0, torch.tensor([1]), c)
    return flat_sum(h + part * h.roll(1, 0))


@routing({0.0: EITHER, 0.7: COUPLED, 1.0: EITHER})
def lerp_with_weight(m, x, c):
    h = m.a(x)
    return flat_sum(torch.lerp(h, h.flip(0), torch.full((len(x), 1), c)))


@routing({0.0: EITHER, 0.7: COUPLED, 1.0: EITHER})
def lerp_with_number(m, x, c):
    h = m.a(x)
    return flat_sum(torch.lerp(h, h.flip(0), c))


@routing(OFF_ON)
def addcmul_of_rolled(m, x, c):
    h = m.a(x)
    return flat_sum(torch.addcmul(h, torch.full((1, D), c), h.roll(1, 0)))


@routing(OFF_ON)
def addcdiv_of_mean(m, x, c):
    h = m.a(x)
    return flat_sum(torch.addcdiv(h, c * h.mean(0), torch.full((1, D), 2.0)))


@routing(OFF_ON)
def add_with_alpha(m, x, c):
    h = m.a(x)
    return flat_sum(torch.add(h, h.flip(0), alpha=c))


@routing(OFF_ON)
def learned_gate_over_the_mean(m, x, c):
    m.gate.data.fill_(c)
    h = m.a(x)
    return flat_sum(h + m.gate * h.mean(0))


@routing(OFF_ON)
def learned_gate_over_a_neighbour(m, x, c):
    m.gate.data.fill_(c)
    h = m.a(x)
    return flat_sum(m.b(h + m.gate * torch.tanh(h.roll(1, 0))))


@routing(OFF_ON)
def centred(m, x, c):
    h = m.a(x)
    return flat_sum(h - c * h.mean(0, keepdim=True))


@routing(OFF_ON)
def divided_by_the_deviation(m, x, c):
    h = m.a(x)
    return flat_sum(h / (1 + c * h.std(0)))


@routing(OFF_ON)
def loss_less_the_mean(m, x, c):
    losses = flat_sum(m.a(x))
    return (losses - c * losses.mean()).square()


@routing(OFF_ON)
def loss_times_the_sum(m, x, c):
    losses = flat_sum(m.a(x))
    return losses * (1 + c * losses.sum())


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


@routing({-99.0: FREE, 99.0: FREE}, square)
def dead_steps(m, x, lift):
    lifts = lift * (torch.arange(x.shape[1]) % 2)[:, None]
    return flat_sum(F.relu(m.a(x) + lifts).mean(1) + m.b(x).sum(1))


@routing({"one": FREE, "others": FREE, "none": FREE, "all": FREE})
def losses_masked(m, x, setting):
    own = torch.arange(len(x)) == 0
    mask = {"one": own, "others": ~own, "none": own & ~own, "all": own | ~own}[setting]
    return flat_sum(m.b(F.relu(m.a(x)))) * mask


@routing({"one": EITHER, "all": COUPLED})
def coupling_behind_masked_losses(m, x, setting):
    h = m.a(x)
    weight = torch.full((len(x),), float(setting == "all"))
    weight[0] = 1.0
    return flat_sum(h + h.flip(0)) * weight


@routing({"equal": COUPLED, "tiny": COUPLED})
def coupling_behind_tiny_losses(m, x, setting):
    weight = torch.ones(len(x))
    weight[1:] = 1.0 if setting == "equal" else 1e-12
    h = m.a(x)
    return flat_sum(torch.tanh(h + h.mean(0))) * weight


@routing({0.0: EITHER, 1e-6: COUPLED, 1.0: COUPLED})
def tiny_coefficient(m, x, c):
    h = m.a(x)
    return flat_sum(h + c * h.flip(0))


@routing({"soft": FREE, "hard": FREE})
def experts_under_gates(m, x, setting):
    heat = 1.0 if setting == "soft" else 1e4
    gates = (heat * x[:, :2]).softmax(1)
    return flat_sum(gates[:, :1] * m.a(x) + gates[:, 1:] * m.b(x))


@routing({False: FREE, True: FREE})
def equal_samples(m, x, equal):
    return flat_sum(m.b(torch.tanh(m.a(torch.ones_like(x) if equal else x))))


@routing(ANY)
def dropout_by_mask(m, x, keep):
    mask = (torch.rand(len(x), D) < keep).double()
    return flat_sum(m.b(torch.tanh(m.a(x)) * mask))


@routing({0.0: FREE, 0.5: FREE, 0.9: FREE}, square, one_form=False)
def dropout(m, x, p):
    return flat_sum(m.b(F.dropout(torch.tanh(m.a(x)), p, training=True)))


@routing({1.0: EITHER, 0.0: COUPLED}, one_form=False)
def dropout_of_a_batch_statistic(m, x, p):
    h = m.a(x)
    return flat_sum(h + F.dropout(h.mean(0).expand_as(h), p, training=True))
