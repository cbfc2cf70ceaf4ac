"""Complex parameters, and complex values between real ones: every answer counts real and imaginary parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein
from gradrein.errors import ArgumentError

from .oracle import loop

B, T, D = 4, 5, 6
C = torch.complex128


def complex_parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=C))


def data():
    return torch.randn(B, T, D), torch.randn(B, T, D, dtype=C)


def loss(out):
    out = out.flatten(1)
    slope = torch.linspace(0.5, 1.5, out.shape[1])
    return (out.abs().square() * slope).sum(1) + (out.real.sum(1) if out.is_complex() else out.sum(1))


def spectral_filter():
    w = nn.Parameter(torch.randn(1, T // 2 + 1, D, 2))
    x, _ = data()
    return [w], lambda: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(w), n=T, dim=1)


def fourier_update():
    w = nn.Parameter(torch.randn(D, D))
    x, _ = data()
    return [w], lambda: x @ torch.fft.ifft2(torch.complex(w, torch.zeros_like(w))).real.T


def auto_correlation():
    layer = nn.Linear(D, D)
    x, _ = data()

    def forward():
        q, k = torch.fft.rfft(layer(x), dim=1), torch.fft.rfft(layer(x).tanh(), dim=1)
        return torch.fft.irfft(q * k.conj(), n=T, dim=1)

    return list(layer.parameters()), forward


def simple(parameters, function):
    """A function of some parameters, real data and complex data."""

    def build():
        made, (x, z) = parameters(), data()
        return made, lambda: function(*made, x, z)

    return build


def one(*shape):
    return lambda: [complex_parameter(*shape)]


def real(*shape):
    return lambda: [nn.Parameter(torch.randn(shape))]


MODELS = {
    "spectral_filter": spectral_filter,
    "fourier_update": fourier_update,
    "auto_correlation": auto_correlation,
    "scale": simple(one(D), lambda w, _, z: z * w),
    "scale_of_real_data": simple(one(D), lambda w, x, _: x * w),
    "real_scale": simple(real(D), lambda w, _, z: z * w),
    "real_shift": simple(real(D), lambda w, _, z: torch.add(z, w, alpha=2)),
    "shift": simple(one(D), lambda w, _, z: torch.add(z, w, alpha=2 - 1j)),
    "less": simple(one(D), lambda w, _, z: torch.sub(z, w, alpha=2 - 1j)),
    "divided": simple(one(D), lambda w, _, z: z / (w + 3)),
    "conjugate": simple(one(D), lambda w, _, z: z * w.conj()),
    "no_dimensions": simple(one(), lambda w, _, z: z * w),
    "product": simple(one(D, 3), lambda w, _, z: z @ w),
    "product_one_row": simple(one(D, 3), lambda w, _, z: z[:, 0] @ w),
    "product_of_conjugate": simple(one(D, 3), lambda w, _, z: z @ w.conj()),
    "product_with_columns": simple(one(3, D), lambda w, _, z: (w @ z[:, 0].T).T),
    "addmm": simple(
        lambda: [complex_parameter(3), complex_parameter(D, 3)],
        lambda b, w, _, z: torch.addmm(b, z[:, 0], w, alpha=1 + 2j, beta=2 - 1j),
    ),
    "stack": simple(one(3, D, 2), lambda w, _, z: torch.einsum("btd,edf->betf", z, w)),
    "real_part": simple(one(3, D), lambda w, x, _: F.linear(x, w.real)),
    "magnitude": simple(one(D), lambda w, x, _: x * w.abs()),
    "indexed": simple(one(7, D), lambda w, _, z: w[torch.arange(20).view(B, T) % 7] * z),
    "convolution": simple(one(3, T, 2), lambda w, _, z: F.conv1d(z, w)),
}


def rows(gradients):
    parts = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in gradients]
    return torch.cat([part.reshape(B, -1) for part in parts], 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("retain_graph", [True, False])
def test_every_answer(name, retain_graph):
    parameters, forward = MODELS[name]()
    named = {str(i): p for i, p in enumerate(parameters)}
    for _ in range(2):
        losses = loss(forward())
        expected = loop(losses, named)
        each = rows(expected.values())
        norms, mean = each.norm(dim=1), each.mean(0)
        ps = gradrein.per_sample(losses, named, retain_graph=retain_graph)
        torch.testing.assert_close(ps.grads(), expected)
        torch.testing.assert_close(ps.norms(), norms)
        lengths = ps.norms(per_parameter=True)
        torch.testing.assert_close(lengths, {n: rows([g]).norm(dim=1) for n, g in expected.items()})
        torch.testing.assert_close(ps.dot(), each @ mean)
        torch.testing.assert_close(ps.dot(named), each @ rows([p.detach().expand(B, *p.shape) for p in parameters])[0])
        torch.testing.assert_close(ps.gram(), each @ each.T)
        torch.testing.assert_close(ps.cosine(), each @ mean / (norms * mean.norm()))
        assert ps.stats().norm_of_mean == pytest.approx(float(mean.norm()))
        if retain_graph:
            ps.audit()
        limit = float(norms.median())
        for p in parameters:
            p.grad = None
        torch.testing.assert_close(ps.clip_(limit), norms)
        factors = (limit / norms).clamp(max=1) / B
        for n, p in named.items():
            torch.testing.assert_close(p.grad, torch.tensordot(factors.to(p.dtype), expected[n], 1))
        ps.weighted_(torch.arange(4.0))
        for n, p in named.items():
            weights = factors + torch.arange(4.0)
            torch.testing.assert_close(p.grad, torch.tensordot(weights.to(p.dtype), expected[n], 1))


def test_a_complex_direction_for_a_real_parameter():
    w = nn.Parameter(torch.randn(D))
    ps = gradrein.per_sample((torch.randn(B, D) * w).sum(1), {"w": w})
    with pytest.raises(ArgumentError, match="'w' is complex, its parameter is real"):
        ps.dot({"w": torch.ones(D, dtype=C)})
