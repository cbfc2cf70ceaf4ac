"""Ways of training: the table of docs/scale.md."""

import pathlib
import subprocess
import sys

import elastic_worker
import modes
import pytest

WORKER = pathlib.Path(__file__).parent / "elastic_worker.py"


@pytest.mark.parametrize("case", modes.CASES, ids=lambda case: case.__name__)
def test_as_in_one_process(two, case):
    two.run(case)


@pytest.mark.needs("fully_shard on the CPU")
def test_an_elastic_restart_goes_on_bit_for_bit(two, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*torchrun, WORKER, tmp_path, "4"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    _, resumed_after, *restarted = line.split()
    assert resumed_after == "3"
    (_, straight), _ = two.run(elastic_worker.train, str(tmp_path / "straight"))
    assert restarted == straight
