"""Two threads on the same gradients scale them once."""

import os
import threading

import helpers
import pytest
import torch

import gradrein


class Slow:
    """`by_norm`, with another thread let in between measuring and scaling."""

    p = 2.0

    def __init__(self, decided):
        self.decided = decided

    def decide(self, grads):
        decision = gradrein.by_norm(1.0).decide(grads)
        self.decided.set()
        threading.Event().wait(0.05)
        return decision


def test_clip():
    ps, decided = helpers.parameters([torch.tensor([3.0, 4.0])]), threading.Event()
    first = threading.Thread(target=gradrein.clip_, args=(ps, Slow(decided)))
    first.start()
    decided.wait()
    assert gradrein.clip_(ps, gradrein.by_norm(0.5)).norm == pytest.approx(1.0)
    first.join()
    torch.testing.assert_close(ps[0].grad, torch.tensor([0.3, 0.4]))


def test_many_threads():
    ps = helpers.parameters([torch.randn(200_000) for _ in range(4)])
    expected = helpers.clipped([p.grad for p in ps], 1.0, 2.0)
    for work in [[threading.Thread(target=gradrein.clip_grad_norm_, args=(ps, 1.0)) for _ in range(4)]]:
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    torch.testing.assert_close(helpers.vector([p.grad for p in ps]), expected, rtol=2e-5, atol=0)


def test_an_error_gives_the_turn_back():
    (p,) = helpers.parameters([torch.tensor([3.0, float("nan")])])
    with pytest.raises(gradrein.errors.NonFiniteGradientError):
        gradrein.clip_([p], gradrein.by_norm(1.0))
    thread = threading.Thread(target=gradrein.clip_grad_value_, args=([p], 1.0))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_call():
    ps, decided = helpers.parameters([torch.tensor([3.0, 4.0])]), threading.Event()
    first = threading.Thread(target=gradrein.clip_, args=(ps, Slow(decided)))
    first.start()
    decided.wait()
    child = os.fork()
    if child == 0:
        gradrein.clip_(helpers.parameters([torch.tensor([3.0, 4.0])]), gradrein.by_norm(1.0))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    first.join()
