"""What the ranks run: build gradients in some layout, clip them, and compare with one process that has them whole."""

import copy
import math

import torch
import torch.distributed as dist
from rank_processes import has
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradrein
from gradrein._torch.dtensor import distribute_own

# Meshes by number of ranks: shapes, orders of ranks that are not regular, and slices of another mesh ("2d/a").
MESHES = {
    3: {"line": [0, 1, 2]},
    8: {
        "line": list(range(8)),
        "2d": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "3d": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        "3d/ac": ("3d", ("a", "c")),
    },
    2: {"line": [0, 1], "reversed": [1, 0], "1x2": [[0, 1]], "2x1": [[0], [1]], "1x2/b": ("1x2", "b")},
    4: {
        "line": [0, 1, 2, 3],
        "shuffled": [2, 0, 3, 1],
        "2d": [[0, 1], [2, 3]],
        "crossed": [[0, 3], [1, 2]],
        "turned": [[0, 2], [1, 3]],
        "3d": [[[0, 1]], [[2, 3]]],
        "2d/a": ("2d", "a"),
        "2d/b": ("2d", "b"),
        "turned/a": ("turned", "a"),
        "3d/ac": ("3d", ("a", "c")),
    },
}
_made = {}


def mesh(name):
    if name not in _made:
        wanted = MESHES[dist.get_world_size()][name]
        if isinstance(wanted, tuple):
            _made[name] = mesh(wanted[0])[wanted[1]]
        else:
            ranks = torch.tensor(wanted)
            _made[name] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple("abc"[: ranks.dim()]))
    return _made[name]


def depth(size, name):
    """How many dimensions a mesh has, for who has no ranks."""
    wanted = MESHES[size][name]
    return len(wanted[1]) if isinstance(wanted, tuple) else torch.tensor(wanted).dim()


def placement(letter):
    average = Partial("avg") if letter == "a" and has("averages over gloo") else Partial()
    return {"r": Replicate(), "p": Partial(), "a": average}.get(letter) or Shard(int(letter))


def spread(full, name, letters):
    """A gradient as a DTensor: letters give a placement for each mesh dimension, as in "0r" or "p1"."""
    where = mesh(name)
    kinds = [placement(letter) for letter in letters]
    whole = [Replicate() if kind.is_partial() else kind for kind in kinds]
    piece = distribute_own(full, where, whole).to_local().clone()
    for at, kind, size in zip(where.get_coordinate(), kinds, where.shape, strict=True):
        if kind.is_partial():  # unequal summands of the whole
            piece = piece * (2 * (at + 1) / (size * (size + 1))) * (size if kind.reduce_op == "avg" else 1)
    return DTensor.from_local(piece, where, kinds, run_check=False, shape=full.shape, stride=full.stride())


def build(case):
    """Parameters with gradients as a case says, and the whole gradients of one process."""
    generator = torch.Generator().manual_seed(case["seed"])
    parameters, wholes = {}, []
    for k, (shape, where, letters, missing) in enumerate(case["tensors"]):
        full = torch.randn(shape, generator=generator, dtype=case.get("dtype", torch.float32)) * case.get("size", 1.0)
        if where == "plain":
            p = torch.nn.Parameter(torch.zeros_like(full))
            p.grad = full.clone()
        else:
            p = torch.nn.Parameter(spread(torch.zeros_like(full), where, reduced(letters)))
            p.grad = None if dist.get_rank() in missing else spread(full, where, letters)
        parameters[f"p{k}"] = p
        wholes.append(torch.zeros_like(full) if missing else full)
    return parameters, wholes


def reduced(letters):
    return "".join("r" if letter in "pa" else letter for letter in letters)


def piece(t):
    """What is on this rank of a tensor, after reducing what is partial."""
    if not isinstance(t, DTensor):
        return t
    kinds = [Replicate() if kind.is_partial() else kind for kind in t.placements]
    return t.redistribute(placements=kinds).to_local()


def assert_same_everywhere(value):
    seen = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, torch.tensor([value], dtype=torch.float64))
    assert all(torch.equal(seen[0].view(torch.int64), s.view(torch.int64)) for s in seen), seen


def norm_of(wholes, p):
    """The p-norm of everything as one float64 vector, scaled so that no power overflows."""
    x = torch.cat([t.reshape(-1).to(torch.float64).abs() for t in wholes])
    top = x.max().item() if x.numel() else 0.0
    return top * torch.linalg.vector_norm(x / top, p).item() if top else 0.0


def close(found, expected, digits):
    assert math.isclose(found, expected, rel_tol=10.0**-digits, abs_tol=1e-300), (found, expected)


def check_norm(case, p, max_norm):
    """`clip_grad_norm_` and its halves, against one process."""
    parameters, wholes = build(case)
    expected = norm_of(wholes, p)
    complete = not any(missing for *_, missing in case["tensors"])
    if complete:
        halves = gradrein.get_total_norm([q.grad for q in parameters.values()], p)
        close(halves.item(), expected, 5)
        assert type(halves) is torch.Tensor
    norm = gradrein.clip_grad_norm_(parameters.values(), max_norm, p)
    assert type(norm) is torch.Tensor
    assert norm.dim() == 0
    close(norm.item(), expected, 5)
    assert_same_everywhere(norm.item())
    assert_clipped(parameters, wholes, min(1.0, max_norm / (expected + 1e-6)), case)
    if complete:
        again, _ = build(case)
        gradrein.clip_grads_with_norm_(again.values(), max_norm, halves)
        assert_clipped(again, wholes, min(1.0, max_norm / (expected + 1e-6)), case)


def assert_clipped(parameters, wholes, factor, case):
    for p, full, (_, where, letters, _) in zip(parameters.values(), wholes, case["tensors"], strict=True):
        if p.grad is not None:
            expected = (full.double() * factor).to(full.dtype)
            mine = expected if where == "plain" else spread(expected, where, reduced(letters)).to_local()
            digits = 2e-2 if full.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(piece(p.grad), mine, rtol=digits, atol=1e-6)


def check_policies(case, p):
    """`clip_` with every policy that takes pieces, against one process: what it reports and what it leaves."""
    _, wholes = build(case)
    limit = 0.5 * max(1e-30, norm_of(wholes, p))
    partial = any(set("pa") & set(letters) for _, _, letters, _ in case["tensors"])
    policies = [gradrein.by_norm(limit, p), gradrein.by_norm(limit, p, per_parameter=True), gradrein.by_rms(0.3)]
    for policy in policies if partial else [*policies, gradrein.by_value(0.4)]:
        parameters, wholes = build(case)
        alone = {
            name: torch.nn.Parameter(torch.zeros_like(full)) for name, full in zip(parameters, wholes, strict=True)
        }
        for q, full in zip(alone.values(), wholes, strict=True):
            q.grad = full.clone()
        expected = gradrein.clip_(alone, policy)
        found = gradrein.clip_(parameters, policy)
        digits = 5 if partial else 8
        close(found.norm, expected.norm, digits)
        close(found.norm_after, expected.norm_after, 5)
        assert_same_everywhere(found.norm)
        for name, norm in expected.norms.items():
            if name in found.norms:
                close(found.norms[name], norm, digits)
        assert_clipped(parameters, [q.grad for q in alone.values()], 1.0, case)


def check_model_on_several_meshes(fsdp, tensor_parallel):
    """A model whose blocks are sharded over meshes of their own, beside a plain one: its step, against one process.

    Every rank has the same batch, so that gradients of what is not sharded are whole.
    """
    torch.manual_seed(3)
    blocks = [torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh()) for _ in range(3)]
    model, x = torch.nn.Sequential(*blocks), torch.randn(16, 12)
    alone = copy.deepcopy(model)
    fully_shard(model[0], mesh=mesh(fsdp))
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model[1], mesh(tensor_parallel), {"0": columns})
    for one in (model, alone):
        one(x).square().sum().backward()
    assert len({getattr(p, "device_mesh", None) for p in model.parameters()}) == 3
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    norm = gradrein.clip_grad_norm_(model.parameters(), 0.5)
    close(norm.item(), expected.item(), 6)
    assert_same_everywhere(norm.item())
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-5, atol=1e-7)


def check_model_on_one_mesh(name):
    """A sharded and a tensor-parallel block on a mesh in any order of ranks: the norms of what lies on the ranks.

    Out of order torch's own passes and `full_tensor` differ from one process, so each rank reports what it holds.
    """
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh(name), plan)
    sharded = fully_shard(torch.nn.Linear(6, 5), mesh=mesh(name))
    sharded(model(torch.randn(4, 6))).square().sum().backward()
    parameters = dict(torch.nn.ModuleList([model, sharded]).named_parameters())
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, {key: piece(p.grad).double().norm().item() for key, p in parameters.items()})
    copies = {key: dist.get_world_size() if p.grad.placements[0].is_replicate() else 1 for key, p in parameters.items()}
    expected = {key: math.sqrt(sum(one[key] ** 2 for one in held) / n) for key, n in copies.items()}
    report = gradrein.clip_(parameters, gradrein.by_norm(0.5))
    for key, norm in expected.items():
        close(report.norms[key], norm, 10)
    close(report.norm, math.hypot(*expected.values()), 10)
    close(gradrein.clip_grad_norm_(parameters, 0.5).item(), 0.5, 6)
