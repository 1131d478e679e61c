"""What codecs cost, as it was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mend.codec import CODECS, LAYOUT_CODECS, cost_of
from mend.codec.cost import COST_PCT

PAGE = Path(__file__).parents[3] / "benchmarks/results/quality_gpu.md"
STARTS = {"scratch": "10", "warm 1024 + 2048": "5"}
"""Runs of 48 rounds -> the c of their ramp."""


@pytest.mark.parametrize(("codec", "in_weights"), COST_PCT)
def test_the_figures_are_those_of_the_runs(codec: str, in_weights: bool) -> None:
    """The last column is the distance from the same arm with offers in fp32."""
    feedback = ":feedback=weights" if in_weights else ""
    name = re.escape(f"codec={codec}{feedback}")
    for (start, ramp), wanted in zip(STARTS.items(), COST_PCT[codec, in_weights], strict=True):
        runs = PAGE.read_text().split(f"\n## 5M, 4 racks, {start}, 3072 steps, AdamW 0.0007\n")[1]
        row = rf"^\| `merge:mu=.9:ramp={ramp}:{name}` .* \+([\d.]+) \[[^|]*\|$"
        rows = re.findall(row, runs.split("\n## ")[0], re.M)
        assert [round(float(row)) for row in rows] == [wanted]
        modes = ("carry",) if in_weights else ("overwrite", "blend")
        assert all(f"{wanted} %" in cost_of(codec, each) for each in modes)


def test_cost_is_said_of_all_codecs_that_leave_most_out_and_of_no_other() -> None:
    warned = {name for name in CODECS if cost_of(name)}
    assert warned == {name for name, make in CODECS.items() if make().feedback == "weights"}
    assert all(cost_of(name) for name in LAYOUT_CODECS)
    assert "='powersgd-16': 'powersgd-4' raised the loss by 37 %" in cost_of("powersgd-16"), (
        "of which rank 4 is known alone"
    )
