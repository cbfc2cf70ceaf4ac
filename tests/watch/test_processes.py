"""The tests' own child processes cannot hang."""

import signal
import subprocess
import sys

import pytest

from .processes import killed_after, run_process, start

SLEEPS = "import time; print('ready', flush=True); time.sleep(1000)"


def test_a_process_that_hangs_is_killed_and_named():
    with pytest.raises(pytest.fail.Exception, match=r"after 0\.5 s .*time\.sleep\(1000\)"):
        run_process([sys.executable, "-c", SLEEPS], limit=0.5)


def test_a_process_can_be_interrupted_where_the_tests_run_in_the_background():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        child = start([sys.executable, "-c", SLEEPS], stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    with killed_after(60, child):
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.wait() == -signal.SIGINT
