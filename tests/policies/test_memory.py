"""What every policy with a memory promises: no reads, no poison, checkpoints, groups, dry runs."""

import copy
import io
import math
import pickle

import pytest
import torch
from cases import ALL, RULES, gradient, parameter, recorded

import gradrein
from gradrein.errors import ArgumentError

every_policy = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def follow(policy, norms, ps=None, **options):
    """Clip step by step; the gradients after each."""
    ps = ps or [parameter()]
    found = []
    for norm in norms:
        for p in ps:
            p.grad = gradient(norm)
        gradrein.clip_(ps, policy, **{"nonfinite": "propagate", **options})
        found.append([p.grad.clone() for p in ps])
    return found


def tensors_of(saved):
    for value in saved.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        elif isinstance(value, torch.Tensor):
            yield value


def reloaded(policy):
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_policy
def test_what_is_saved_are_plain_tensors(make):
    """Whatever class the gradients and parameters are of, a checkpoint loads without it."""

    class Labelled(torch.Tensor):
        pass

    policy, weight = make(), torch.nn.Parameter(parameter().detach().as_subclass(Labelled))
    for norm in (1.0, 2.0):
        p = parameter()
        weight.grad, p.grad = gradient(norm).as_subclass(Labelled), gradient(norm).as_subclass(Labelled)
        gradrein.clip_({"w": weight, "p": p}, policy)
    assert {type(t) for t in tensors_of(policy.state_dict())} == {torch.Tensor}
    assert list(tensors_of(reloaded(policy)))


@every_policy
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e308])
def test_a_bad_step_never_spoils_the_state(make, bad):
    """After a bad step everything goes on; for NaN and infinity as if it had never been."""
    norms = [n for n in recorded() if 0 < n < 1e6]
    with_bad = [*norms[:60], bad, *norms[60:]]
    calm, hurt = make(), make()
    expected, found = follow(calm, norms), follow(hurt, with_bad)
    assert all(g.isfinite().all() for step in found[61:] for g in step)
    if not math.isfinite(bad):
        torch.testing.assert_close(found[61:], expected[60:], rtol=0, atol=0)
    empty = {id(t) for t in tensors_of(make().state_dict())}
    saved = [t for t in tensors_of(hurt.state_dict()) if id(t) not in empty]
    assert all((t.isfinite() | t.isnan()).all() for t in saved)  # NaN only marks an empty place of a window
    assert follow(hurt, [1.0])[0][0].norm() > 0


@every_policy
def test_every_step_bad_from_the_start(make):
    policy = make()
    follow(policy, [math.nan, math.inf, math.nan] * 20)
    (g,) = follow(policy, [2.0])[0]
    assert g.norm().item() == pytest.approx(2.0)


@every_policy
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_goes_on_from_what_was_learned(make, duplicate):
    policy, ps, norms = make(), [parameter()], recorded()
    follow(policy, norms[:40], ps)
    other = duplicate(policy)
    torch.testing.assert_close(follow(other, norms[40:60], ps), follow(policy, norms[40:60], ps), equal_nan=True)


@every_policy
def test_checkpoint(make):
    norms = recorded()
    whole = follow(make(), norms)
    policy, ps = make(), [parameter()]
    follow(policy, norms[:70], ps)
    resumed = make()
    resumed.load_state_dict(reloaded(policy))
    torch.testing.assert_close(follow(resumed, norms[70:], ps), whole[70:], rtol=0, atol=0, equal_nan=True)
    # what was saved does not change with what is learned later
    saved = policy.state_dict()
    before = [t.clone() for t in tensors_of(saved)]
    follow(policy, [3.0, 4.0], ps)
    torch.testing.assert_close(list(tensors_of(saved)), before, rtol=0, atol=0, equal_nan=True)


@every_policy
def test_state_of_another_policy_is_refused(make):
    with pytest.raises(ArgumentError, match="state of 'by_norm'"):
        make().load_state_dict({"policy": "by_norm"})


def test_state_with_other_settings_is_refused():
    policy = gradrein.policies.ByMedian(window=8)
    follow(policy, [1.0, 2.0])
    other = gradrein.policies.ByMedian(window=9)
    with pytest.raises(ArgumentError, match="saved with window=8; this one has window=9"):
        other.load_state_dict(policy.state_dict())
    follow(other, [1.0])  # nothing of it was taken


def test_state_follows_names_not_places():
    norms = {"a": 1.0, "b": 100.0}
    policy = gradrein.policies.ByRunningNorm(warmup=2)
    ps = {name: parameter() for name in norms}
    for _ in range(3):
        for name, p in ps.items():
            p.grad = gradient(norms[name])
        gradrein.clip_(ps, policy)
    resumed = gradrein.policies.ByRunningNorm(warmup=2)
    resumed.load_state_dict(reloaded(policy))
    for name, p in ps.items():
        p.grad = gradient(1000 * norms[name])
    gradrein.clip_(dict(reversed(ps.items())), resumed)
    assert {name: p.grad.norm().item() for name, p in ps.items()} == pytest.approx({"a": 1.05, "b": 105.0})


def test_names_that_do_not_tell_are_not_mixed_up():
    policy, pairs = gradrein.policies.ByRunningNorm(warmup=1), [("w", parameter()), ("w", parameter())]
    for size in (1.0, 1.0, 1000.0):
        for i, (_, p) in enumerate(pairs):
            p.grad = gradient(size * (1 + i))
        gradrein.clip_(pairs, policy)
    assert [p.grad.norm().item() for _, p in pairs] == pytest.approx([1.05, 2.10])


@pytest.mark.parametrize("name", RULES)
def test_a_mapping_gives_each_group_its_own_state(name):
    """Even where one policy object is used for two patterns."""
    make, twin = RULES[name]
    shared = make(per_parameter=False)
    ps = {"a.x": parameter(), "b.x": parameter(), "c.x": parameter()}
    norms = {key: recorded(seed=i) for i, key in enumerate(ps)}
    found = {key: [] for key in ps}
    for step in range(160):
        for key, p in ps.items():
            p.grad = gradient(norms[key][step])
        gradrein.clip_(ps, {"a.*": shared, "b.*": shared, "*": gradrein.by_norm(1.0)}, nonfinite="propagate")
        for key, p in ps.items():
            found[key].append(p.grad.norm().item())
    for key in ("a.x", "b.x"):
        good = [i for i, n in enumerate(norms[key]) if math.isfinite(n)]
        expected = twin(norms[key])
        assert [found[key][i] for i in good] == pytest.approx([expected[i] for i in good], rel=1e-9)


@every_policy
def test_dry_run_changes_nothing_and_learns(make, without_kernels):
    """It says what would have been done, and its state is that of one that did it."""
    norms = recorded()
    wet, dry, p, q = make(), make(), parameter(), parameter()
    for norm in norms:
        p.grad, q.grad = gradient(norm), gradient(norm)
        done = gradrein.clip_([p], wet, nonfinite="propagate")
        version = q.grad._version
        would = gradrein.clip_([q], dry, nonfinite="propagate", dry_run=True)
        assert q.grad._version == version
        assert would.dry_run
        assert (would.clipped, would.skipped) == (done.clipped, done.skipped)
        assert would.norm_after == pytest.approx(done.norm_after, nan_ok=True)
    for a, b in zip(tensors_of(wet.state_dict()), tensors_of(dry.state_dict()), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_dry_run_of_fixed_policies_and_bad_gradients():
    p = parameter()
    p.grad = gradient(5.0)
    for policy in (
        gradrein.by_norm(1.0),
        gradrein.by_value(0.1),
        gradrein.by_unit(0.1),
        gradrein.by_norm(1.0, per_parameter=True),
    ):
        report = gradrein.clip_([p], policy, dry_run=True)
        assert report.clipped
        assert report.norm_after < report.norm
        assert "dry run" in str(report)
    torch.testing.assert_close(p.grad, gradient(5.0))
    p.grad[0] = math.nan
    for mode in ("raise", "zero", "skip"):
        report = gradrein.clip_([p], gradrein.by_norm(1.0), nonfinite=mode, dry_run=True)
        assert sum(report.offenders.values()) == 1
        assert report.skipped == (mode == "skip")
    assert p.grad.isnan().sum() == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradrein.policies.ByZScore(z=-1), "`z` must be between 0 and inf; found -1"),
        (lambda: gradrein.policies.ByZScore(decay=1.5), "`decay` must be between 0 and 1; found 1.5"),
        (lambda: gradrein.policies.ByQuantile(1.1), "`q` must be between 0 and 1; found 1.1"),
        (lambda: gradrein.policies.ByQuantile(math.nan), "`q` must be between 0 and 1; found nan"),
        (lambda: gradrein.policies.ByQuantile(window=0), "`window` is a whole number of at least 1; found 0"),
        (lambda: gradrein.policies.ByQuantile("much"), "`q` is a number; found 'much'"),
        (lambda: gradrein.policies.ByOvershoot(rate=-0.1), "`rate` must be between"),
        (lambda: gradrein.policies.ByMedian(warmup=-1), "`warmup` is a whole number of at least 0; found -1"),
        (lambda: gradrein.policies.ByMedian(warmup=2.5), "`warmup` is a whole number"),
        (lambda: gradrein.policies.ByRunningNorm(floor=2, ceiling=1), "`floor` is 2 and `ceiling` 1; swap them"),
        (lambda: gradrein.policies.SkipSpikes(at_most=-1), "`at_most` is a whole number"),
        (lambda: gradrein.policies.SkipSpikes(gradrein.policies.SkipSpikes()), "one is enough"),
        (lambda: gradrein.policies.SkipSpikes(1.0), "a policy was expected, found float: 1.0"),
        (lambda: gradrein.policies.SkipSpikes().see(torch.ones(2)), "the loss is one number"),
    ],
)
def test_arguments_that_cannot_mean_anything(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_overshoot_refuses_another_model():
    policy = gradrein.policies.ByOvershoot()
    for shape in (3, 4):
        q = torch.nn.Parameter(torch.zeros(shape))
        q.grad = torch.ones(shape)
        if shape == 3:
            gradrein.clip_({"q": q}, policy)
    with pytest.raises(ArgumentError, match=r"'q' has shape \(4,\) and had \(3,\) before"):
        gradrein.clip_({"q": q}, policy)
