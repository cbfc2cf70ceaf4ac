"""What a call sends does not grow with ranks: counted in a process that is one of up to 16,384."""

import counting
import pytest
import rank_processes

DIMENSIONS = {"FSDP2": 1, "FSDP2 x TP": 2, "HSDP x TP": 3}
MESSAGE = 8192


@pytest.fixture(scope="module")
def counted():
    """Counts by world size and layout, for few and many parameters, made in a process of its own."""
    return rank_processes.alone(counts)


FEW = ["torch.nn.utils.clip_grad_norm_", "torchtitan style", "clip_grad_norm_", "clip_, by_norm"]
CASES = [(1024, 6, FEW), (16384, 6, None), (16384, 300, FEW)]  # ranks, parameters, calls


def counts():
    return {
        (world, layout, count): counting.in_fake_world(world, counting.count_calls, layout, count, calls)
        for world, count, calls in CASES
        for layout in counting.LAYOUTS
    }


def counts_per_sample():
    return {world: counting.in_fake_world(world, counting.count_per_sample, 64) for world in (8, 64)}


@pytest.mark.parametrize("layout", counting.LAYOUTS)
def test_one_message_for_each_dimension_of_the_mesh(counted, layout):
    for world, count, _ in CASES:
        for call, (names, size) in counted[world, layout, count].items():
            if call.startswith("torch"):
                assert set(names) == {"all_reduce"}
            else:
                assert names == ["all_reduce"] * DIMENSIONS[layout], (call, names)
                assert size == MESSAGE * DIMENSIONS[layout]


def test_per_sample_gradients_are_gathered_compared_and_added_up():
    for found in rank_processes.alone(counts_per_sample).values():
        assert [name for name, _ in found] == ["all_gather", "all_reduce", "all_reduce"]
        gathered, agreed, added_up = (size for _, size in found)
        assert agreed == MESSAGE
        assert added_up == gathered  # each parameter once, as gathering the model takes
