"""A private run that is killed 20 times, at random, and goes on from its checkpoints: the bits of an unbroken run.

    python benchmarks/private_kills.py [SEED]

Each life is a process of its own, which this one ends by SIGKILL after a random time: in the middle of a forward pass,
of a step, or of writing a checkpoint. Writes benchmarks/results/private-kills.json.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradrein import private

OUT = Path(__file__).parent / "results" / "private-kills.json"
STEPS, KILLS = 600, 20


def begin(path):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(300, 10), torch.randint(3, (300,)))
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"max_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 0, "max_physical_batch": 10}
    quantile = private.Quantile(noise=3.0)
    run = private.Private(model, optimizer, DataLoader(data, batch_size=25), quantile=quantile, **options)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for thing, state in zip((model, optimizer, run), saved["states"], strict=True):
            thing.load_state_dict(state)
        torch.set_rng_state(saved["torch"])
    return run


def save(run, path):
    states = [thing.state_dict() for thing in (run.model, run.optimizer, run)]
    torch.save({"states": states, "torch": torch.get_rng_state()}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def live(path, every):
    """Train to the end, saving every so many steps; say so when training begins, and what it ends with."""
    run = begin(path)
    print("begins at step", run.steps, flush=True)
    while run.steps < STEPS:
        for x, y in run.loader:
            if run.step(F.cross_entropy(run.model(x), y, reduction="none")) and run.steps % every == 0:
                save(run, path)
            if run.steps == STEPS:
                break
    bits = b"".join(p.detach().numpy().tobytes() for p in run.model.parameters())
    print(json.dumps({"steps": run.steps, "epsilon": run.epsilon(), "parameters": hashlib.sha256(bits).hexdigest()}))


def process(path, every):
    command = [sys.executable, __file__, "--live", str(path), str(every)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ends_with(path, every):
    return json.loads(process(path, every).communicate()[0].splitlines()[-1])


def main(seed):
    draws, kills = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        while len(kills) < KILLS:
            life = process(path, draws.randint(1, 4))
            begun = int(life.stdout.readline().split()[-1])
            time.sleep(draws.uniform(0.0, 0.25))
            if life.poll() is not None:
                raise SystemExit("a life came to its end before it was killed: take more steps")
            life.send_signal(signal.SIGKILL)
            life.communicate()
            assert life.returncode == -signal.SIGKILL
            kills.append(begun)
            print("killed; had begun at step", begun, flush=True)
        broken = ends_with(path, 10)
        whole = ends_with(Path(folder) / "other.pt", STEPS)
    print(broken, whole)
    assert broken == whole
    stored = {"torch": torch.__version__, "kills": len(kills), "begun_at_step": kills, "broken": broken, "whole": whole}
    OUT.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        live(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
