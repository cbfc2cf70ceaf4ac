"""Awkward models: each a function that returns a model and its losses, one per sample.

The name of the function is the name of the case. B samples, T steps; some cases have T equal to B on purpose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

B, T, D = 4, 5, 6


class Calls(nn.Module):
    """A model that is its children and a function of them and the data."""

    def __init__(self, function, /, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args):
        return self.function(self, *args)


def flat_sum(out):
    """One loss per sample that is no symmetric function of the outputs."""
    out = out.flatten(1)
    slope = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * slope + 0.1 * out**2).sum(1)


def images(*shape):
    return torch.randn(B, *shape)


def tokens(*shape, high=7):
    return torch.randint(high, (B, *shape))


def simple(layer, *inputs):
    return layer, lambda: flat_sum(layer(*inputs))


def _spatial_transformer():
    """A grid that is learned, over data."""
    locate, x = nn.Linear(3 * 4 * 4, 6), images(3, 4, 4)

    def losses():
        grid = F.affine_grid(locate(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        return flat_sum(F.grid_sample(x, grid, align_corners=False))

    return locate, losses


def _dot_in_a_loop():
    layer, x = nn.Linear(D, 1, bias=False), images(D)
    return layer, lambda: torch.stack([torch.dot(layer.weight[0], row) for row in x]).square()


CASES = {}


def case(build):
    CASES[build.__name__] = build
    return build


def many(**builders):
    for name, build in builders.items():
        CASES[name] = build


many(
    linear=lambda: simple(nn.Linear(D, 3), images(D)),
    linear_3d=lambda: simple(nn.Linear(D, 3), images(T, D)),
    linear_4d=lambda: simple(nn.Linear(D, 3), images(2, T, D)),
    linear_no_bias=lambda: simple(nn.Linear(D, 3, bias=False), images(T, D)),
    linear_steps_equal_batch=lambda: simple(nn.Sequential(nn.Linear(D, B), nn.ReLU(), nn.Linear(B, B)), images(B, D)),
    mlp=lambda: simple(
        nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), images(D)
    ),
    bilinear=lambda: simple(nn.Bilinear(D, 3, 2), images(D), images(3)),
    spatial_transformer=lambda: _spatial_transformer(),
    dot_in_a_loop=lambda: _dot_in_a_loop(),
    bilinear_3d=lambda: simple(nn.Bilinear(D, 3, 2), images(T, D), images(T, 3)),
    conv1d=lambda: simple(nn.Conv1d(3, 4, 3, stride=2, padding=1), images(3, 9)),
    conv2d=lambda: simple(nn.Conv2d(3, 4, 3, padding=1), images(3, 6, 7)),
    conv2d_groups=lambda: simple(nn.Conv2d(4, 6, 3, groups=2, dilation=2), images(4, 8, 8)),
    conv2d_depthwise=lambda: simple(nn.Conv2d(4, 8, 3, groups=4), images(4, 5, 5)),
    conv2d_same=lambda: simple(nn.Conv2d(3, 4, (2, 3), padding="same"), images(3, 5, 5)),
    conv2d_circular=lambda: simple(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), images(3, 5, 5)),
    conv2d_reflect=lambda: simple(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", stride=2), images(3, 5, 5)),
    conv2d_wide=lambda: simple(nn.Conv2d(8, 128, 1), images(8, 2, 2)),
    conv2d_many_channels=lambda: simple(nn.Conv2d(128, 130, 3, padding=1), images(128, 3, 3)),
    conv1d_many_channels=lambda: simple(nn.Conv1d(64, 70, 3, padding=1, stride=2), images(64, 5)),
    conv3d=lambda: simple(nn.Conv3d(2, 4, 2, groups=2, dilation=(1, 2, 1)), images(2, 4, 4, 4)),
    conv_transpose1d=lambda: simple(nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), images(3, 5)),
    conv_transpose2d=lambda: simple(nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), images(4, 4, 4)),
    conv_transpose3d=lambda: simple(nn.ConvTranspose3d(2, 3, 2, dilation=2), images(2, 3, 3, 3)),
    embedding=lambda: simple(nn.Embedding(7, 3), tokens(T)),
    embedding_padding=lambda: simple(nn.Embedding(7, 3, padding_idx=2), tokens(T, high=4)),
    embedding_int32=lambda: simple(nn.Embedding(7, 3), tokens(T).int()),
    embedding_bag_int32=lambda: simple(nn.EmbeddingBag(7, 3), tokens(T).int()),
    embedding_one_id=lambda: simple(nn.Embedding(7, 3), tokens()),
    embedding_sparse=lambda: simple(nn.Embedding(7, 3, sparse=True), tokens(T)),
    embedding_by_frequency=lambda: simple(nn.Embedding(7, 3, scale_grad_by_freq=True), tokens(T)),
    layer_norm=lambda: simple(nn.LayerNorm(D), images(T, D)),
    layer_norm_two_dims=lambda: simple(nn.LayerNorm((T, D)), images(T, D)),
    layer_norm_no_bias=lambda: simple(nn.LayerNorm(D, bias=False), images(D)),
    rms_norm=lambda: simple(nn.RMSNorm(D), images(T, D)),
    group_norm=lambda: simple(nn.GroupNorm(2, 4), images(4, 3, 3)),
    instance_norm1d=lambda: simple(nn.InstanceNorm1d(3, affine=True), images(3, 5)),
    instance_norm2d=lambda: simple(nn.InstanceNorm2d(B, affine=True), images(B, 3, 4)),
    batch_norm_eval=lambda: simple(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), images(3, 5, 5)),
    prelu=lambda: simple(nn.PReLU(), images(D)),
    prelu_channels=lambda: simple(nn.PReLU(3), images(3, 5)),
    rnn=lambda: recurrent(nn.RNN(D, 4, batch_first=True)),
    rnn_relu_deep=lambda: recurrent(nn.RNN(D, 4, 2, nonlinearity="relu", batch_first=True)),
    gru=lambda: recurrent(nn.GRU(D, 4, batch_first=True)),
    gru_deep_bidirectional=lambda: recurrent(nn.GRU(D, 4, 2, bidirectional=True, batch_first=True)),
    lstm=lambda: recurrent(nn.LSTM(D, 4, batch_first=True)),
    lstm_no_bias=lambda: recurrent(nn.LSTM(D, 4, bias=False, batch_first=True)),
    lstm_deep_bidirectional=lambda: recurrent(nn.LSTM(D, 4, 2, bidirectional=True, batch_first=True)),
    lstm_projected=lambda: recurrent(nn.LSTM(D, 4, proj_size=3, batch_first=True)),
    lstm_batch_second=lambda: recurrent(nn.LSTM(D, 4)),
    lstm_last_output=lambda: recurrent(nn.LSTM(D, 4, batch_first=True), lambda out, _: out[:, -1]),
    lstm_last_state=lambda: recurrent(nn.LSTM(D, 4, batch_first=True), lambda _, state: state[1].transpose(0, 1)),
    lstm_everything=lambda: recurrent(
        nn.LSTM(D, 4, batch_first=True),
        lambda out, state: torch.cat([out.flatten(1), *(s.transpose(0, 1).flatten(1) for s in state)], 1),
    ),
    transformer_encoder=lambda: simple(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        images(T, 8),
    ),
    transformer_norm_first=lambda: simple(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True), images(B, 8)
    ),
    transformer_decoder=lambda: simple(
        nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), images(T, 8), images(3, 8)
    ),
    weight_norm=lambda: simple(parametrizations.weight_norm(nn.Linear(D, 3)), images(T, D)),
    weight_norm_conv=lambda: simple(parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), images(3, 6)),
    spectral_norm=lambda: simple(parametrizations.spectral_norm(nn.Linear(D, B)).eval(), images(T, D)),
    orthogonal=lambda: simple(parametrizations.orthogonal(nn.Linear(D, 3)), images(D)),
    dropout=lambda: simple(nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.0), nn.Linear(8, 2)), images(D)),
)


def recurrent(layer, pick=lambda out, _: out):
    x = images(T, D) if layer.batch_first else torch.randn(T, B, D)

    def losses():
        out, state = layer(x)
        out = out if layer.batch_first else out.transpose(0, 1)
        return flat_sum(pick(out, state))

    return layer, losses


def attention(batch_first, *, cross=False, **options):
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
    q, other = images(T, 8), images(3, 8)
    if not batch_first:
        q, other = q.transpose(0, 1), other.transpose(0, 1)

    def losses():
        out, weights = layer(q, *((other, other) if cross else (q, q)))
        return flat_sum(out if batch_first else out.transpose(0, 1)) + weights.square().sum((1, 2))

    return layer, losses


many(
    attention=lambda: attention(True),
    attention_batch_second=lambda: attention(False),
    attention_cross=lambda: attention(True, cross=True),
    attention_bias_kv=lambda: attention(True, add_bias_kv=True),
    attention_no_bias=lambda: attention(False, bias=False, cross=True),
)


def made(function, *inputs, **children):
    """A model that is its children, and the losses of a function of it and of the data."""
    model = Calls(None, **children)
    return model, lambda: flat_sum(function(model, *inputs))


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def in_columns():
    model, x = Calls(None, w=parameter(3, D), b=parameter(3, 1)), torch.randn(D, B)
    return model, lambda: (model.w @ x + model.b).square().sum(0)


def positions(steps, ids):
    """Positions that all samples share, beside words."""
    layers = {"words": nn.Embedding(7, D), "places": nn.Embedding(9, D), "norm": nn.LayerNorm(D)}
    return made(lambda m, words: m.norm(m.words(words) + m.places(ids)), tokens(steps), **layers)


@case
def routed_rows():
    """A mixture of experts: each row goes to the expert its content chooses."""

    def route(m, x):
        rows = x.reshape(-1, D)
        choice = rows.sum(1).mul(3).long().abs() % 3
        out = torch.zeros_like(rows)
        for i, expert in enumerate(m.experts):
            picked = (choice == i).nonzero().squeeze(1)
            out = out.index_add(0, picked, torch.tanh(expert(rows[picked])))
        return out.view(B, T, D)

    return made(route, images(T, D), experts=nn.ModuleList([nn.Linear(D, D) for _ in range(3)]))


def experts(x, gate, call):
    """Route each row to the two experts that its gate prefers, in groups, and back."""
    rows = x.reshape(-1, x.shape[-1])
    weights, choice = gate(rows).softmax(1).topk(2, 1)
    chosen, order = choice.flatten().sort(stable=True)
    out = call(rows[order // 2], chosen) * weights.flatten()[order, None]
    return torch.zeros_like(rows).index_add(0, order // 2, out).view(x.shape)


@case
def experts_in_a_loop():
    """As transformers does it without groups: each expert is selected from the stack."""
    model = Calls(None, gate=nn.Linear(8, 5), up=parameter(5, 16, 8), down=parameter(5, 8, 16))
    x = images(T, 8)

    def call(rows, chosen):
        out = torch.zeros_like(rows)
        for e in range(5):
            picked = (chosen == e).nonzero().squeeze(1)
            h = torch.tanh(F.linear(rows[picked], model.up[e]))
            out = out.index_add(0, picked, F.linear(h, model.down[e]))
        return out

    return model, lambda: flat_sum(experts(x, model.gate, call))


@case
def batched_product_with_samples_in_columns():
    model, x = Calls(None, w=parameter(3, 2, D)), torch.randn(3, D, B)
    return model, lambda: torch.bmm(model.w, x).tanh().square().sum((0, 1))


@case
def batched_product_with_rows_of_all_samples_shuffled():
    model = Calls(None, w=parameter(3, D, 2), inner=nn.Linear(D, D))
    x, order = torch.randn(3, 2 * B, D), torch.randperm(3 * 2 * B)
    owner = torch.arange(B).repeat(6)[order]

    def losses():
        out = torch.bmm(torch.tanh(model.inner(x)), model.w).reshape(-1, 2).square().sum(1)
        return torch.zeros(B, dtype=out.dtype).index_add(0, owner, out)

    return model, losses


@case
def relative_positions():
    """As in Funnel and Transformer-XL: heads are batched, the table has no batch dimension."""

    def scores(m, x):
        q = m.q(x).view(B, T, 2, D) + m.bias
        return torch.einsum("binh,jnh->bnij", q, m.table).permute(2, 0, 1, 3).softmax(-1).transpose(0, 1)

    return made(scores, images(T, D), table=parameter(7, 2, D), bias=parameter(2, D), q=nn.Linear(D, 2 * D))


@case
def tied_embedding_and_head():
    model = Calls(None, table=nn.Embedding(7, D), inner=nn.Linear(D, D))
    ids, target = tokens(T), tokens(T)

    def losses():
        logits = F.linear(torch.tanh(model.inner(model.table(ids))), model.table.weight)
        return F.cross_entropy(logits.transpose(1, 2), target, reduction="none").sum(1)

    return model, losses


@case
def embedding_called_twice():
    table = nn.Embedding(7, 3)
    a, b = tokens(T), tokens(2)
    return table, lambda: flat_sum(table(a)) + flat_sum(table(b).exp())


@case
def class_token_and_layer_scale():
    def run(m, x):
        h = torch.cat([m.token.expand(B, -1, -1), x], 1) + m.places
        return (h + m.scale * m.inner(h))[:, 0]

    children = {"token": parameter(1, 1, D), "places": parameter(1, T + 1, D), "scale": parameter(D)}
    return made(run, images(T, D), **children, inner=nn.Linear(D, D))


def low_rank(function, **children):
    base = nn.Linear(D, 5)
    base.weight.requires_grad_(False)
    return made(function, images(T, D), base=base, **children)


def pruned():
    """The mask makes the weight anew at every call."""
    layer = nn.Linear(D, B)
    prune.random_unstructured(layer, "weight", 0.3)
    return simple(layer, images(D))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def parametrized():
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return simple(layer, images(T, D))


@case
def frozen_and_unused():
    model = nn.ModuleDict({"used": nn.Linear(D, 3), "frozen": nn.Linear(3, 3), "unused": nn.Linear(2, 2)})
    model["frozen"].weight.requires_grad_(False)
    x = images(D)
    return model, lambda: flat_sum(model["frozen"](model["used"](x)))


@case
def checkpointed():
    blocks = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)) for _ in range(2)]

    def run(m, x):
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return made(run, images(T, D), blocks=nn.ModuleList(blocks))


@case
def cells():
    def run(m, x):
        a = g = torch.zeros(B, 4, dtype=x.dtype)
        state = None
        for t in range(T):
            a = m.rnn(x[:, t], a)
            g = m.gru(a, g)
            state = m.lstm(g, state)
        return torch.cat(state, 1)

    return made(run, images(T, D), rnn=nn.RNNCell(D, 4), gru=nn.GRUCell(4, 4), lstm=nn.LSTMCell(4, 3))


@case
def packed_sequence():
    model = nn.ModuleList([nn.LSTM(D, 4), nn.GRU(D, 4)])
    x = torch.randn(T, B, D)
    lengths = torch.tensor([5, 3, 2, 1], device="cpu")

    def losses():
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        return sum(flat_sum(nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0].transpose(0, 1)) for layer in model)

    return model, losses


many(
    batch_folded_into_rows=lambda: made(
        lambda m, x: m.net(x.reshape(B * T, D)).reshape(B, T, 2),
        images(T, D),
        net=nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 2)),
    ),
    batch_second=lambda: made(
        lambda m, x: m.net(x).transpose(0, 1),
        torch.randn(T, B, D),
        net=nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
    ),
    samples_in_columns=in_columns,
    shuffled_rows=lambda: made(lambda m, x: torch.tanh(m.a(x))[[2, 0, 3, 1]], images(D), a=nn.Linear(D, 3)),
    stacked_experts=lambda: made(
        lambda m, x: torch.einsum("btd,edf->betf", x, m.w), images(T, D), w=parameter(3, D, 2)
    ),
    batched_product_with_one_member_per_sample=lambda: made(
        lambda m, x: torch.baddbmm(m.b, x, m.w, beta=0.5, alpha=2.0),
        images(T, D),
        w=parameter(B, D, 2),
        b=parameter(B, 1, 2),
    ),
    functional_and_keyword_calls=lambda: made(
        lambda m, x: m.a(input=x) + F.linear(x, weight=m.a.weight * 2), images(T, D), a=nn.Linear(D, 3)
    ),
    called_twice=lambda: made(lambda m, x: m.a(torch.tanh(m.a(x))), images(T, D), a=nn.Linear(D, D)),
    conv_called_twice=lambda: made(
        lambda m, x: m.a(torch.tanh(m.a(x))), images(3, 4, 4), a=nn.Conv2d(3, 3, 3, padding=1)
    ),
    tied_sparse_embedding_and_head=lambda: made(
        lambda m, ids: F.linear(torch.tanh(m.a(ids)), m.a.weight), tokens(T), a=nn.Embedding(7, D, sparse=True)
    ),
    position_ids_broadcast=lambda: positions(T, torch.arange(T)[None]),
    positions_equal_batch=lambda: positions(B, torch.arange(B)),
    token_repeated=lambda: made(
        lambda m, x: torch.cat([m.token.repeat(B, 1, 1), x], 1).exp(), images(T, D), token=parameter(1, 2, D)
    ),
    # Gemma's ``1 + weight``, a state space's ``-exp(a)``, a gate.
    made_from_parameters=lambda: made(
        lambda m, x: x * (1 + m.w) * torch.exp(-torch.exp(m.a)) * torch.sigmoid(m.g),
        images(T, D),
        w=parameter(D),
        a=parameter(D),
        g=parameter(1),
    ),
    low_rank_merged=lambda: low_rank(
        lambda m, x: F.linear(x, m.base.weight + 0.5 * m.b @ m.a, m.base.bias), a=parameter(2, D), b=parameter(5, 2)
    ),
    low_rank_apart=lambda: low_rank(
        lambda m, x: m.base(x) + m.b(m.a(x)), a=nn.Linear(D, 2, bias=False), b=nn.Linear(2, 5, bias=False)
    ),
    pruned_weight=pruned,
    own_parametrization=parametrized,
    input_needs_gradient=lambda: simple(nn.Linear(D, 3), images(T, D).requires_grad_()),
)


def one_parameter(shape, function):
    """A function of one parameter and of data of shape (B, T, D)."""
    model = Calls(None, w=nn.Parameter(torch.rand(shape) + 0.5))
    x = images(T, D)
    return model, lambda: flat_sum(function(model.w, x))


IDS = torch.tensor([[0, 2], [2, 2], [-1, 1], [0, 3]])  # two for each sample, some of them the same

many(
    index_rows=lambda: one_parameter((5, D), lambda w, x: w[IDS] * x[:, :2]),
    index_rows_of_matrices=lambda: one_parameter((5, 2, D), lambda w, x: w[IDS] * x[:, :2, None]),
    index_of_a_vector=lambda: one_parameter((5,), lambda w, x: w[IDS] * x[:, :2, 0]),
    index_two=lambda: one_parameter((5, 4), lambda w, x: w[IDS, IDS.flip(1)] * x[:, :2, 0]),
    index_second=lambda: one_parameter((3, 5), lambda w, x: (w[:, IDS] * x[:, 0, :2]).transpose(0, 1)),
    index_mask=lambda: one_parameter(
        (B, T), lambda w, x: torch.zeros(B).index_add(0, (x[..., 0] > 0).nonzero()[:, 0], w[x[..., 0] > 0])[:, None]
    ),
    index_split_rows=lambda: one_parameter((5, B), lambda w, x: w[IDS[:, 0]].T * x[:, :B, 0]),
    index_select_rows=lambda: one_parameter(
        (5, D), lambda w, x: w.index_select(0, IDS[:, 0].to(x.device) % 5) * x[:, 0]
    ),
    index_select_columns=lambda: one_parameter(
        (5, 4), lambda w, x: w.index_select(-1, IDS[:, 1].to(x.device)).T * x[:, 0, :5]
    ),
    gathered_cells=lambda: one_parameter((B, 4), lambda w, x: w.gather(-1, IDS.to(x.device) % 4) * x[:, 0, :2]),
    put_values=lambda: one_parameter((3, D), lambda w, x: x.index_put((IDS[:3, 0] + 1, IDS[:3, 1] + 1), w * 2)),
    put_bare_values=lambda: one_parameter(
        (D,), lambda w, x: x.index_put((torch.tensor([1, 3]), torch.tensor([0, 2])), w)
    ),
    put_into_parameter=lambda: one_parameter((B, D), lambda w, x: w.index_put((torch.tensor([1, 3]),), x[:2, 0])),
    add_into_parameter=lambda: one_parameter(
        (B, D), lambda w, x: w.index_put((torch.tensor([1, 1]),), x[1, :2], accumulate=True)
    ),
    assigned=lambda: one_parameter((2, D), lambda w, x: assigned(x, w)),
    distances=lambda: one_parameter((3, D), lambda w, x: torch.cdist(x, w)),
    distances_by_product=lambda: one_parameter((30, D), lambda w, x: torch.cdist(x[:, 0], w)),
    distances_by_product_parameter_first=lambda: one_parameter((30, D), lambda w, x: torch.cdist(w, x[:, 0]).T),
    distances_p1=lambda: one_parameter((3, D), lambda w, x: torch.cdist(x, w, p=1.0)),
    distances_of_zero=lambda: one_parameter((T, D), lambda w, x: torch.cdist(w.detach() * torch.ones(B, 1, 1), w)),
    exp_of_rows=lambda: one_parameter((B, D), lambda w, x: w.exp() * x[:, 0]),
    clamp_of_rows=lambda: one_parameter((B, D), lambda w, x: w.clamp(0.7, 1.2) * x[:, 0]),
    softplus_seen_by_one_sample=lambda: one_parameter(
        (D,), lambda w, x: F.softplus(w) * x[:, 0] * torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None]
    ),
    logaddexp=lambda: one_parameter((D,), lambda w, x: torch.logaddexp(x, w)),
    transposed_by_t=lambda: one_parameter((3, D), lambda w, x: x @ w.T),
    permuted_to_itself=lambda: one_parameter((D, 3), lambda w, x: x @ w.permute(-2, -1)),
    no_dimensions=lambda: one_parameter((), lambda w, x: x * w),
    no_dimensions_exp=lambda: one_parameter((), lambda w, x: F.normalize(x, dim=-1) * w.exp().clamp(max=100)),
    no_dimensions_expanded=lambda: one_parameter((), lambda w, x: torch.cat([w.expand(B, T, 1), x], 2)),
    no_dimensions_seen_by_one_sample=lambda: one_parameter(
        (), lambda w, x: w.exp() * x[:, 0] * torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None]
    ),
    resized_table=lambda: one_parameter((1, 2, 3, 3), lambda w, x: x[:, None, :, :5] + resized(w, "bilinear")),
    resized_table_bicubic=lambda: one_parameter((1, 2, 7, 7), lambda w, x: x[:, None, :, :5] * resized(w, "bicubic")),
)


def resized(table, mode):
    return F.interpolate(table, (5, 5), mode=mode, antialias=True)


def assigned(x, w):
    out = x.clone()
    out[torch.tensor([0, 3]), torch.tensor([1, 1])] = w
    return out


def bag(mode, **options):
    layer = nn.EmbeddingBag(7, 3, mode=mode, **options)
    ids, offsets = torch.randint(7, (9,)), torch.tensor([0, 2, 2, 5])
    weights = torch.rand(9) if mode == "sum" else None
    return layer, lambda: flat_sum(layer(ids, offsets, per_sample_weights=weights))


many(
    bag_sum=lambda: bag("sum"),
    bag_mean=lambda: bag("mean"),
    bag_mean_padding=lambda: bag("mean", padding_idx=1),
    bag_max=lambda: bag("max"),
    bag_max_padding=lambda: bag("max", padding_idx=1),
    bag_max_of_rows=lambda: simple(nn.EmbeddingBag(7, 3, mode="max"), tokens(T)),
    bag_of_rows=lambda: simple(nn.EmbeddingBag(7, 3), tokens(T)),
)


@case
def bags_in_one_table():
    table = nn.Parameter(torch.randn(7, 3))
    ids = tokens(T)

    def losses():
        found = [F.embedding_bag(ids, table, mode=mode) for mode in ("max", "sum", "max")]
        return flat_sum(torch.cat([*found, F.embedding(ids, table).flatten(1)], 1))

    return Calls(None, table=table), losses


@case
def losses_per_token():
    model = nn.Sequential(nn.Embedding(7, D), nn.Linear(D, 7))
    ids, target = tokens(T), tokens(T)
    return model, lambda: F.cross_entropy(model(ids).transpose(1, 2), target, reduction="none")


@case
def some_losses_are_zero():
    layer = nn.Linear(D, 3)
    x, mask = images(T, D), torch.tensor([1.0, 0.0, 3.0, 2.0])
    return layer, lambda: flat_sum(layer(x)) * mask


@case
def dead_units():
    """Behind a closed gate nothing gets a gradient, whatever the layer."""
    model = Calls(None, conv=nn.Conv1d(2, 2, 3), table=nn.Embedding(7, 3), inner=nn.Linear(3, 3), out=nn.Linear(3, 2))
    x, ids = images(2, 5), tokens(T)

    def losses():
        closed = flat_sum(model.conv(x)) + flat_sum(model.inner(model.table(ids)))
        return flat_sum(model.out(x[:, 0, :3])) + 0.0 * closed

    return model, losses


@case
def equal_samples():
    """Nothing tells the samples apart but their place."""
    model = Calls(None, inner=nn.Linear(D, D), places=nn.Parameter(torch.randn(3, D)))
    x = torch.ones(3, 3, D)
    return model, lambda: flat_sum(torch.tanh(model.inner(x + model.places)))


@case
def far_apart_in_size():
    layer = nn.Linear(D, 3)
    x = images(T, D)
    size = torch.tensor([1e-9, 1.0, 1e6, 1e-3])
    return layer, lambda: flat_sum(layer(x)) * size


@case
def in_place_ops():
    model = nn.Sequential(nn.Linear(D, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    x = images(T, D)

    def losses():
        out = model(x)
        out[:, 0] *= 2
        return flat_sum(out)

    return model, losses


@case
def small_cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    x, target = images(3, 6, 6), tokens(high=3)
    return model, lambda: F.cross_entropy(model(x), target, reduction="none")
