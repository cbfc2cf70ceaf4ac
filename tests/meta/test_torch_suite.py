"""The tool that runs torch's own tests, on tests of our own that end in every way a test can."""

import os
import pathlib
import re
import sys

from watch.processes import run_process

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "torch_suite"

TESTS = """
import os, unittest, torch, gradrein

ours = torch.autograd.grad is gradrein.grad


class TestEndings(unittest.TestCase):
    def test_the_same(self):
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
        self.assertTrue(torch.equal(x.grad, 2 * torch.ones(2)))

    def test_differs(self):
        self.assertFalse(ours, "seen")

    def test_fails_with_torch(self):
        self.fail()

    def test_is_skipped(self):
        self.skipTest("for a reason")

    def test_ends_the_process_with_torch(self):
        if not ours:
            os._exit(7)

    def test_ends_the_process_with_gradrein(self):
        if ours:
            os._exit(7)

    def test_is_in_place_everywhere(self):
        from torch.nn.utils import _per_sample_grad, clip_grad
        pairs = [
            (torch.autograd.backward, gradrein.backward),
            (clip_grad.clip_grad_norm_, gradrein.clip_grad_norm_),
            (clip_grad.clip_grad_value_, gradrein.clip_grad_value_),
            (torch.nn.utils.get_total_norm, gradrein.get_total_norm),
            (torch.nn.utils.clip_grads_with_norm_, gradrein.clip_grads_with_norm_),
            (_per_sample_grad.call_for_per_sample_grads, gradrein.call_for_per_sample_grads),
        ]
        for theirs, mine in pairs:
            self.assertEqual(theirs is mine, ours)
"""


def test_a_folder_of_tests_that_end_in_every_way(tmp_path):
    folder = tmp_path / "source" / "test" / "nn"
    folder.mkdir(parents=True)
    (folder / "test_module_hooks.py").write_text(TESTS)
    command = [sys.executable, str(TOOL), str(tmp_path / "source"), "--out", str(tmp_path / "out")]
    path = os.pathsep.join(filter(None, sys.path))
    told = run_process(command, env={"PYTHONPATH": path})
    assert told.stderr == ""
    assert "| nn/test_module_hooks.py | 7 | 4 | 2 | 2 |" in told.stdout
    assert re.search(r"::test_differs\n  AssertionError: True is not false : seen", told.stdout)
    assert re.search(r"::test_ends_the_process_with_gradrein\n  the process ended with 7", told.stdout)
    assert told.returncode == 1
