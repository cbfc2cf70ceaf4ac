"""Names of tensors and locations of nodes, given and found."""

import contextlib
import threading
import weakref

import torch
from torch import nn

from gradrein import graph


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.head(self.body(x).tanh() * self.scale)


def test_names():
    net = Net()
    assert graph.find_names(net).of(net.body[2].bias) == "body.2.bias"
    assert graph.find_names(net).of(net.scale) == "scale"  # a buffer
    assert graph.find_names(net).of(torch.ones(1)) is None
    assert graph.find_names(net).module_of(net.head.weight) == "head"
    net.copy = net.body[2]
    assert graph.find_names(net).of(net.copy.weight) == "body.2.weight"  # a shared weight goes by its first name
    outer = nn.Sequential(net)
    assert graph.find_names().of(outer[0].head.weight) == "Sequential.0.head.weight"  # by their outermost owner


def test_a_module_still_being_built_is_not_in_the_way():
    class Half(nn.Module):
        def __init__(self):
            self.__dict__["early"] = graph.find_names()
            super().__init__()

    assert Half().early.of(torch.ones(1)) is None


def test_variable_name_is_the_callers_and_kept_by_nobody():
    momentum = torch.ones(1)
    assert graph.variable_name(momentum) == "momentum"
    assert graph.variable_name(torch.ones(1)) is None
    gone = weakref.ref(momentum)
    del momentum
    assert gone() is None


def test_locations_from_parameters_alone():
    net = Net()
    read = graph.read(net(torch.ones(2, 3)).sum())
    found = graph.locate_nodes(read, graph.find_names(net))
    located = {graph.op(node): str(found[node]) for node in read.nodes if node in found}
    assert located["SumBackward0"] == "after head"
    assert located["TanhBackward0"] == "after body.2"
    assert located["AddmmBackward0"] == "in body.0"  # the last of three in this order
    assert located["ReluBackward0"] == "after body.0"


def test_recorded_locations_are_exact_and_leave_no_hook_behind():
    net = Net()
    with graph.record_modules(net) as module_of:
        out = net(torch.ones(2, 3))
    read = graph.read(out.sum())
    located = {graph.op(node): module_of(node) for node in read.nodes}
    assert located["ReluBackward0"] == "body.1"
    assert located["TanhBackward0"] == ""
    assert located["SumBackward0"] is None  # made after the block
    assert located["AccumulateGrad"] is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    exact = graph.locate_nodes(read, graph.find_names(net), module_of)
    assert str(exact[out.grad_fn]) == "in head"
    tanh = next(node for node in read.nodes if graph.op(node) == "TanhBackward0")
    assert str(exact[tanh]) == "in the model itself"


def test_record_survives_a_forward_that_raises():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    net = nn.Sequential(nn.Linear(3, 3), Fails())
    with graph.record_modules(net) as module_of:
        with contextlib.suppress(ValueError):
            net(torch.ones(1, 3))
        after = torch.ones(1, requires_grad=True).exp()
    assert module_of(after.grad_fn) is None


def test_threads_that_disagree_about_a_number_give_none():
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    outs = []

    def in_a_thread_of_its_own(module):
        thread = threading.Thread(target=lambda: outs.append(module(torch.ones(2, 3, requires_grad=True))))
        thread.start()
        thread.join()

    with graph.record_modules(net) as module_of:
        in_a_thread_of_its_own(net[0])
        in_a_thread_of_its_own(net[1])
    first, second = outs
    assert graph.sequence_nr(first.grad_fn) < graph.sequence_nr(second.grad_fn)
    assert module_of(first.grad_fn) is None
    assert module_of(second.grad_fn) == "1.1"
