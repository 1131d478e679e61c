"""What `mend plan` says of the loss is what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality_gpu_table import above, losses_of
from mend.config.settings import MendConfig
from mend.tools.plan_loss import MEASURED, OVERLAP_PCT, SHORT_PCT, Start, loss_of

RESULTS = Path(__file__).parents[3] / "benchmarks/results/quality_gpu"
RAMPS = {"scratch": 10, "warm": 5}


def kept(start: Start) -> dict[str, dict[int, float]]:
    reports = [json.loads(p.read_text()) for p in sorted(RESULTS.glob(f"5M_4_{start}*.json"))]
    plain = [r for r in reports if r["plan"]["learning_rate"] == 7e-4 and "inner" not in r["plan"]]
    return losses_of(plain)


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("start", ["scratch", "warm"])
def test_each_figure_is_the_mean_of_the_kept_runs(start: Start, momentum: bool) -> None:
    losses = kept(start)
    for period, pct in MEASURED[momentum, start].items():
        arm = "merge" + (f":H={period}" if period != 64 else "")
        arm += f":mu=.9:ramp={RAMPS[start]}" if momentum else ""
        found = above(losses, arm, "dp")
        assert found is not None
        assert found.mean == pytest.approx(pct, abs=0.06), arm


@pytest.mark.parametrize("start", ["scratch", "warm"])
def test_the_price_of_overlap_is_that_of_the_kept_runs(start: Start) -> None:
    losses = kept(start)
    arm = f"mu=.9:ramp={RAMPS[start]}"
    late = above(losses, f"merge:tau=8:{arm}:rise={RAMPS[start]}", f"merge:{arm}")
    assert late is not None
    assert late.mean == pytest.approx(OVERLAP_PCT[start], abs=0.06)


def job(**settings: Any) -> MendConfig:
    return MendConfig(rack=0, racks=4, sideband_addr="", sideband_peers=(), **settings)


def test_between_two_measured_periods_it_is_interpolated_in_log_h() -> None:
    middle = loss_of(job(sync_period_steps=128, overlap_steps=0))
    assert middle[:2] == pytest.approx(((1.8 + 9.8) / 2, (-0.4 + 2.2) / 2))
    assert str(middle) == "+6/+1"
    assert str(loss_of(job(sync_period_steps=64, overlap_steps=0))) == "+2/+0"
    assert loss_of(job(sync_period_steps=64, overlap_steps=8)).scratch == pytest.approx(2.5)


def test_beyond_what_was_measured_it_is_a_bound() -> None:
    assert str(loss_of(job(sync_period_steps=1024))) == ">+10/>+2"
    assert not loss_of(job(sync_period_steps=256)).bound
    assert loss_of(job(sync_period_steps=4, overlap_steps=0)).scratch == -0.2 + SHORT_PCT


def test_no_momentum_costs_what_it_cost() -> None:
    with_it = loss_of(job(sync_period_steps=64))
    without = loss_of(job(sync_period_steps=64, outer_optimizer_momentum=0.0))
    assert without.scratch - with_it.scratch == pytest.approx(11.6 - 1.8)
