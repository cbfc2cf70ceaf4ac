"""What the ranks run in the tests of `Monitor`."""

import torch
import torch.distributed as dist
from rank_processes import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import gradrein

STEPS = 12


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False), torch.nn.Linear(3, 1)
    return torch.nn.Sequential(*layers).double()


def sharded(kind):
    """Uneven shards; of "mixed" the last layer is plain, of "hybrid" two groups of ranks hold copies."""
    net = network()
    size = dist.get_world_size()
    names = ("copies", "shards") if kind == "hybrid" else ("shards",)
    mesh = init_device_mesh("cpu", (2, size // 2) if kind == "hybrid" else (size,), mesh_dim_names=names)
    for layer in (0, 2) if kind == "mixed" else (0, 2, 3):
        fully_shard(net[layer], mesh=mesh)
    return net


def train(net, limit=None):
    """The same data on every rank and in one process, so that gradients are the same too."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    data = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        x = torch.randn(16, 5, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        (net(x) - x[:, :1]).square().mean().backward()
        if limit is not None:  # torch's own refuses plain gradients beside others
            plain = {type(p) for p in net.parameters()} != {DTensor}
            (gradrein if plain else torch.nn.utils).clip_grad_norm_(net.parameters(), limit)
        optimizer.step()
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in net.parameters()]
    return torch.cat([whole.flatten() for whole in wholes]).tolist()


def record(path, kind, limit, clip):
    with gradrein.Monitor(sharded_net := sharded(kind), record=path, clip=clip) as monitor:
        weights = train(sharded_net, limit)
    assert monitor.stopped_because is None
    return monitor.path, weights, leaves_norms_to_be_reduced(sharded_net)


def tensor_parallel():
    """Columns of the first layer and rows of the second; the third is plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ColwiseParallel(use_local_output=False)  # local outputs lose that 7 is uneven
    return parallelize_module(network(), mesh, {"0": columns, "2": RowwiseParallel()})


LAYERS = {"first": "0.*", "weights": "*.weight", "head": "3.bias"}


def by_layer(path, kind, limit):
    """What a tracker gets of each step."""
    received = []
    net = tensor_parallel() if kind == "tensor" else sharded(kind) if kind else network()
    with gradrein.Monitor(net, record=path, norms=LAYERS, on_step=received.append):
        train(net, limit)
    return received


def leaves_norms_to_be_reduced(net):
    """Whether the norm that torch's own clipping returns for these shards is that of each rank alone."""
    grads = [p.grad for p in net.parameters()]
    if {type(grad) for grad in grads} != {DTensor}:
        return False
    return any(placement.is_partial() for placement in torch.nn.utils.get_total_norm(grads).placements)


class Messages(TorchDispatchMode):
    """Counts what is sent between ranks."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def messages(path):
    """How many messages a program sends alone, and watched."""
    found = []
    for watched in (False, True):
        net = sharded("all")
        monitor = gradrein.Monitor(net, record=path)
        with Messages() as mode:
            if watched:
                monitor.start()
            train(net, 0.5)
            monitor.stop()
        found.append(mode.count)
    return found


class Still(torch.optim.Optimizer):
    """One that does not move, so that it does not add up what is partial."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def partial(path, clip):
    """One gradient that the ranks have not yet added up, beside one that they have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = torch.nn.Linear(4, 1)
    for name in ("weight", "bias"):
        whole = distribute_tensor(getattr(net, name).detach(), mesh, [Replicate()])
        setattr(net, name, torch.nn.Parameter(whole))
    net.weight.grad = DTensor.from_local(torch.ones(1, 4), mesh, [Partial()])
    net.bias.grad = DTensor.from_local(torch.full((1,), 3.0), mesh, [Replicate()])
    optimizer = Still(net.parameters())
    with gradrein.Monitor(net, optimizer, record=path, clip=clip) as monitor:
        optimizer.step()
    assert monitor.stopped_because is None
    return monitor.path


def refused(kind):
    """What is raised where ranks could not decide alike."""
    net = FullyShardedDataParallel(network(), device_id="cpu") if kind == "flattened" else sharded("all")
    try:
        with gradrein.Monitor(net, clip="1.0" if kind == "flattened" else "auto"):
            train(net)
    except gradrein.errors.UnsupportedGradientError as error:
        return str(error)
    return "nothing"


def flattened(path):
    with gradrein.Monitor(net := FullyShardedDataParallel(network(), device_id="cpu"), record=path) as monitor:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return monitor.path


def alone(path):
    """Every rank trains by itself, on data of its own."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with gradrein.Monitor(net, record=path) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    dist.barrier()
    return [str(finding) for finding in monitor.findings()]


def together(path, clip):
    """Under DDP, each rank with data of its own; a few batches are far too large."""
    net = network()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    with gradrein.Monitor(net, optimizer, record=path, clip=clip) as monitor:
        for step in range(40):
            x = torch.randn(16, 5, generator=data, dtype=torch.float64) * (10 if step % 13 == 12 else 1)
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
    dist.barrier()
    return monitor.path, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
