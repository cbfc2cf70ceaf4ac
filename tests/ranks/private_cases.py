"""Private training on several ranks: what one process does with the same seed. Run by `test_private_ranks`."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gradrein import errors, private

OPTIONS = {
    "plain": {},
    "in parts": {"max_physical_batch": 2},
    "empty batches": {"batch_size": 1},
    "quantile": {"quantile": private.Quantile(noise=2.0)},
    "groups": {"max_norm": {"*bias": 0.3, "*": 0.5}},
    "shuffled": {"accountant": "unamplified"},
    "no noise": {"noise_multiplier": 0.0},
}


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    model.register_buffer("constant", torch.ones(3))  # DDP writes buffers with what they hold
    return model


def wrap(model, wrapped):
    if wrapped == "ddp":
        return DistributedDataParallel(model)
    if wrapped == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def build(model, batch_size=8, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.randint(3, (30,), generator=generator)), batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = {"max_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 3, "accountant": "rdp", **options}
    return private.Private(model, optimizer, loader, **given)


def train(run, epochs=2):
    for _ in range(epochs):
        for x, y in run.loader:
            run.step(F.cross_entropy(run.model(x), y, reduction="none"))
    return run


def whole(model):
    each = [getattr(p.detach(), "full_tensor", lambda p=p: p.detach())() for p in model.parameters()]
    return torch.cat([p.flatten() for p in each])


def alone(options):
    """What one process ends with."""
    run = train(build(net(), **OPTIONS[options]))
    return whole(run.model), run.epsilon(), run.state_dict()["max_norm"]


def same_as_one_process(wrapped, options, expected):
    parameters, epsilon, thresholds = expected
    run = train(build(wrap(net(), wrapped), **OPTIONS[options]))
    torch.testing.assert_close(whole(run.model), parameters, rtol=1e-9, atol=1e-11)
    assert run.epsilon() == epsilon
    assert run.state_dict()["max_norm"] == pytest.approx(thresholds)


def noise_of(wrapped, secure):
    """The parameters of a model that only noise moves, after one step."""
    torch.manual_seed(0)
    model = nn.Linear(20_000, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = wrap(nn.Sequential(model, nn.Identity()), wrapped)
    loader = DataLoader(TensorDataset(torch.zeros(12, 20_000)), batch_size=6)
    options = {"secure": True} if secure else {"seed": dist.get_rank()}  # that of the first rank counts
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = private.Private(model, optimizer, loader, max_norm=2.0, noise_multiplier=3.0, delta=1e-3, **options)
    for (x,) in run.loader:
        run.step(model(x).squeeze(1) * 0)
        break
    return whole(model)


def refusals(wrapped):
    with pytest.raises(errors.RankError, match="is not wrapped by DistributedDataParallel or fully_shard"):
        build(net())
    run = build(wrap(net(), wrapped))
    state = train(run, 1).state_dict()
    other = build(wrap(net(), wrapped))
    if dist.get_rank() == 0:
        other.load_state_dict(state)
    with pytest.raises(errors.RankError, match="not all of them have loaded the same state"):
        train(other)
    other.load_state_dict(state)
    assert train(other, 1).steps == 8


def goes_on(wrapped):
    """Saved and loaded on every rank: the parameters of the run that went through."""
    through = train(build(wrap(net(), wrapped)), 2)
    run = train(build(wrap(net(), wrapped)), 1)
    states = [{k: v.clone() for k, v in run.model.state_dict().items()}, run.state_dict()]
    other = build(wrap(net(), wrapped))
    other.model.load_state_dict(states[0])
    other.load_state_dict(states[1])
    assert torch.equal(whole(train(other, 1).model), whole(through.model))
