"""`gradrein watch` runs a script as it would run alone."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from gradrein.watch import read_run
from gradrein_cli import main

from .forked import run_forked
from .processes import LIMIT, killed_after, run_process, start

FACTS = """
import sys, pickle, atexit, os
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((2,), float(i))

class Payload:
    pass

if __name__ == "__main__":
    import helper_beside_the_script
    print(sys.argv[1:], os.path.basename(sys.argv[0]), __name__, __file__ == sys.argv[0], __doc__, __spec__)
    print(os.path.basename(sys.path[0]), helper_beside_the_script.HERE, sorted(k for k in globals() if k[:2] == "__"))
    print(type(pickle.loads(pickle.dumps(Payload()))) is Payload, sys.modules["__main__"].Payload is Payload)
    print("read:", input())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1]):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    atexit.register(print, "at exit")
    print("to stderr", file=sys.stderr)
    sys.exit(7)
"""

FAILS = """
import torch

def inner(x):
    return x.backward()

try:
    raise KeyError("first")
except KeyError:
    inner(torch.ones(1))
"""

NAN = """import sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.bad = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1), False
    def forward(self, x):
        x = self.body(x) - 100
        return (torch.log(x) if self.bad else x).sum(), self.head(x)

net = Net()
o = torch.optim.SGD(net.parameters(), lr=1e-9)
for step in range(3):
    net.bad = step == int(sys.argv[1])
    a, b = net(torch.ones(4, 3))
    o.zero_grad()
    (a + b).pow(2).mean().backward()
    o.step()
"""

TRAINS = """
import sys, time
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100000):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
    if step == 30:
        print("ready", flush=True)
    if step > 30:
        time.sleep(0.01)
"""


def run(folder, *args, text=None):
    return run_process([sys.executable, *args], text, cwd=folder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "facts.py").write_text(FACTS)
    (tmp_path / "work" / "fails.py").write_text(FAILS)
    (tmp_path / "work" / "trains.py").write_text(TRAINS)
    (tmp_path / "work" / "helper_beside_the_script.py").write_text("HERE = 'found'\n")
    return tmp_path


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_script_runs_as_it_would_alone(folder, context):
    plain = run(folder, "work/facts.py", context, "--flag", text="a line\n")
    watched = run(folder, "-m", "gradrein", "watch", "work/facts.py", context, "--flag", text="a line\n")
    assert plain.returncode == 7, plain.stderr
    assert watched.returncode == 7
    assert watched.stdout == plain.stdout
    assert "read: a line" in plain.stdout
    assert watched.stderr.startswith("to stderr\n")
    record = read_run(folder / "facts.gradrein.jsonl")  # beside where it was run, not beside the script
    assert len(record.steps) == 4  # the workers wrote nothing
    assert "No findings" in watched.stderr


def test_a_traceback_is_the_scripts_own(folder):
    plain = run(folder, "work/fails.py")
    watched = run(folder, "-m", "gradrein", "watch", "work/fails.py")
    assert watched.returncode == plain.returncode == 1
    shown = watched.stderr.split("gradrein: no optimizer step was seen")[0]
    assert shown == plain.stderr


def test_a_module_runs_as_with_python_m(folder):
    watched = run(folder / "work", "-m", "gradrein", "watch", "-m", "facts", "fork", text="x\n")
    plain = run(folder / "work", "-m", "facts", "fork", text="x\n")
    assert watched.returncode == plain.returncode == 7
    assert "read: x" in watched.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_as_it_would_and_the_record_is_whole(folder, number):
    args = [sys.executable, "-m", "gradrein", "watch", "--record", "run.jsonl", "work/trains.py"]
    child = start(args, cwd=folder)
    with killed_after(LIMIT, child):
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        _, err = child.communicate()
    assert child.returncode == -number, err
    assert len(read_run(folder / "run.jsonl").steps) >= 30
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err
        assert "run_script.py" not in err


def test_nan_is_traced_to_its_operation(folder):
    (folder / "nan.py").write_text(NAN)
    watched = run_forked(folder, "-m", "gradrein", "watch", "--verbose", "nan.py", "1")
    assert watched.returncode == 0
    assert "gradients were not finite: first at step 1, in " in watched.stderr
    origin = "LogBackward0 after Net.body (nan.py, line 9: return (torch.log(x) if self.bad else x)"
    for bad, run in (("1", "nan-2"), ("0", "nan-3")):
        watched = run_forked(folder, "-m", "gradrein", "watch", "--anomaly", "nan.py", bad)
        assert watched.returncode == 1
        (found,) = (n["anomaly"] for n in read_run(folder / f"{run}.gradrein.jsonl").notes if "anomaly" in n)
        assert origin in found
        assert origin in " ".join(watched.stderr.rpartition("Error: ")[2].split())
        assert "other means" not in watched.stderr
    assert "The script failed before its first step ended: NonFiniteGradientError: " in watched.stderr


def test_a_script_may_go_to_another_folder(folder):
    script = "import os, torch\nw = torch.nn.Parameter(torch.zeros(1))\no = torch.optim.SGD([w], lr=1)\n"
    script += "os.chdir('work')\n(w * 50).sum().backward()\no.step()\n"
    (folder / "moves.py").write_text(script)
    watched = run_forked(folder, "-m", "gradrein", "watch", "moves.py")
    assert "SGD, 1 steps recorded" in watched.stderr
    assert len(read_run(folder / "moves.gradrein.jsonl").steps) == 1


def test_clipping_from_outside(folder):
    script = "import torch\nw = torch.nn.Parameter(torch.zeros(1))\no = torch.optim.SGD([w], lr=1)\n"
    script += "(w * 50).sum().backward()\no.step()\nprint(w.item())\n"
    (folder / "one.py").write_text(script)
    watched = run_forked(folder, "-m", "gradrein", "watch", "--clip", "0.5", "one.py")
    assert watched.stdout == "-0.5\n"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["watch", "none.py"], "can't open file"),
        (["watch", "-m", "none_of_them.module"], "there is no module named 'none_of_them'"),
        (["watch", "--record", "folder", "x.py"], "is a folder"),
        (["watch", "folder"], "it is a folder without a __main__.py"),
        (["watch", "--clip", "sometimes", "x.py"], "no policy is called"),
        (["report", "none.jsonl"], "cannot be read"),
    ],
)
def test_a_mistake_is_said_and_is_2(args, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    Path("folder").mkdir()
    monkeypatch.setattr(sys, "argv", ["gradrein"])
    monkeypatch.setattr("atexit.register", lambda *_: None)
    assert main(args) == 2
    assert why in capsys.readouterr().err
    assert not list(Path().glob("*.jsonl"))


def test_report_in_text_json_and_html(tmp_path, capsys):
    from .test_record import step, write

    path = tmp_path / "run.jsonl"
    write(path, [step(t) for t in range(40)]).close()
    assert main(["report", str(path)]) == 0
    assert "No findings" in capsys.readouterr().out
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert main(["report", str(path), str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    from .test_record import step, write

    path = tmp_path / "run.jsonl"
    write(path, [step(t) for t in range(40)]).close()
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does, here before the first line
    try:
        ended = run_process([sys.executable, "-m", "gradrein", "report", str(path)], stdout=writer)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "run.html").exists()
