"""What a proof must find: with the batch first, everyday ops keep samples apart, and structure alone shows it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradrein import graph
from gradrein.persample.cuts import signature_of
from gradrein.persample.engine import Losses
from gradrein.persample.owners.prove import prove

from .truth import claims, contradictions

B, C, T = 3, 4, 6


def steps():
    return torch.randn(B, T, C, requires_grad=True)


def images():
    return torch.randn(B, C, T, T, requires_grad=True)


def on(function, draw=steps):
    if isinstance(function, nn.Module):
        function.double()
    return lambda: (x := draw(), function(x))


def qkv(x):
    return x.view(B, T, 2, 2).transpose(1, 2)


def written(x):
    out = x.clone()
    out.mul_(torch.randn(T, C)).add_(1.0)
    return out


FUNCTIONS = {
    "linear": on(nn.Linear(C, 5)),
    "linear on rows": on(lambda x: nn.Linear(C, 5)(x[:, 0])),
    "matmul with a weight": on(lambda x: x @ torch.randn(C, 2)),
    "matmul of two": on(lambda x: x @ x.transpose(1, 2)),
    "einsum": on(lambda x: torch.einsum("btc,bsc->bts", x, x)),
    "a weight on the left": on(lambda x: torch.randn(5, T) @ x),
    "matmul with a vector": on(lambda x: x[:, 0] @ torch.randn(C)),
    "conv1d": on(lambda x: nn.Conv1d(T, 2, 3, padding=1)(x)),
    "conv2d": on(nn.Conv2d(C, 2, 3, stride=2), images),
    "conv2d groups": on(nn.Conv2d(C, C, 3, groups=C), images),
    "conv_transpose2d": on(nn.ConvTranspose2d(C, 2, 3), images),
    "reflection padding": on(nn.ReflectionPad2d(1), images),
    "constant padding": on(lambda x: F.pad(x, (1, 1, 2, 0)), images),
    "layer_norm": on(nn.LayerNorm(C)),
    "layer_norm over two": on(nn.LayerNorm([T, C])),
    "rms_norm": on(nn.RMSNorm(C)),
    "group_norm": on(nn.GroupNorm(2, C), images),
    "instance_norm": on(nn.InstanceNorm2d(C), images),
    "instance_norm with weights": on(nn.InstanceNorm2d(C, affine=True), images),
    "batch_norm eval": on(nn.BatchNorm2d(C).eval(), images),
    "softmax": on(lambda x: x.softmax(-1)),
    "log_softmax": on(lambda x: x.log_softmax(1)),
    "cross_entropy": on(lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(B, C).long()[:, :1].expand(B, T), reduction="none")),
    "cross_entropy with smoothing": on(lambda x: F.cross_entropy(x[:, 0], torch.zeros(B).long(), reduction="none", label_smoothing=0.1)),
    "mse_loss": on(lambda x: F.mse_loss(x, torch.zeros(B, T, C), reduction="none")),
    "bce with logits": on(lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(B, T, C), reduction="none")),
    "smooth_l1": on(lambda x: F.smooth_l1_loss(x, torch.zeros(B, T, C), reduction="none")),
    "kl_div": on(lambda x: F.kl_div(x, torch.ones(B, T, C), reduction="none")),
    "ctc_loss": on(lambda x: F.ctc_loss(x.transpose(0, 1).log_softmax(2), torch.ones(B, 2).long(), (T,) * B, (2,) * B, reduction="none")),
    "max_pool2d": on(nn.MaxPool2d(2), images),
    "avg_pool2d": on(nn.AvgPool2d(2), images),
    "adaptive pooling": on(nn.AdaptiveAvgPool2d(1), images),
    "max_pool1d": on(nn.MaxPool1d(2)),
    "avg_pool1d": on(nn.AvgPool1d(2)),
    "mean pooling": on(lambda x: x.mean(1)),
    "max over steps": on(lambda x: x.max(1).values),
    "sums": on(lambda x: x.sum((1, 2))),
    "variance": on(lambda x: x.var(-1, keepdim=True)),
    "norm": on(lambda x: F.normalize(x, dim=-1)),
    "upsample": on(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), images),
    "nearest": on(lambda x: F.interpolate(x, scale_factor=2), images),
    "pixel_shuffle": on(nn.PixelShuffle(2), images),
    "unfold": on(lambda x: F.unfold(x, 2), images),
    "windows": on(lambda x: x.unfold(1, 3, 1)),
    "views": on(lambda x: x.view(B, T * 2, 2).transpose(1, 2).reshape(B, -1).unflatten(1, (4, -1)).permute(0, 2, 1)),
    "folded and unfolded": on(lambda x: torch.tanh(x.flatten(0, 1)).view(B, T, C)),
    "squeezes": on(lambda x: x[:, :1].squeeze(1).unsqueeze(-1).movedim(0, 1).transpose(0, 1)),
    "slices": on(lambda x: x[:, 1::2, ..., -1]),
    "cat": on(lambda x: torch.cat([x, x.flip(1)], 1)),
    "cat of constants": on(lambda x: torch.cat([torch.zeros(B, 1, C), x], 1)),
    "stack": on(lambda x: torch.stack([x, x], -1)),
    "chunks": on(lambda x: torch.mul(*x.chunk(2, -1))),
    "split": on(lambda x: x.split([1, 2, 3], 1)[2]),
    "unbind": on(lambda x: sum(x.unbind(1))),
    "repeat": on(lambda x: x.repeat(1, 2, 1)),
    "repeat_interleave": on(lambda x: x.repeat_interleave(2, 1)),
    "expand": on(lambda x: x[:, :1].expand(B, T, C)),
    "roll": on(lambda x: x.roll(1, 1)),
    "flip": on(lambda x: x.flip(1, 2)),
    "tril": on(lambda x: (x @ x.transpose(1, 2)).tril()),
    "cumsum": on(lambda x: x.cumsum(1)),
    "sort": on(lambda x: x.sort(-1).values),
    "topk": on(lambda x: x.topk(2, -1).values),
    "gather": on(lambda x: x.gather(1, torch.zeros(B, 2, C).long())),
    "index_select": on(lambda x: x.index_select(1, torch.tensor([0, 0, 2]))),
    "scatter_add": on(lambda x: torch.zeros(B, T, C).scatter_add(1, torch.zeros(B, T, C).long(), x)),
    "masked_fill": on(lambda x: x.masked_fill(torch.rand(B, T, 1) < 0.5, 0.0)),
    "where": on(lambda x: torch.where(torch.rand(T, C) < 0.5, x, 0.0)),
    "dropout": on(nn.Dropout(0.5)),
    "glu": on(nn.GLU()),
    "activations": on(lambda x: F.gelu(F.silu(F.relu(F.leaky_relu(x)))) + F.softplus(F.elu(x)) * F.hardswish(x)),
    "prelu": on(nn.PReLU()),
    "arithmetic": on(lambda x: (x * 2 - 1 / (x.abs() + 1)).clamp(-1, 1) ** 2 + torch.lerp(x, x.exp(), 0.5)),
    "complex": on(lambda x: torch.view_as_real(torch.view_as_complex(x.view(B, T, 2, 2)) * torch.randn(T, 2) * 1j)),
    "fft": on(lambda x: torch.fft.rfft(x, dim=1).abs()),
    "attention": on(lambda x: F.scaled_dot_product_attention(qkv(x), qkv(x), qkv(x), is_causal=True)),
    "attention with a mask": on(lambda x: F.scaled_dot_product_attention(qkv(x), qkv(x), qkv(x), torch.rand(B, 1, T, T) < 2)),
    "multihead attention": on(lambda x: nn.MultiheadAttention(C, 2, batch_first=True)(x, x, x)[0]),
    "multihead attention, steps first": on(lambda x: nn.MultiheadAttention(C, 2)(*(x.transpose(0, 1),) * 3)[0].transpose(0, 1)),
    "transformer layer": on(nn.TransformerEncoderLayer(C, 2, 8, batch_first=True)),
    "lstm": on(lambda x: nn.LSTM(C, 5, batch_first=True)(x)[0]),
    "lstm states": on(lambda x: torch.cat([s.transpose(0, 1) for s in nn.LSTM(C, 5, 2, batch_first=True, bidirectional=True)(x)[1]], 2)),
    "lstm in float32": on(lambda x: nn.LSTM(C, 5, batch_first=True).float()(x.float())[0]),
    "gru": on(lambda x: nn.GRU(C, 5, batch_first=True)(x)[0]),
    "rnn": on(lambda x: nn.RNN(C, 5, batch_first=True)(x)[0]),
    "casts": on(lambda x: x.float().bfloat16().double().contiguous()),
    "in place": on(written),
}  # fmt: skip


def losses_of(name):
    torch.manual_seed(0)
    x, out = FUNCTIONS[name]()
    return x, Losses(out.reshape(B, -1).sum(1), range(B), B)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_samples_are_proved_apart(name):
    x, losses = losses_of(name)
    (owners,) = prove(losses.root, losses.sample_of)[graph.edge_of(x).node]
    assert owners.is_proved
    ids = owners.ids.expand(owners.shape)
    rows = torch.arange(B, dtype=torch.int32).view(-1, *(1,) * (x.dim() - 1)).expand(x.shape)
    assert bool(((ids == rows) | (ids == -1)).all())
    assert not contradictions(claims(losses), losses)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_the_same_form_has_the_same_signature(name):
    """Else nothing would ever be found again."""
    assert signature_of(losses_of(name)[1]) == signature_of(losses_of(name)[1])
