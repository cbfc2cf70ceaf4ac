"""The live line: drawn on a terminal, cleared before the script writes, absent elsewhere."""

import io
import os
import pty
import re
import sys
from contextlib import suppress

import pytest

from gradrein.watch.command import live_line

from .processes import LIMIT, killed_after, start

pytest.importorskip("rich", reason="pip install 'gradrein[watch]'")
LATEST = {"step": 12.0, "loss": 0.5, "norm": 2.0, "lr": 0.1}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain(stream):
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", stream.getvalue())


@pytest.fixture
def streams(monkeypatch):
    """Take both streams; called in the test, for pytest changes them between fixture and test."""

    def take():
        out, err = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setattr(live_line, "_PERIOD", 0.0)
        monkeypatch.setenv("TERM", "xterm")
        return out, err

    return take


def test_it_is_drawn_cleared_and_removed(streams):
    out, err = streams()
    line = live_line.LiveLine()
    line.draw(LATEST)
    assert "step 12" in plain(err)
    print("from the script")
    assert out.getvalue() == "from the script\n"
    assert err.getvalue().endswith("\r\x1b[2K")  # cleared before that was written
    line.close()
    assert (sys.stdout, sys.stderr) == (out, err)


def test_a_line_the_script_has_not_ended_is_left_alone(streams):
    _, err = streams()
    line = live_line.LiveLine()
    print("Continue? ", end="")
    before = err.getvalue()
    line.draw(LATEST)
    assert err.getvalue() == before
    print()
    line.draw(LATEST)
    assert "step 12" in plain(err)
    line.close()


def test_streams_are_the_scripts_in_all_else(streams):
    out, _ = streams()
    line = live_line.LiveLine()
    assert sys.stdout.isatty()
    sys.stdout.writelines(["a\n", "b\n"])
    sys.stdout.flush()
    assert out.getvalue() == "a\nb\n"
    line.close()


def test_it_is_quiet_without_a_terminal_or_rich(streams, monkeypatch):
    streams()
    assert live_line.is_available()
    monkeypatch.setenv("TERM", "dumb")
    assert not live_line.is_available()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not live_line.is_available()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not live_line.is_available()


def test_on_a_real_terminal_the_scripts_output_is_whole(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, time\nw = torch.nn.Parameter(torch.ones(2))\no = torch.optim.SGD([w], lr=0.1)\n"
        "for i in range(8):\n    o.zero_grad(); w.square().sum().backward(); o.step(); time.sleep(0.1)\n"
        "    print('epoch', i)\n"
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gradrein", "watch", "--record", tmp_path / "run.jsonl", script]
    terminal = {"stdin": slave, "stdout": slave, "stderr": slave}
    child = start(command, env={"TERM": os.environ.get("TERM", "xterm")}, **terminal)
    os.close(slave)
    shown = bytearray()
    with killed_after(LIMIT, child):
        with suppress(OSError):  # which is how reading a terminal ends
            while data := os.read(master, 4096):
                shown.extend(data)
        assert child.wait() == 0
    os.close(master)
    text = shown.decode()
    assert all(f"epoch {i}\r\n" in text for i in range(8))
    assert "\x1b[2K" in text
    assert "gradrein" in text.split("epoch 7")[0]
