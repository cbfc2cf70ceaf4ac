"""Ops that only CUDA has, for the simulated one: computed by the host from what their kernels are documented to return."""

import math

import torch
import torch.backends.cudnn.rnn
from simulated import KEY, KIND, in_a_new_thread, launch, library, on_host, to_device
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = range(4)  # which attention `hooks.choose_attention` takes
_RNN = [torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru]  # in the order of cuDNN's modes
_LSTM = 2


def cuda_kernel(name):
    """Register a function of host tensors as the kernel of an op."""

    def register(function):
        def run(*args, **kwargs):
            launch(name)
            args, kwargs = tree_map(lambda v: on_host(v) if isinstance(v, Tensor) else v, (args, kwargs))
            with torch._C.DisableTorchFunction():
                answer = function(*args, **kwargs)
            return tree_map(lambda v: to_device(v) if isinstance(v, Tensor) else v, answer)

        library.impl(name, run, KEY)
        return function

    return register


# --- Attention ------------------------------------------------------------------------------------------------------


def _for_all_heads(heads, t):
    """Repeat keys or values of grouped heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _weights(q, k, bias, is_causal, scale):
    scores = (q @ k.transpose(-1, -2)).float() * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def _attend(q, k, v, bias, is_causal, scale):
    heads = q.shape[1]
    weights, lse = _weights(q, _for_all_heads(heads, k), bias, is_causal, scale)
    out = weights.to(v.dtype) @ _for_all_heads(heads, v)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse  # CUDA's lies in memory by (batch, time, head)


def _attend_backward(g, q, k, v, bias, is_causal, scale):
    heads, groups = q.shape[1], k.shape[1]
    all_k, all_v = _for_all_heads(heads, k), _for_all_heads(heads, v)
    weights, _ = _weights(q, all_k, bias, is_causal, scale)
    grad_v = weights.transpose(-1, -2).to(g.dtype) @ g
    grad_weights = (g @ all_v.transpose(-1, -2)).float()
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    by = scale or 1 / math.sqrt(q.shape[-1])
    grad_q = grad_scores.to(q.dtype) @ all_k * by
    grad_k = grad_scores.transpose(-1, -2).to(q.dtype) @ q * by
    if heads != groups:
        grad_k, grad_v = (t.unflatten(1, (groups, heads // groups)).sum(2) for t in (grad_k, grad_v))
    return grad_q, grad_k, grad_v, grad_scores


def _nothing():
    return torch.empty(0)


def _number(dtype=torch.int64):
    return torch.zeros((), dtype=dtype)


@cuda_kernel("_scaled_dot_product_flash_attention")
def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = _attend(q, k, v, None, is_causal, scale)
    seed, offset = torch.zeros(2, dtype=torch.uint64), _number(torch.uint64)
    return out, lse, _nothing(), _nothing(), q.shape[2], k.shape[2], seed, offset, _nothing()


@cuda_kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(
    g, q, k, v, out, lse, lengths_q, lengths_k, most_q, most_k, p, is_causal, seed, offset, *, scale=None
):
    return _attend_backward(g, q, k, v, None, is_causal, scale)[:3]


@cuda_kernel("_scaled_dot_product_efficient_attention")
def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse = _attend(q, k, v, bias, is_causal, scale)
    return out, lse if compute_lse else _nothing(), _number(), _number()


@cuda_kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(g, q, k, v, bias, out, lse, seed, offset, p, wanted, is_causal=False, *, scale=None):
    *grads, grad_scores = _attend_backward(g, q, k, v, bias, is_causal, scale)
    return *grads, grad_scores.sum_to_size(bias.shape) if bias is not None and wanted[3] else None


@cuda_kernel("_scaled_dot_product_cudnn_attention")
def cudnn(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = _attend(q, k, v, bias, is_causal, scale)
    return out, lse, _nothing(), _nothing(), q.shape[2], k.shape[2], _number(), _number(), _nothing()


@cuda_kernel("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(
    g, q, k, v, out, lse, seed, offset, bias, lengths_q, lengths_k, most_q, most_k, p, is_causal, *, scale=None
):
    bias = bias if bias is not None and bias.numel() else None
    return _attend_backward(g, q, k, v, bias, is_causal, scale)[:3]


# --- Recurrent layers -----------------------------------------------------------------------------------------------


def _recur(x, weights, per_layer, hx, cx, mode, layers, batch_first, both, lengths):
    state = [hx, cx] if mode == _LSTM else hx
    rest = weights, per_layer == 4, layers, 0.0, False, both
    if lengths:
        answer = _RNN[mode](x, torch.tensor(lengths), state, *rest)
    else:
        answer = _RNN[mode](x, state, *rest, batch_first)
    return answer if mode == _LSTM else (*answer, None)


@cuda_kernel("_cudnn_rnn")
def rnn(x, weights, per_layer, buffer, hx, cx, mode, size, proj, layers, batch_first, p, train, both, lengths, state):
    def run():
        with torch.no_grad():
            return _recur(x, weights, per_layer, hx, cx, mode, layers, batch_first, both, lengths)

    out, last_h, last_c = in_a_new_thread(run)
    reserve = torch.zeros(64, dtype=torch.uint8)
    return out, last_h, _nothing() if last_c is None else last_c, reserve, torch.cat([w.flatten() for w in weights])


@cuda_kernel("_cudnn_rnn_backward")
def rnn_backward(
    x,
    weights,
    per_layer,
    buffer,
    hx,
    cx,
    out,
    g,
    g_h,
    g_c,
    mode,
    size,
    proj,
    layers,
    batch_first,
    p,
    train,
    both,
    lengths,
    *_,
):
    assert train, "cuDNN's recurrent layers have a backward in training mode only"

    def run():
        leaves = [t.detach().clone().requires_grad_() for t in (x, hx, *([] if cx is None else [cx]), *weights)]
        (x_, h_), rest = leaves[:2], leaves[2:]
        c_, weights_ = (None, rest) if cx is None else (rest[0], rest[1:])
        with torch.enable_grad():
            outs = _recur(x_, weights_, per_layer, h_, c_, mode, layers, batch_first, both, lengths)
        pairs = [(o, grad) for o, grad in zip(outs, (g, g_h, g_c), strict=True) if grad is not None and o is not None]
        starts, arrived = zip(*pairs, strict=True)
        return torch.autograd.grad(starts, leaves, arrived, allow_unused=True, materialize_grads=True)

    grads = list(in_a_new_thread(run))
    grad_c = _nothing() if cx is None else grads.pop(2)
    return grads[0], grads[1], grad_c, grads[2:]


@cuda_kernel("_thnn_fused_lstm_cell")
def lstm_cell(from_x, from_h, cx, bias_x=None, bias_h=None):
    gates = from_x + from_h + (0 if bias_x is None else bias_x + bias_h)
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)


@cuda_kernel("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(g_h, g_c, cx, cy, gates, has_bias):
    i, f, c, o = gates.chunk(4, 1)
    squashed = cy.tanh()
    g_h = torch.zeros_like(cx) if g_h is None else g_h
    g_c = (0 if g_c is None else g_c) + g_h * o * (1 - squashed**2)
    grads = [g_c * c * i * (1 - i), g_c * cx * f * (1 - f), g_c * i * (1 - c**2), g_h * squashed * o * (1 - o)]
    grad = torch.cat(grads, 1)
    return grad, g_c * f, grad.sum(0) if has_bias else None


@cuda_kernel("_thnn_fused_gru_cell")
def gru_cell(from_x, from_h, hx, bias_x=None, bias_h=None):
    if bias_x is not None:
        from_x, from_h = from_x + bias_x, from_h + bias_h
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_x.chunk(3, 1), from_h.chunk(3, 1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * h_n).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, h_n], 1)


@cuda_kernel("_thnn_fused_gru_cell_backward")
def gru_cell_backward(g, workspace, has_bias):
    r, z, n, hx, h_n = workspace.chunk(5, 1)
    grad_n = g * (1 - z) * (1 - n**2)
    grad_z, grad_r = g * (hx - n) * z * (1 - z), grad_n * h_n * r * (1 - r)
    of_x, of_h = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    return of_x, of_h, g * z, of_x.sum(0) if has_bias else None, of_h.sum(0) if has_bias else None


# --- Norms ----------------------------------------------------------------------------------------------------------


@cuda_kernel("cudnn_batch_norm")
def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    out, saved_mean, saved_invstd = torch.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    saved = (saved_mean, saved_invstd) if training else (_nothing(), _nothing())
    return out, *saved, torch.empty(0, dtype=torch.uint8)


@cuda_kernel("cudnn_batch_norm_backward")
def batch_norm_backward(x, g, weight, mean, var, saved_mean, saved_invstd, eps, reserve):
    wanted = [True, True, True]
    return aten.native_batch_norm_backward(g, x, weight, mean, var, saved_mean, saved_invstd, True, eps, wanted)


@cuda_kernel("_fused_rms_norm")
def rms_norm(x, shape, weight, eps):
    dims = tuple(range(-len(shape), 0))
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    rstd = (wide.pow(2).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    out = wide * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd


@cuda_kernel("_fused_rms_norm_backward")
def rms_norm_backward(g, x, shape, rstd, weight, wanted):
    dims, rest = tuple(range(-len(shape), 0)), tuple(range(x.dim() - len(shape)))
    scaled = g if weight is None else g * weight
    grad = rstd * scaled - x * rstd.pow(3) * (scaled * x).mean(dims, keepdim=True)
    return grad.to(x.dtype), (g * x * rstd).sum(rest) if weight is not None and wanted[1] else None


# --- What torch asks its CUDA -----------------------------------------------------------------------------------------


def _flatten_weights(weights, *_):
    """Let the weights of a recurrent layer be views of one buffer."""
    launch("_cudnn_rnn_flatten_weight")
    buffer = to_device(torch.cat([on_host(w).flatten() for w in weights]))
    start = 0
    for w in weights:
        w.set_(buffer.untyped_storage(), start, w.shape, torch.empty(w.shape, device="meta").stride())
        start += w.numel()
    return buffer


library.impl("_cudnn_rnn_flatten_weight", _flatten_weights, KEY)
if KIND == "cuda":
    torch.backends.cudnn.is_acceptable = lambda t: t.is_cuda and torch.backends.cudnn.enabled
    torch.backends.cudnn.rnn.get_cudnn_mode = ["RNN_RELU", "RNN_TANH", "LSTM", "GRU"].index
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: 0
    torch.cuda._utils._get_device_index = lambda device, *args, **kwargs: 0
