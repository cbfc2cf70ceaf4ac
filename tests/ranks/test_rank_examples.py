"""Programs and pages about ranks run as they are written."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run_blocks(blocks):
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["report"].norm == 13.0


@pytest.mark.needs("fully_shard on the CPU")
def test_every_block_of_the_page(two):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    assert "destroy_process_group" in blocks[-1]
    two.run(run_blocks, blocks[:-1])


@pytest.mark.parametrize(("name", "says"), [("fsdp2_gpt.py", "step 4: norm"), ("pipeline.py", "stage 1: norm of both")])
def test_example(name, says):
    done = subprocess.run([sys.executable, ROOT / "examples" / name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
