"""Private training by gradrein and by Opacus, whole epochs in turns: time, peak memory, noise, accuracy.

    pip install --no-deps opacus opt_einsum
    python benchmarks/private.py              # times and memory
    python benchmarks/private.py --accuracy   # ten seeds of one task

Each contender has a process of its own: hooks that one sets are not the other's to look for. Their epochs alternate.

Writes benchmarks/results/private.json and private-accuracy.json.
"""

import argparse
import json
import multiprocessing
import statistics
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradrein import private
from persample_models import Gpt

RESULTS = Path(__file__).parent / "results"
EPSILON, DELTA, CLIP = 8.0, 1e-5, 1.0
WARM_UP = 2  # epochs: every batch size that is new costs a proof, once
OPACUS = {"Opacus hooks": "hooks", "Opacus functorch": "functorch", "Opacus ghost": "ghost"}


class Words(nn.Module):
    """A classifier of sequences on a small GPT, so that all contenders have one loss for each sample."""

    def __init__(self):
        super().__init__()
        self.gpt = Gpt(width=128, depth=2, words=256, steps=32)
        self.head = nn.Linear(256, 4)

    def forward(self, ids):
        return self.head(self.gpt(ids).mean(1))


class Adapted(nn.Module):
    """LoRA on a small GPT-2 of Transformers, the rest frozen."""

    def __init__(self):
        super().__init__()
        import peft
        import transformers

        config = transformers.GPT2Config(
            vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0, n_embd=128, n_layer=2, n_head=4
        )
        lora = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        self.body = peft.get_peft_model(transformers.GPT2Model(config), lora)
        self.head = nn.Linear(128, 4)

    def forward(self, ids):
        return self.head(self.body(input_ids=ids).last_hidden_state.mean(1))


def images(count, *shape):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, *shape, generator=generator), torch.randint(4, (count,), generator=generator)
    )


def sequences(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (count, 32), generator=generator)
    return TensorDataset(ids, torch.randint(4, (count,), generator=generator))


def mlp():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))


def cnn():
    convs = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 4))


TASKS = {
    "MLP": (mlp, lambda: images(1024, 256), 256),
    "CNN": (cnn, lambda: images(512, 3, 16, 16), 64),
    "GPT": (Words, lambda: sequences(256), 32),
    "LoRA": (Adapted, lambda: sequences(256), 32),
}


class Ours:
    def __init__(self, model, dataset, batch_size, noise, lr=0.1):
        self.model, self.counted = model, model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
        loader = DataLoader(dataset, batch_size=batch_size)
        self.run = private.Private(model, optimizer, loader, max_norm=CLIP, noise_multiplier=noise, delta=DELTA)

    def epoch(self):
        for x, y in self.run.loader:
            self.run.step(F.cross_entropy(self.model(x), y, reduction="none"))


class Opacus:
    def __init__(self, model, dataset, batch_size, noise, lr=0.1, mode="hooks"):
        from opacus import PrivacyEngine

        self.engine, self.model, self.counted = PrivacyEngine(accountant="rdp"), model, model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
        made = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(dataset, batch_size=batch_size),
            noise_multiplier=noise,
            max_grad_norm=CLIP,
            grad_sample_mode=mode,
            criterion=nn.CrossEntropyLoss(),
        )
        if mode == "ghost":
            self.wrapped, self.optimizer, self.criterion, self.loader = made
        else:
            (self.wrapped, self.optimizer, self.loader), self.criterion = made, nn.CrossEntropyLoss()

    def epoch(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.criterion(self.wrapped(x), y).backward()
            self.optimizer.step()


def contender(name, task, noise=1.0):
    build, data, batch_size = TASKS[task]
    torch.manual_seed(0)
    model = Counted(build()).train()
    if name == "gradrein":
        return Ours(model, data(), batch_size, noise)
    return Opacus(model, data(), batch_size, noise, mode=OPACUS[name])


class Counted(nn.Module):
    """Counts the samples that a model has seen: Poisson sampled epochs differ."""

    def __init__(self, model):
        super().__init__()
        self.model, self.samples = model, 0

    def forward(self, x):
        self.samples += len(x)
        return self.model(x)


def resident():
    """Megabytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def peak(epoch):
    """Megabytes that an epoch adds, looked at every millisecond."""
    before, seen, done = resident(), [0.0], threading.Event()

    def look():
        while not done.wait(0.001):
            seen.append(resident())

    thread = threading.Thread(target=look)
    thread.start()
    epoch()
    done.set()
    thread.join()
    return round(max(seen) - before, 1)


def serve(name, task, pipe):
    """Build a contender and run its epochs when told to: milliseconds for each sample, then megabytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        one = contender(name, task)
        memory = peak(one.epoch)
    except Exception as error:  # what a contender cannot do is part of the table
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:160])
        return
    for _ in range(WARM_UP):
        one.epoch()
    pipe.send(memory)
    while pipe.recv():
        before, start = one.counted.samples, time.process_time()
        one.epoch()
        pipe.send((time.process_time() - start) * 1e3 / (one.counted.samples - before))


def times(rounds):
    rows, context = [], multiprocessing.get_context("spawn")
    for task in TASKS:
        memory, pipes = {}, {}
        for name in ("gradrein", *OPACUS):  # one at a time: nobody is built while another warms up
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(name, task, theirs), daemon=True).start()
            theirs.close()
            answer = ours.recv()
            if isinstance(answer, str):
                rows.append({"task": task, "contender": name, "refused": answer})
                print(rows[-1], flush=True)
            else:
                memory[name], pipes[name] = answer, ours
        measured = {name: [] for name in pipes}
        for turn in range(rounds):
            names = list(pipes)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                pipes[name].send(True)
                measured[name].append(pipes[name].recv())
        for name, values in measured.items():
            pipes[name].send(False)
            ratios = [a / b for a, b in zip(values, measured["gradrein"], strict=True)]
            rows.append({"task": task, "contender": name, "ms_per_sample": round(statistics.median(values), 3)})
            rows[-1] |= {"times_ours": [round(q, 2) for q in statistics.quantiles(ratios, n=4)]}
            rows[-1] |= {"epoch_adds_mb": memory[name]}
            print(rows[-1], flush=True)
    return rows


def accuracy(seeds=10):
    """The digits of scikit-learn: epsilon, noise multiplier and accuracy at the same settings."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    dataset, batch_size, epochs = TensorDataset(x[:1400], y[:1400]), 100, 10
    settings = {"sample_rate": batch_size / 1400, "steps": epochs * 14, "delta": DELTA, "accountant": "rdp"}
    noise = private.noise_multiplier(epsilon=EPSILON, **settings)
    rows = []
    for seed in range(seeds):
        for name in ("gradrein", "Opacus hooks"):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
            one = (Ours if name == "gradrein" else Opacus)(model, dataset, batch_size, noise, lr=1.0)
            for _ in range(epochs):
                one.epoch()
            right = float((model(x[1400:]).argmax(1) == y[1400:]).double().mean())
            spent = private.epsilon(noise_multiplier=noise, **settings)
            spent = spent if name == "gradrein" else float(one.engine.get_epsilon(DELTA))
            rows.append({"seed": seed, "contender": name, "accuracy": round(right, 4), "epsilon": round(spent, 4)})
    for name in ("gradrein", "Opacus hooks"):
        found = [row["accuracy"] for row in rows if row["contender"] == name]
        print(name, "accuracy", statistics.mean(found), "+-", statistics.stdev(found), "noise", noise)
    return {"noise_multiplier": noise, "rows": rows}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name = "private-accuracy" if arguments.accuracy else "private"
    found = accuracy() if arguments.accuracy else {"rows": times(arguments.rounds)}
    stored = {"torch": torch.__version__, "opacus": __import__("opacus").__version__, **found}
    (RESULTS / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
