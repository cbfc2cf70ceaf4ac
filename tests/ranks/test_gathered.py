"""Answers about the samples of all ranks: products, audits; and what a pipeline schedule is told."""

import gathered_cases
import pytest


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "hsdp"])
def test_the_same_as_one_process(four, wrapped):
    four.run(gathered_cases.one_answer, wrapped, "uneven")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_a_rank_without_samples(two, wrapped):
    two.run(gathered_cases.one_answer, wrapped, "empty")


@pytest.mark.parametrize(
    "case",
    [gathered_cases.disagreements, gathered_cases.used_somewhere, gathered_cases.pipeline_of_one],
    ids=lambda case: case.__name__,
)
def test_case(two, case):
    two.run(case)


def test_the_last_stage_of_a_pipeline(ranks):
    ranks.run(gathered_cases.pipeline)
