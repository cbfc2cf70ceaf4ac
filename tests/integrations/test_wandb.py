import json
import struct
import warnings

import pytest
import torch

import gradrein

wandb = pytest.importorskip("wandb", reason="pip install 'gradrein[wandb]'")
pytestmark = pytest.mark.filterwarnings("ignore")


def train(on_step, steps=3):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradrein.Monitor(net, optimizer, on_step=on_step) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return monitor


def records(data, block=32768):
    """Yield the records of a log file: blocks of entries with a checksum, a length and a kind (1 whole, 2 to 4 parts)."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def logged(folder):
    """Return the rows of the history in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records(next((folder / "wandb").glob("offline-run-*/run-*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(x_disable_stats=True))


def test_numbers_reach_an_offline_run(run, tmp_path):
    from gradrein.integrations.wandb import scalars

    monitor = train(scalars(run))
    run.finish()
    rows = [row for row in logged(tmp_path) if "gradrein/norm" in row]
    assert [row["gradrein/step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["gradrein/norm"] == pytest.approx(monitor.latest["norm"], rel=1e-6)
    assert {"gradrein/loss", "gradrein/update", "gradrein/lr"} <= set(rows[-1])


def test_without_commit_the_scripts_own_rows_are_all_kept(run, tmp_path):
    from gradrein.integrations.wandb import scalars

    log = scalars(run, commit=False)
    for step in range(3):
        log({"step": step, "norm": 10.0 + step})
        run.log({"mine": step}, step=step)
    run.finish()
    rows = logged(tmp_path)
    assert [row["mine"] for row in rows if "mine" in row] == [0, 1, 2]
    ours = [row for row in rows if "gradrein/norm" in row]
    assert all(row["gradrein/norm"] == 10.0 + row["gradrein/step"] for row in ours)
    assert ours[-1]["gradrein/step"] == 2
