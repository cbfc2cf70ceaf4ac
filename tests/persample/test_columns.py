"""Convolutions by unfolded images: the same gradients as torch's own call for each sample alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gradrein.persample.representations import base, conv

OPTIONS = conv.OPTIONS
NONE = {"stride": [1], "padding": [0], "dilation": [1], "transposed": False, "output_padding": [0], "groups": 1}


def factors(shape, options, *, samples=3, size=7, dtype=torch.float64, last=False):
    """Return the gradient at the output and the input of a convolution, one image per sample."""
    dims = len(shape) - 2
    x = torch.randn(samples, shape[1], *(size + i for i in range(dims)), dtype=dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    out = torch.convolution(x, torch.zeros(shape, dtype=dtype), None, *(options[name] for name in OPTIONS))
    return torch.randn_like(out)[:, None], x[:, None]


def one_by_one(g, x, shape, options):
    return torch.stack([conv._weight_gradient(a, b, shape, *options.values()) for a, b in zip(g, x, strict=True)])


@settings(max_examples=60, deadline=None)
@given(
    dims=st.integers(1, 3),
    channels=st.tuples(st.sampled_from([1, 3, 8, 9]), st.sampled_from([1, 2, 8, 40])),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    samples=st.integers(0, 4),
    last=st.booleans(),
    chunk=st.sampled_from([1, 1 << 22]),
)
def test_unfolded_images_give_the_gradient_of_each_sample(
    dims, channels, kernel, stride, padding, dilation, samples, last, chunk
):
    shape = (channels[1], channels[0], *(kernel,) * dims)
    options = {**NONE, "stride": [stride] * dims, "padding": [padding] * dims, "dilation": [dilation] * dims}
    options["output_padding"] = [0] * dims
    g, x = factors(shape, options, samples=max(1, samples), last=last and dims > 1)
    g, x = g[:samples], x[:samples]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "CHUNK_BYTES", chunk)
        out = g.new_empty(samples, *shape)
        found = conv._write_from_columns(g[:, 0], x[:, 0], out, tuple(options.values()))
        chosen = conv.weight_gradients(g, x, shape, *options.values())
    expected = one_by_one(g, x, shape, options) if samples else g.new_empty(0, *shape)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(chosen, expected)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_columns_are_those_of_torch(stride, dilation):
    shape = (2, 3, 2, 3)
    options = {**NONE, "stride": [stride], "padding": [2, 1], "dilation": [dilation]}
    g, x = factors(shape, {**options, "stride": [stride] * 2, "dilation": [dilation] * 2, "output_padding": [0] * 2})
    _, columns = conv._unfolded(g[:, 0], x[:, 0], shape, tuple(options.values()))
    assert torch.equal(columns, F.unfold(x[:, 0], (2, 3), dilation, (2, 1), stride))


@pytest.mark.parametrize(
    "shape", [(4, 3, 3, 3), (16, 8, 1, 1), (128, 64, 3, 3), (8, 8, 3, 3), (130, 128, 3, 3), (4, 2, 3)]
)
def test_norms_and_sums_are_those_of_gradients_written_down(shape):
    dims = len(shape) - 2
    options = {
        **NONE,
        "stride": [2] * dims,
        "padding": [1] * dims,
        "dilation": [1] * dims,
        "output_padding": [0] * dims,
    }
    g, x = factors(shape, options, dtype=torch.float32)
    expected = one_by_one(g.double(), x.double(), shape, options)
    weights = torch.rand(len(g), dtype=torch.float64)
    for strategy in ("gram", "streamed"):
        form = conv.Convolved(g, x, options, shape)
        form.strategy = strategy
        torch.testing.assert_close(form.norms(), expected.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(form.dense().double(), expected, rtol=1e-4, atol=1e-4)
        total = (weights @ expected.flatten(1)).view(shape)
        torch.testing.assert_close(form.weighted(weights).double(), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("samples", "shape", "size", "strategy"),
    [
        (64, (128, 64, 3, 3), 8, "streamed"),  # one product serves the norm and the sum
        (512, (128, 64, 3, 3), 8, "gram"),  # too large to be written down
        (32, (512, 512, 3, 3), 4, "gram"),
        (64, (64, 64, 3, 3), 16, "streamed"),
        (64, (64, 64, 3, 3), 2, "gram"),
    ],
)
def test_gram_matrices_are_made_where_they_save_time(samples, shape, size, strategy):
    options = {**NONE, "padding": [1, 1], "stride": [1, 1], "dilation": [1, 1], "output_padding": [0, 0]}
    g = torch.empty(()).expand(samples, 1, shape[0], size, size)
    x = torch.empty(()).expand(samples, 1, shape[1], size, size)
    assert conv.Convolved(g, x, options, shape).strategy == strategy
