"""`trace`: torch's own backward pass with a record, and nothing else changed by it."""

import gc
import math
import weakref
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from functions import function
from gradrein import graph
from gradrein.autograd import GradStats
from gradrein.autograd._trace.grad_stats import measure


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)


def grads(model):
    return [p.grad for p in model.parameters()]


def test_records_what_each_node_got_and_sent():
    model, x = small()
    trace = gradrein.trace(model(x).square().mean(), model)
    named = dict(model.named_parameters())
    leaves = {node.parameter: node for node in trace.nodes if node.parameter}
    assert leaves.keys() == named.keys()
    for name, node in leaves.items():
        grad = named[name].grad
        assert node.incoming.norm == pytest.approx(grad.norm().item(), rel=1e-6)
        assert node.incoming.zeros == (grad == 0).sum()
        assert (node.shape, node.dtype, node.outgoing) == (grad.shape, torch.float32, None)
        assert node.module == name.rpartition(".")[0]
    mean, power, addmm = trace.nodes[:3]
    assert (mean.op, mean.incoming, mean.shape) == ("MeanBackward0", GradStats(1.0, 1, 0, 0), ())
    assert mean.outgoing == power.incoming == GradStats(pytest.approx(10**-0.5), 10, 0, 0)
    assert addmm.incoming.size == 10
    assert addmm.outgoing.size == 2 + 5 * 4 + 4 * 2
    assert [trace.nodes[target].op for target in addmm.targets] == ["AccumulateGrad", "ReluBackward0", "TBackward0"]
    assert all(node.seconds > 0 for node in trace.nodes)
    assert sum(node.seconds for node in trace.nodes) < trace.seconds


def test_same_gradients_and_same_hook_calls_as_torch():
    def run(backward):
        model, x = small()
        calls = []
        hidden = model[0](x)
        hidden.retain_grad()
        hidden.register_hook(lambda g: calls.append("tensor") or g * 2)
        hidden.grad_fn.register_hook(lambda gi, go: calls.append("node"))
        model[2].weight.register_hook(lambda g: calls.append("leaf") or g * 3)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        model[2].register_full_backward_hook(lambda m, gi, go: calls.append("module"))
        torch.autograd.graph.register_multi_grad_hook([hidden, model[0].bias], lambda gs: calls.append("multi"))
        model[0].bias.grad = torch.ones(4)
        backward(model[2](model[1](hidden)).sum(), model)
        return [hidden.grad, *grads(model)], calls

    plain, plain_calls = run(lambda loss, model: loss.backward())
    traced, traced_calls = run(gradrein.trace)
    assert all(map(torch.equal, plain, traced))
    assert traced_calls == plain_calls
    assert set(plain_calls) == {"tensor", "node", "leaf", "accumulated", "module", "multi"}


def test_a_hook_that_writes_in_place_is_seen():
    x = torch.ones(4, requires_grad=True)
    hidden = x.view(2, 2)

    def triple(g):
        g.mul_(3)

    hidden.register_hook(triple)
    trace = gradrein.trace((hidden * torch.ones(2, 2)).sum())
    assert [node.incoming.norm for node in trace.nodes][2:] == [6.0, 6.0]


def test_hooks_are_gone_after_success_and_after_failure():
    def fail(*_):
        raise ValueError("on purpose")

    fails = function("Fails", lambda x: x * 1, fail)

    x = torch.ones(3, requires_grad=True)
    hidden = x.exp()
    out = fails.apply(hidden).sum()
    with pytest.raises(ValueError, match="on purpose"):
        gradrein.trace(out)
    gradrein.trace(hidden.sum(), retain_graph=True)
    for node in graph.read(out).nodes:
        handle = node.register_hook(lambda *_: None)
        assert len(handle.hooks_dict_ref()) == 1
        handle.remove()


def test_keeps_nothing_alive():
    model, x = small()
    hidden = model[0](x)
    activation, grad_refs = weakref.ref(hidden), []
    hidden.register_hook(lambda g: grad_refs.append(weakref.ref(g)))
    out = model[2](hidden).sum()
    stowaway = nn.Module()
    out.grad_fn.metadata["lives as long as the node"] = stowaway
    node = weakref.ref(stowaway)
    gc.disable()
    try:
        trace = gradrein.trace(out, model)
        del hidden, out, stowaway
        assert activation() is None
        assert node() is None
        assert grad_refs[0]() is None
    finally:
        gc.enable()
    assert len(trace.nodes) == 9


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    model, x = small()
    x.requires_grad_()
    calls = []

    def region(h):
        calls.append(None)
        return model(h)

    trace = gradrein.trace(checkpoint(region, x, use_reentrant=reentrant).sum(), model)
    found = grads(model)
    assert len(calls) == 2
    assert [node.op for node in trace.nodes].count("CheckpointFunctionBackward") == reentrant
    model.zero_grad()
    model(x).sum().backward()
    assert all(map(torch.equal, found, grads(model)))


def test_sparse_nested_half_and_complex_gradients():
    embedding = nn.Embedding(6, 2, sparse=True)
    leaf = gradrein.trace(embedding(torch.tensor([1, 1, 3])).sum()).nodes[-1]
    assert leaf.incoming == GradStats(pytest.approx(math.sqrt(2 * 4 + 2)), 12, 8, 0)
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    nested = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
    assert gradrein.trace((nested * 2).values().sum()).nodes[-1].incoming.size == 12
    assert measure(torch.full((4,), 6e4, dtype=torch.half)).norm == pytest.approx(1.2e5, rel=1e-3)
    assert measure(torch.tensor([3 + 4j, 0])) == GradStats(5.0, 2, 1, 0)


def test_a_pass_without_values():
    x = torch.ones(3, device="meta", requires_grad=True)
    trace = gradrein.trace(x.exp().sum())
    assert [(node.op, node.incoming) for node in trace.nodes][-1] == ("AccumulateGrad", None)


def test_norms_beyond_the_range_of_squares():
    assert measure(torch.full((4,), 1e30)) == GradStats(pytest.approx(2e30), 4, 0, 0)
    assert measure(torch.full((4,), 1e-30)) == GradStats(pytest.approx(2e-30), 4, 0, 0)
    found = measure(torch.tensor([1.0, math.nan, math.inf, 0.0]))
    assert (found.nonfinite, found.zeros, found.size) == (2, 1, 4)


@pytest.mark.parametrize("shape", [(1,), (7,), (1023,), (1024,), (33, 100), (130, 1030), (9, 1024)])
def test_zeros_are_counted_exactly(shape):
    values = torch.randn(shape) * (torch.rand(shape) > 0.3)
    for view in (values, values.mT if values.dim() > 1 else values, values[::2], values[:1].expand(9, *shape[1:])):
        assert measure(view).zeros == (view == 0).sum()


def test_modules_from_the_record_of_the_forward_pass():
    model, x = small()
    with graph.record_modules(model) as module_of:
        out = model(x)
    relu = {n.op: n for n in gradrein.trace(out.sum(), model, modules=module_of).nodes}["ReluBackward0"]
    assert (relu.module, relu.exact) == ("1", True)
    relu = {n.op: n for n in gradrein.trace(model(x).sum(), model).nodes}["ReluBackward0"]
    assert (relu.module, relu.exact) == ("0", False)


def test_folding_by_module():
    model, x = small()
    trace = gradrein.trace(model(x).sum(), model)
    last, first = trace.by_module()
    assert (last.module, first.module) == ("2", "0")
    assert last.nodes + first.nodes == len(trace.nodes)
    assert last.entering == GradStats(1.0, 1, 0, 0)
    assert last.leaving == first.entering
    assert first.leaving is None
    expected = torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad]).norm().item()
    assert first.parameters.norm == pytest.approx(expected, rel=1e-6)
    nested = nn.ModuleDict({"a": model})
    trace = gradrein.trace(nested["a"](x).sum(), nested)
    assert [summary.module for summary in trace.by_module()] == ["a.2", "a.0"]
    assert [summary.module for summary in trace.by_module(depth=1)] == ["a"]


def test_printing_is_a_table_by_module():
    model, x = small()
    lines = str(gradrein.trace(model(x).sum(), model)).splitlines()
    assert lines[0].startswith("backward: 10 nodes in ")
    assert lines[1].split() == ["module", "nodes", "ms", "entering", "leaving", "parameters", "zeros", "non-finite"]
    assert [line.split()[0] for line in lines[2:]] == ["2", "0"]
    assert len({len(line) for line in lines[1:]}) == 1


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("circle", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_alone_and_escaped(tmp_path):
    evil = '<script>alert("x")</script>&'
    model = nn.Module()
    model.add_module(evil, nn.Linear(3, 2))
    layer = getattr(model, evil)
    written = gradrein.trace((layer(torch.ones(2, 3)) * 0).sqrt().sum(), model).to_html(tmp_path / "page.html")
    text = written.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {tag for tag, _ in tags.seen} & {"script", "link", "img", "iframe"}
    assert "http" not in text
    assert evil in tags.text
    assert "NaN or inf first at node 1: SqrtBackward0" in tags.text
    assert "prefers-color-scheme: dark" in text
    assert sum(tag == "circle" for tag, _ in tags.seen) == 7
