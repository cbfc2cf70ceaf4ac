"""A monitored run waits for the device once per flush, and its record is that of the CPU."""

import json

import pytest
import torch
from calls import mlp
from simulated import DEVICE

import gradrein


def run(device, path, clip=None, flush_every=50, options=None):
    torch.manual_seed(0)
    model, x, y = mlp().to(device), torch.randn(8, 8).to(device), torch.randn(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    def step():
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if clip is not None:
            clip(model)
        optimizer.step()

    return gradrein.Monitor(model, optimizer, record=path, flush_every=flush_every, **(options or {})), step


CLIPS = {
    "none": None,
    "torch": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "drop-in": lambda model: gradrein.clip_grad_norm_(model.parameters(), 0.1),
    "skip": lambda model: gradrein.clip_(model, gradrein.by_norm(0.1), nonfinite="skip"),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_one_read_per_flush(clip, tmp_path, counted, no_host_reads):
    received = []
    options = {"on_step": received.append, "norms": "*.weight"}
    monitor, step = run(DEVICE, tmp_path / "run.jsonl", CLIPS[clip], flush_every=4, options=options)
    with monitor:
        with no_host_reads():
            for _ in range(3):
                step()
        with counted() as counts:
            step()
        assert counts.reads.total() == 1, counts.reads
        assert [step["step"] for step in received] == [0, 1, 2, 3]


@pytest.mark.parametrize("clip", [0.1, "auto", "zscore"])
def test_a_clip_of_the_monitor_does_not_wait(clip, tmp_path, no_host_reads):
    monitor, step = run(DEVICE, tmp_path / "run.jsonl", options={"clip": clip})
    with monitor:
        step()  # a policy moves its state to the device
        with no_host_reads():
            for _ in range(5):
                step()


@pytest.mark.parametrize("clip", CLIPS)
def test_the_record_is_that_of_the_cpu(clip, tmp_path):
    records = []
    for device in (DEVICE, torch.device("cpu")):
        monitor, step = run(device, tmp_path / f"{device.type}.jsonl", CLIPS[clip], flush_every=3)
        with monitor:
            for _ in range(7):
                step()
        lines = [json.loads(line) for line in (tmp_path / f"{device.type}.jsonl").read_text().splitlines()]
        records.append([line for line in lines if "step" in line])
    assert [line.keys() for line in records[0]] == [line.keys() for line in records[1]]
    for here, there in zip(*records, strict=True):
        for key in here.keys() - {"time"}:
            assert here[key] == pytest.approx(there[key], rel=1e-3, abs=1e-5), key


def test_values_that_are_not_finite_are_named(tmp_path):
    monitor, step = run(DEVICE, tmp_path / "run.jsonl")
    with monitor:
        step()
        next(iter(monitor._recorder._watched.values())).optimizer.param_groups[0]["params"][0].data.fill_(float("inf"))
        step()
    (finding,) = [f for f in monitor.findings() if f.name == "nonfinite"]
    assert "not counted" in str(finding.evidence)


def test_an_error_of_on_step_at_the_end_leaves_nothing_attached(tmp_path):
    def fail(_):
        raise KeyError("mine")

    monitor, step = run(DEVICE, tmp_path / "run.jsonl", options={"on_step": fail, "clip": 1.0})
    with pytest.raises(KeyError, match="mine"), monitor:
        step()
    step()  # neither clipped nor recorded
    assert monitor.steps == 1
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert sum("step_grad_cosine" in line or '"n_steps"' in line for line in lines) == 1
