"""Per-sample gradients of tensor-parallel models: what one process gives, or refused by name."""

import failing_alone
import pytest
import tensor_parallel_cases as cases
import tensor_parallel_faults as faults


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        *((plan, "") for plan in cases.PLANS),
        *(("by words", "tied"), ("sequence", "tied"), ("sequence", "rms"), ("sequence", "checkpoint")),
    ],
)
def test_the_same_as_one_process(two, plan, options):
    two.run(cases.same_as_one_process, plan, options)


def test_the_same_as_one_process_over_four(four):
    four.run(cases.same_as_one_process, "sequence")


@pytest.mark.parametrize(("plan", "data"), [("by words", "group"), ("megatron", "mesh"), ("sequence", "fsdp")])
def test_samples_over_the_other_dimension(four, plan, data):
    four.run(cases.two_dimensions, plan, data)


@pytest.mark.parametrize("data", ["fsdp", "mesh"])
def test_ranks_without_samples(four, data):
    four.run(cases.two_dimensions, "by words", data, (0, 3))


@pytest.mark.parametrize("plan", ["by columns", "sequence"])
@pytest.mark.parametrize("case", [cases.every_answer, cases.part_of_a_model, cases.noise], ids=lambda c: c.__name__)
def test_every_answer(two, case, plan):
    two.run(case, plan)


def test_noise_over_two_dimensions(four):
    four.run(cases.noise, "by words", "fsdp")


@pytest.mark.parametrize(
    "case",
    [cases.half, cases.not_finite, cases.refusals, cases.local_use, cases.collectives, cases.hooks_elsewhere],
    ids=lambda case: case.__name__,
)
def test_case(two, case):
    two.run(case)


def test_shards_of_different_sizes(ranks):
    ranks.run(cases.uneven)


@pytest.mark.parametrize(
    "case",
    [
        faults.different_copies,
        faults.different_inside_a_checkpoint,
        faults.losses_apart,
        faults.differ_by_rounding,
        faults.memory_nobody_wrote,
        faults.changed_in_place,
        faults.crossings,
        faults.summed_over_ranks,
        faults.not_differentiable,
        faults.plain_collectives,
        faults.one_rank_alone,
        faults.other_samples_beside_huge_ones,
        faults.other_parameters,
    ],
    ids=lambda case: case.__name__,
)
def test_fault(two, case):
    two.run(case)


@pytest.mark.parametrize("case", [faults.two_dimensional_mesh, faults.data_parallel_wrapper], ids=lambda c: c.__name__)
def test_fault_over_two_dimensions(four, case):
    four.run(case)


@pytest.mark.parametrize(
    "case",
    [
        failing_alone.arguments,
        failing_alone.later_questions,
        failing_alone.changed_later,
        failing_alone.data_parallel,
        failing_alone.clipping,
    ],
    ids=lambda case: case.__name__,
)
def test_an_error_of_one_rank_stops_all(two, case):
    two.run(case)


@pytest.mark.parametrize("way", ["group", "fsdp"])
def test_an_error_of_one_rank_stops_all_rows(four, way):
    four.run(failing_alone.two_dimensions, way)
