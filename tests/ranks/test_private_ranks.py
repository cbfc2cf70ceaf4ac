"""Private training on several ranks is that of one process: one batch, one noise, one epsilon."""

import private_cases
import pytest
import torch

pytest.importorskip("dp_accounting", reason="pip install 'gradrein[private]'")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("options", private_cases.OPTIONS)
def test_the_same_as_one_process(ranks, wrapped, options):
    ranks.run(private_cases.same_as_one_process, wrapped, options, private_cases.alone(options))


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
def test_noise_is_added_once(ranks, wrapped, secure):
    """20,000 numbers: the standard deviation is right to 2.5%, at five standard errors of the estimate."""
    first, *others = ranks.run(private_cases.noise_of, wrapped, secure)
    assert float(first.std()) == pytest.approx(2.0 * 3.0 / 6, rel=0.025)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", [private_cases.refusals, private_cases.goes_on], ids=lambda case: case.__name__)
def test_states_and_refusals(two, wrapped, case):
    two.run(case, wrapped)
