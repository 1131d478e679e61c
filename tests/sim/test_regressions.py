"""Everything in regressions.txt broke an invariant once; it must not again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mend_lab.sim import Fault, Scenario, World, draw, tell

LINES = (Path(__file__).parent / "regressions.txt").read_text(encoding="utf-8").splitlines()
CASES = [line.rpartition("  # ") for line in LINES if line and not line.startswith("#")]


def test_every_line_says_why_it_is_there() -> None:
    assert len(CASES) >= 3
    assert all(case and len(why) > 10 for case, _, why in CASES)


@pytest.mark.parametrize(("case", "why"), [(case, why) for case, _, why in CASES], ids=str)
def test_seed_that_broke_once_does_not_break_again(case: str, why: str) -> None:
    scenario = (
        draw(int(case)) if case.isdigit() else eval(case, {"Scenario": Scenario, "Fault": Fault})
    )
    world = World(scenario)
    report = world.run()
    assert not report.problems, f"{why}\n{tell(world, report)}"
