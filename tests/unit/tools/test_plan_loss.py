"""What `mend plan` says of the loss is what was measured, and nothing else."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality_gpu_table import above, losses_of
from mend.config.settings import MendConfig
from mend.tools.plan_loss import MEASURED, NO_MOMENTUM, Start, loss_of, source_of

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
RAMPS = {"scratch": 10, "warm": 5}
ARMS = {
    16: "mend:sync_period_steps=16:codec=int4",
    32: "mend",
    64: "mend:sync_period_steps=64:codec=float32",
    128: "mend:sync_period_steps=128:codec=float32",
}
OLDER = {16: 0.5, 32: 0.667, 64: 0.8, 128: 0.889}


def of_real_racks() -> dict[tuple[int, str, str], dict[int, float]]:
    """(racks, start, arm) -> seed -> loss, at the least of the learning rates."""
    found: defaultdict[tuple[int, str, str], dict[int, float]] = defaultdict(dict)
    for line in (RESULTS / "loss.jsonl").read_text().splitlines():
        row = json.loads(line)
        if (row["size"], row["steps"]) == ("5M", 1408) and "peak" not in row:
            found[row["racks"], row["start"], row["arm"]][row["seed"]] = row["loss"]
    return found


def test_each_figure_is_the_mean_of_the_kept_runs() -> None:
    losses = of_real_racks()
    for start, by_racks in MEASURED.items():
        for racks, by_period in by_racks.items():
            together = losses[racks, start, "data-parallel"]
            for period, pct in by_period.items():
                # With more racks the default momentum was less when these ran.
                older = f":outer_optimizer_momentum={OLDER[period]}" if racks > 2 else ""
                own = losses[racks, start, ARMS[period] + older]
                found = [100 * (own[seed] / together[seed] - 1) for seed in own if seed in together]
                assert statistics.fmean(found) == pytest.approx(pct, abs=0.06), (racks, period)


@pytest.mark.parametrize("start", ["scratch", "warm"])
def test_the_price_of_no_momentum_is_that_of_the_kept_runs(start: Start) -> None:
    paths = sorted((RESULTS / "quality_gpu").glob(f"5M_4_{start}*.json"))
    reports = [json.loads(path.read_text()) for path in paths]
    plain = [r for r in reports if r["plan"]["learning_rate"] == 7e-4 and "inner" not in r["plan"]]
    losses = losses_of(plain)
    for period, pct in NO_MOMENTUM[start].items():
        arm = "merge" + (f":H={period}" if period != 64 else "")
        without, with_it = (
            above(losses, each, "dp") for each in (arm, f"{arm}:mu=.9:ramp={RAMPS[start]}")
        )
        assert without is not None
        assert with_it is not None
        assert without.mean - with_it.mean == pytest.approx(pct, abs=0.11), arm


def job(racks: int = 4, **settings: Any) -> MendConfig:
    return MendConfig(rack=0, racks=racks, sideband_addr="", sideband_peers=(), **settings)


def test_between_two_measured_periods_it_is_interpolated_in_log_h() -> None:
    middle = job(sync_period_steps=64)
    assert loss_of(middle).scratch == pytest.approx((6.9 + 18.2) / 2)
    assert "H 64 is interpolated" in source_of(middle)
    assert str(loss_of(job(2, sync_period_steps=32))) == "-1/-2"
    assert source_of(job(2, sync_period_steps=32)).endswith("after a warm start with 2")


def test_beyond_what_was_measured_it_is_a_bound() -> None:
    assert str(loss_of(job(sync_period_steps=1024))) == ">+18/>+2"
    assert "beyond what was measured" in source_of(job(sync_period_steps=1024))
    assert not loss_of(job(sync_period_steps=128)).bound
    assert loss_of(job(sync_period_steps=4)).scratch == 8.3


def test_a_number_of_racks_that_was_not_run_counts_as_the_nearest() -> None:
    for racks, nearest in ((2, 2), (3, 4), (5, 4), (6, 8), (64, 8)):
        assert loss_of(job(racks, sync_period_steps=32)).scratch == MEASURED["scratch"][nearest][32]
    assert "64 racks were not measured" in source_of(job(64, sync_period_steps=32))


def test_no_momentum_costs_what_it_cost() -> None:
    with_it = loss_of(job(sync_period_steps=64))
    without = loss_of(job(sync_period_steps=64, outer_optimizer_momentum=0.0))
    assert without.scratch - with_it.scratch == pytest.approx(9.8)
