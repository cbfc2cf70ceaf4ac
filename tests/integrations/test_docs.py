"""The examples in docs/integrations.md run, each where its package is installed."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "integrations.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # these packages warn about each other
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: re.search(r"integrations\.(\w+)", b)[1])
def test_the_example_runs(block, tmp_path, monkeypatch):
    name = re.search(r"integrations\.(\w+)", block)[1]
    pytest.importorskip({"notebook": "IPython"}.get(name, name), reason=f"pip install 'gradrein[{name}]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # put back afterwards
    exec(compile(block, f"{PAGE.name}: {name}", "exec"), {"__name__": "__main__"})


def test_there_is_one_for_each():
    assert len(BLOCKS) == 7
