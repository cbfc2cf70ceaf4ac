"""`gradrein.clip_`: policies, patterns, non-finite modes, the report."""

import math

import helpers
import pytest
import torch

import gradrein
from gradrein import by_norm, by_rms, by_unit, by_value
from gradrein.errors import ArgumentError, ArgumentTypeError, NonFiniteGradientError, UnsupportedGradientError


def model(seed=0):
    torch.manual_seed(seed)
    m = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    m(torch.randn(8, 6)).pow(2).sum().backward()
    return m


def grads(m):
    return [p.grad.clone() for p in m.parameters()]


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_by_norm_has_no_epsilon(p):
    m = model()
    before = grads(m)
    total = helpers.norm(before, p)
    report = gradrein.clip_(m, by_norm(total / 4, p))
    for q, g in zip(m.parameters(), before, strict=True):
        torch.testing.assert_close(q.grad, g / 4)
    assert report.norm == pytest.approx(total, rel=1e-6)
    assert report.norm_after == pytest.approx(total / 4, rel=1e-6)
    assert report.coefficient == pytest.approx(0.25)
    assert report.clipped


def test_at_the_threshold_is_under_it():
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    report = gradrein.clip_(p, by_norm(5.0))
    assert not report.clipped
    assert p.grad.tolist() == [3, 4]


def test_by_value():
    m = model()
    before = grads(m)
    report = gradrein.clip_(m, by_value(0.1))
    for q, g in zip(m.parameters(), before, strict=True):
        assert torch.equal(q.grad, g.clamp(-0.1, 0.1))
    assert report.norm == pytest.approx(helpers.norm(before, math.inf))
    assert report.norm_after == pytest.approx(0.1)
    assert report.coefficient is None
    assert report.clipped
    assert not gradrein.clip_(m, by_value(0.2)).clipped


def test_per_parameter_and_by_rms():
    for policy, size in (
        (by_norm(0.3, per_parameter=True), lambda g: 0.3),
        (by_rms(0.05), lambda g: 0.05 * math.sqrt(g.numel())),
    ):
        m = model()
        before = grads(m)
        report = gradrein.clip_(m, policy)
        for (name, q), g in zip(m.named_parameters(), before, strict=True):
            factor = min(1.0, size(g) / g.norm().item())
            torch.testing.assert_close(q.grad, g * factor)
            assert report.norms_after[name] == pytest.approx(g.norm().item() * factor, rel=1e-5)
        assert report.coefficient == pytest.approx(min(min(1.0, size(g) / g.norm().item()) for g in before))


def unitwise_oracle(weight, grad, ratio, eps):
    """Adaptive gradient clipping, one unit at a time."""
    if weight.dim() <= 1:
        units = [(weight, grad)]
    else:
        units = list(zip(weight, grad, strict=True))
    done = []
    for w, g in units:
        limit = ratio * max(w.norm().item(), eps)
        done.append(g * min(1.0, limit / g.norm().item()) if g.norm() > 0 else g)
    return done[0] if weight.dim() <= 1 else torch.stack(done)


@pytest.mark.parametrize("layer", [torch.nn.Linear(4, 3), torch.nn.Conv2d(2, 3, 3), torch.nn.LayerNorm(5)])
def test_by_unit_against_a_loop_over_units(layer):
    for p in layer.parameters():
        p.grad = torch.randn_like(p) * torch.logspace(-3, 1, p.numel()).view_as(p)
    expected = [unitwise_oracle(p.detach(), p.grad, 0.05, 1e-3) for p in layer.parameters()]
    report = gradrein.clip_(layer, by_unit(0.05))
    for p, e in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)
    assert report.norm_after == pytest.approx(helpers.norm(expected, 2), rel=1e-5)
    assert report.clipped


def test_by_unit_along_another_dimension():
    layer = torch.nn.ConvTranspose1d(3, 2, 4, bias=False)
    layer.weight.grad = torch.randn_like(layer.weight)
    swapped = unitwise_oracle(layer.weight.detach().transpose(0, 1), layer.weight.grad.transpose(0, 1), 0.01, 1e-3)
    gradrein.clip_(layer, by_unit(unit_dims=1))
    torch.testing.assert_close(layer.weight.grad, swapped.transpose(0, 1))


def test_by_unit_refuses_sparse():
    emb = torch.nn.Embedding(4, 2, sparse=True)
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedGradientError, match="by_unit compares rows"):
        gradrein.clip_(emb, by_unit())


def test_patterns_isolate_groups():
    m = model()
    before = dict(zip([n for n, _ in m.named_parameters()], grads(m), strict=True))
    report = gradrein.clip_(m, {"0.bias": None, "2.*": by_norm(0.5), "*": by_value(0.01)})
    after = {n: p.grad for n, p in m.named_parameters()}
    assert torch.equal(after["0.bias"], before["0.bias"])
    assert torch.equal(after["0.weight"], before["0.weight"].clamp(-0.01, 0.01))
    head = [before["2.weight"], before["2.bias"]]
    torch.testing.assert_close(after["2.weight"], before["2.weight"] * 0.5 / helpers.norm(head, 2))
    assert report.by_pattern["2.*"].norm == pytest.approx(helpers.norm(head, 2), rel=1e-6)
    assert set(report.by_pattern) == {"2.*", "*"}
    with pytest.raises(ArgumentError, match="see `report.by_pattern`"):
        _ = report.norm
    assert "2.*: clipped" in str(report)


def test_patterns_that_cannot_be_meant():
    m = model()
    with pytest.raises(
        ValueError, match=r"'haed\.\*' is never used: no parameter has such a name. Names here: 0.weight"
    ):
        gradrein.clip_(m, {"haed.*": by_norm(0.5), "*": by_norm(1.0)})
    with pytest.raises(ValueError, match="'0.weight' is never used: an earlier pattern takes all"):
        gradrein.clip_(m, {"*": by_norm(0.5), "0.weight": by_norm(1.0)})
    with pytest.raises(ValueError, match="no pattern matches the parameter '0.weight'"):
        gradrein.clip_(m, {"2.*": by_norm(0.5)})
    with pytest.raises(ValueError, match="name patterns need names"):
        gradrein.clip_(m.parameters(), {"*": by_norm(0.5)})
    with pytest.raises(ArgumentTypeError, match=r"a policy was expected, found float: 1\.0"):
        gradrein.clip_(m, 1.0)
    with pytest.raises(ArgumentTypeError, match="a policy was expected, found int"):
        gradrein.clip_(m, {"*": 1})
    with pytest.raises(ArgumentError, match="found the name 'norm'"):
        gradrein.clip_(m, {"*": "norm"})


@pytest.mark.parametrize("with_names", [True, False])
def test_patterns_for_parameter_groups(with_names):
    m = model()
    groups = [[*layer.named_parameters()] if with_names else [*layer.parameters()] for layer in (m[0], m[2])]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    before = grads(m)
    for target in (optimizer, optimizer.param_groups):
        report = gradrein.clip_(target, {"group:0": None, "*": by_norm(0.5)})
        assert all(torch.equal(p.grad, g) for p, g in zip(m[0].parameters(), before, strict=False))
        assert report.by_pattern["*"].norm_after == pytest.approx(0.5)
    each = gradrein.clip_(optimizer, {"group:0": by_norm(0.1), "group:1": by_norm(0.2)}).by_pattern
    assert [one.norm_after for one in each.values()] == pytest.approx([0.1, 0.2])
    with pytest.raises(
        ArgumentError, match=r"'group:2' is never used: no parameter has such a name. Names here: group:0"
    ):
        gradrein.clip_(optimizer, {"group:2": None, "*": by_norm(1.0)})
    with pytest.raises(ArgumentError, match="'group:0' is for a parameter group of an optimizer"):
        gradrein.clip_(m, {"group:0": None, "*": by_norm(1.0)})
    with pytest.raises(ArgumentError, match="no pattern matches the parameter"):
        gradrein.clip_(optimizer, {"group:0": by_norm(1.0)})


def test_a_pattern_may_match_a_parameter_that_has_no_gradient_now():
    m = model()
    m[2].weight.grad = m[2].bias.grad = None
    gradrein.clip_(m, {"2.*": by_norm(0.5), "*": by_norm(1.0)})


def targets(m):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    return {
        "module": m,
        "generator": m.parameters(),
        "list": list(m.parameters()),
        "named": m.named_parameters(),
        "list of pairs": list(m.named_parameters()),
        "dict": dict(m.named_parameters()),
        "optimizer": optimizer,
        "param groups": optimizer.param_groups,
        "tuple": tuple(m.parameters()),
        "named optimizer": torch.optim.SGD(m.named_parameters(), lr=0.1),
    }


@pytest.mark.parametrize("kind", targets(torch.nn.Linear(1, 1)))
def test_everything_that_holds_parameters_is_accepted(kind):
    expected = model()
    gradrein.clip_(expected, by_norm(0.1))
    for call in (lambda t: gradrein.clip_(t, by_norm(0.1)), lambda t: gradrein.clip_grad_norm_(t, 0.1)):
        m = model()
        call(targets(m)[kind])
        for a, b in zip(m.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-9)
    m = model()
    gradrein.clip_grad_value_(targets(m)[kind], 0.01)
    assert all(p.grad.abs().max() <= 0.01 for p in m.parameters())


def test_names_in_an_optimizer_are_used():
    m = model()
    report = gradrein.clip_(torch.optim.SGD(m.named_parameters(), lr=0.1), {"2.*": by_norm(0.1), "*": None})
    assert set(report.norms) == {"2.weight", "2.bias"}


POLICIES = [by_norm(0.1), by_value(0.01), by_norm(0.1, per_parameter=True), by_rms(0.01), by_unit()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
class TestNonFinite:
    def spoil(self, bad):
        m = model()
        m[0].weight.grad[0, 1] = bad
        m[0].weight.grad[2, 3] = bad
        m[2].bias.grad[0] = bad
        return m

    def test_raise_names_every_offender_and_changes_nothing(self, policy, bad):
        m = self.spoil(bad)
        kept = grads(m)
        with pytest.raises(
            RuntimeError, match=r"2 gradients are not finite: 0.weight \(2 values\), 2.bias \(1 value\)"
        ) as e:
            gradrein.clip_(m, policy)
        assert isinstance(e.value, NonFiniteGradientError)
        assert e.value.offenders == {"0.weight": 2, "2.bias": 1}
        for p, g in zip(m.parameters(), kept, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)

    def test_skip_zeroes_everything(self, policy, bad):
        m = self.spoil(bad)
        report = gradrein.clip_(m, policy, nonfinite="skip")
        assert report.skipped
        assert report.norm_after == 0
        assert report.offenders == {"0.weight": 2, "2.bias": 1}
        assert all((p.grad == 0).all() for p in m.parameters())
        assert "skipped" in str(report)

    def test_zero_zeroes_those_and_clips_the_rest(self, policy, bad):
        m, expected = self.spoil(bad), self.spoil(bad)
        for p in expected.parameters():
            p.grad = p.grad.nan_to_num(0.0, 0.0, 0.0)
        gradrein.clip_(expected, policy)
        report = gradrein.clip_(m, policy, nonfinite="zero")
        for a, b in zip(m.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        assert report.offenders == {"0.weight": 2, "2.bias": 1}
        assert not report.skipped

    @pytest.mark.parametrize("mode", ["skip", "zero", "propagate"])
    def test_no_mode_spoils_a_finite_value(self, policy, bad, mode):
        m = self.spoil(bad)
        finite = [torch.isfinite(p.grad) for p in m.parameters()]
        report = gradrein.clip_(m, policy, nonfinite=mode)
        for p, ok in zip(m.parameters(), finite, strict=True):
            assert torch.isfinite(p.grad[ok]).all()
        str(report)

    def test_propagate_keeps_the_bad_values(self, policy, bad):
        m = self.spoil(bad)
        gradrein.clip_(m, policy, nonfinite="propagate")
        survives = not (isinstance(policy, type(by_value(1))) and math.isinf(bad))  # a clamp makes inf finite
        assert torch.isfinite(m[2].bias.grad[0]).item() != survives


def test_a_nonfinite_group_that_is_left_alone_is_not_looked_at():
    m = model()
    m[0].weight.grad[0, 0] = math.nan
    gradrein.clip_(m, {"0.weight": None, "*": by_norm(0.1)})


def test_unknown_mode():
    with pytest.raises(ValueError, match="`nonfinite` is one of raise, skip, zero, propagate; found 'ignore'"):
        gradrein.clip_(model(), by_norm(1.0), nonfinite="ignore")


def test_nothing_to_clip():
    report = gradrein.clip_(torch.nn.Linear(2, 2), by_norm(1.0))
    assert (report.norm, report.norm_after, report.coefficient, report.clipped, report.skipped) == (
        0,
        0,
        1,
        False,
        False,
    )
    assert str(report) == "nothing to clip: no gradient"


def test_the_report_reads_well():
    m = model()
    text = str(gradrein.clip_(m, by_norm(1.0)))
    head, *rows = text.splitlines()
    assert head.startswith("clipped: norm ")
    assert " -> 1, coefficient 0." in head
    assert len(rows) == 4
    assert any(row.split()[0] == "0.weight" for row in rows)
    assert str(gradrein.clip_(m, by_norm(10.0))).startswith("not clipped: norm 1")


def test_worst_are_sorted_and_unnamed_targets_find_their_names():
    m = model()
    report = gradrein.clip_(list(m.parameters()), by_norm(1.0))
    names = [name for name, _ in report.worst(2)]
    assert len(names) == 2
    assert all(name.startswith("Sequential.") for name in names)
    sizes = [n for _, n in report.worst(4)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_without_kernels_the_same(policy, monkeypatch):
    with_c = model()
    a = gradrein.clip_(with_c, policy)
    monkeypatch.setitem(gradrein._kernels.BACKENDS, "cpu", None)
    plain = model()
    b = gradrein.clip_(plain, policy)
    for p, q in zip(with_c.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert a.norm == pytest.approx(b.norm)
    assert a.norm_after == pytest.approx(b.norm_after)


def test_arguments_of_policies_are_checked():
    for make in (by_norm, by_value, by_rms, by_unit):
        with pytest.raises(ValueError, match="zero or more; found -1"):
            make(-1)
        with pytest.raises(ValueError, match="zero or more; found nan"):
            make(math.nan)
    with pytest.raises(ValueError, match="order of a norm"):
        by_norm(1.0, p=0)
    with pytest.raises(ValueError, match="one number; found a tensor of shape"):
        by_norm(torch.ones(2))
