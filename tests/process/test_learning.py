"""Real racks that learn: a model that is merged is not worse than the one that a rack learns alone.

All bits of the other tests were right while the default outer momentum multiplied the learning rate
of a short period by ten: racks that merged every four steps ended `merged`, with an error thirty
times that of a rack alone. benchmarks.small_problems has many more problems.
"""

from __future__ import annotations

from typing import Any

import pytest

from mend.tools.report.learning import compared, learning
from mend.tools.report.read import read_run
from mend.tools.report.rounds import rounds_of
from tests.process import regression
from tests.process.conftest import Jobs

STEPS, SHORT = 400, 200


@pytest.mark.slow
def test_merged_model_short_period_is_better_than_a_rack_alone(jobs: Jobs) -> None:
    job = jobs()
    config = {"lockstep": True, "sync_period_steps": 4}  # so that every run has the same bits
    job.run(script="tests.process.regression", steps=STEPS, config=config)
    alone = min(regression.learn_alone(rack, STEPS) for rack in range(2))
    told = [job.told(rack) for rack in range(2)]
    assert {each["outcome"] for each in told} == {"merged"}
    assert max(each["error"] for each in told) < alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({"sync_period_steps": 16}, "nothing that these figures show"),
        (
            {"sync_period_steps": 4, "outer_optimizer_momentum": 0.9},
            "outer_optimizer_momentum, from 0.9 to its default, 0.2",
        ),
        ({"sync_period_steps": 2}, "sync_period_steps, from 2 to 32"),
    ],
    ids=["sound", "long-momentum", "short-period"],
)
def test_report_planted_fault_is_named(config: dict[str, Any], first: str, jobs: Jobs) -> None:
    job = jobs()
    told = {"lockstep": True, **config}
    job.run(script="tests.process.regression", steps=SHORT, config=told)
    facts = read_run(job.events_folder)
    rounds = rounds_of(job.events_folder, facts.newest, facts.end_ns)
    (held_out,) = compared(facts, None)
    assert (held_out.name, held_out.looks) == ("held_out", SHORT // regression.LOOK_STEPS)
    said = learning(facts, rounds.settings, 0.0)
    print(said)  # for a test that fails
    assert said[-1].startswith(f"Change first: {first}")
    assert any("cosine" in each and "outer momentum" in each for each in said)


@pytest.mark.slow
def test_report_run_without_exchange_answers_whether_merging_helped(jobs: Jobs) -> None:
    found = []
    for exchange in (False, True):
        job = jobs()
        config = {"lockstep": exchange, "sync_period_steps": 4, "exchange": exchange}
        job.run(script="tests.process.regression", steps=STEPS, config=config)
        found.append(read_run(job.events_folder))
    alone, merged = found
    said = learning(merged, {}, 0.0, alone)
    (held_out,) = compared(merged, alone)
    errors = [regression.learn_alone(rack, STEPS) for rack in range(2)]
    assert held_out.alone == pytest.approx(sum(errors) / 2, rel=0.1), "the mean of the last tenth"
    assert held_out.ended < held_out.alone
    assert "merging helped" in said[1]
