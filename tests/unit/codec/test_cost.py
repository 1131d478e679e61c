"""What codecs cost, as it was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mend.codec import CODECS, LAYOUT_CODECS, cost_of
from mend.codec.cost import COST_PCT

PAGE = Path(__file__).parents[3] / "benchmarks/results/quality_gpu.md"


@pytest.mark.parametrize("codec", COST_PCT)
def test_the_figures_are_those_of_the_runs(codec: str) -> None:
    """The last column is the distance from the same arm with offers in fp32."""
    page, name = PAGE.read_text(), re.escape(f"codec={codec}:feedback=weights")
    for ramp, wanted in zip(("10", "5"), COST_PCT[codec], strict=True):
        rows = re.findall(
            rf"^\| `merge:mu=.9:ramp={ramp}:{name}` .* \+([\d.]+) \[[^|]*\|$", page, re.M
        )
        assert [round(float(row)) for row in rows] == [wanted]
        assert f"{wanted} %" in cost_of(codec)


def test_it_is_said_of_all_that_leave_most_out_and_of_no_other() -> None:
    warned = {name for name in CODECS if cost_of(name)}
    assert warned == {name for name, make in CODECS.items() if make().feedback == "weights"}
    assert all(cost_of(name) for name in LAYOUT_CODECS)
    assert "powersgd-4 cost 37 %" in cost_of("powersgd-16"), "of which rank 4 is known alone"
