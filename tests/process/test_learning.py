"""Real racks that learn: a model that is merged is not worse than the one that a rack learns alone.

All bits of the other tests were right while the default outer momentum multiplied the learning rate
of a short period by ten: racks that merged every four steps ended `merged`, with an error thirty
times that of a rack alone. benchmarks.small_problems has many more problems.
"""

from __future__ import annotations

import pytest

from tests.process import regression
from tests.process.conftest import Jobs

STEPS = 400


@pytest.mark.slow
def test_merged_model_short_period_is_better_than_a_rack_alone(jobs: Jobs) -> None:
    job = jobs()
    for rack in range(2):  # in lockstep, so that every run has the same bits
        config = {"lockstep": True, "sync_period_steps": 4}
        job.start(rack, script="tests.process.regression", steps=STEPS, config=config)
    alone = min(regression.learn_alone(rack, STEPS) for rack in range(2))
    for rack in range(2):
        job.ended(rack, code=0)
    told = [job.told(rack) for rack in range(2)]
    assert {each["outcome"] for each in told} == {"merged"}
    assert max(each["error"] for each in told) < alone
