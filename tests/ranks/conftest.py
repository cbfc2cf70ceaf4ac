from pathlib import Path

import pytest
import rank_processes

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def two():
    group = rank_processes.RankProcesses(2)
    yield group
    group.close()


@pytest.fixture(scope="session")
def four():
    group = rank_processes.RankProcesses(4)
    yield group
    group.close()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    return request.getfixturevalue("two" if request.param == 2 else "four")


@pytest.fixture
def three():
    """Three processes with a short timeout, for tests after which nobody can be relied on."""
    group = rank_processes.RankProcesses(3, timeout=3.0)
    yield group
    group.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and any(word in item.nodeid for word in ("fsdp", "hsdp", "fully_shard")):
            item.add_marker(pytest.mark.needs("fully_shard on the CPU"))
