"""Samples that may be coupled: the same answer or the same refusal on the device as on the CPU."""

import pytest
from persample_answers import answers, simulated
from plugin import compare, on_both
from tests.persample.routings import EITHER, ROUTINGS

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("name", simulated(ROUTINGS))
def test_routing(name):
    routing = ROUTINGS[name]
    for setting, verdict in routing.verdicts.items():

        def run(setting=setting):
            model, x = routing.model(4), routing.draw(4)
            groups = None if routing.groups is None else routing.groups(4, setting)
            options = {"sample_groups": groups, "allow_opaque": routing.opaque}
            return answers(model, routing.losses(model, x, setting), **options)

        here, there = on_both(run)
        if verdict is not EITHER or not (isinstance(here, str) or isinstance(there, str)):
            compare(here, there)
