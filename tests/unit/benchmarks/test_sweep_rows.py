"""What the cells say together: rows with intervals, and whether bits are equal."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from benchmarks.delay_sweep.plan import BLOCKING, CALIBRATION, CONCURRENT, NONE
from benchmarks.delay_sweep.rows import compare_bits, estimate, exchange_ms, rows
from tests.unit.benchmarks.sweeps import as_the_line_says, done, measured, settings


def test_cells_that_follow_the_line_lie_on_it() -> None:
    """The second repeat runs at half the speed: within a repeat nothing shows of that."""
    sweep = settings()
    found = {(r.place.delay_ms, r.mode): r for r in rows(sweep, as_the_line_says(sweep))}
    assert len(found) == 6
    blocking = found[100.0, BLOCKING]
    assert blocking.stall_ms.mean == pytest.approx(130)
    assert blocking.stall_ms_predicted == pytest.approx(130)
    assert blocking.share.mean == pytest.approx(fmean([200 / 330, 400 / 530]))
    assert blocking.share_predicted == pytest.approx(300 / 430)
    concurrent = found[100.0, CONCURRENT]
    assert (concurrent.share.mean, concurrent.share_predicted) == (1, 1)
    assert concurrent.hidden_ms == pytest.approx(8 * 30.0)
    assert found[0.0, NONE].share.mean == 1


def test_a_short_overlap_is_predicted_to_stall() -> None:
    sweep = settings(overlap_steps=2, delays_ms=(100.0,), seeds=1)
    cells = [
        done(0, 100.0, NONE, measured(20.0), tau=2),
        done(0, 100.0, BLOCKING, measured(33.0, 130.0), tau=2),
        done(0, 100.0, CONCURRENT, measured(29.0, 90.0), tau=2),
    ]
    (concurrent,) = [row for row in rows(sweep, cells) if row.mode == CONCURRENT]
    assert concurrent.stall_ms_predicted == pytest.approx(130 - 2 * 20)
    assert concurrent.share_predicted == pytest.approx(200 / 290)
    assert concurrent.share.low is None, "one repeat has no interval"


def test_the_exchange_is_fitted_where_the_delay_is_least() -> None:
    sweep = settings()
    assert exchange_ms(sweep, as_the_line_says(sweep, 12.0)) == pytest.approx(12.0)
    assert exchange_ms(sweep, []) == 0
    only_large = [done(0, 100.0, BLOCKING, measured(30.0, 95.0))]
    assert exchange_ms(sweep, only_large) == 0, "never less than nothing"


def test_rows_of_a_sweep_that_was_stopped_are_of_what_is_there() -> None:
    sweep = settings()
    cells = as_the_line_says(sweep)[:4]  # the first place, and `none` of the second
    assert [(row.place.delay_ms, row.mode) for row in rows(sweep, cells)] == [
        (0.0, NONE), (0.0, BLOCKING), (0.0, CONCURRENT), (100.0, NONE),
    ]  # fmt: skip
    no_baseline = [one for one in cells if one.cell.mode != NONE]
    assert rows(sweep, no_baseline) == []
    calibrating = [done(CALIBRATION, 0.0, NONE, measured(20.0))]
    assert rows(sweep, calibrating) == []


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Percentile intervals of 12 values are known to be a little short of their 95 %."""
    chance = np.random.default_rng(1)
    hits = 0
    for _ in range(150):
        found = estimate(chance.normal(10, 2, size=12).tolist())
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.mean < found.high
        hits += found.low <= 10 <= found.high
    assert 0.84 <= hits / 150 <= 0.99


def test_an_interval_repeats() -> None:
    assert estimate([1.0, 2.0, 4.0]) == estimate([1.0, 2.0, 4.0])
    assert estimate([3.0]).high is None


# ------------------------------------------------------------------ bits


def test_equal_cells_are_compared_over_all_delays() -> None:
    sweep = settings()
    found = compare_bits(as_the_line_says(sweep))
    assert found.equal
    assert (found.compared, found.pairs, found.losses) == (8, 4, 2)
    assert found.script_differs == ""


def test_one_bit_of_one_loss_is_found_and_named() -> None:
    other = measured(20.0, losses={"rack 0 rank 0": [0.1, np.nextafter(0.2, 1).item()]})
    cells = [done(0, 0.0, BLOCKING, measured(30.0)), done(0, 0.0, CONCURRENT, other)]
    found = compare_bits(cells)
    assert not found.equal
    (text,) = found.differences
    assert "loss of rack 0 rank 0, number 2" in text
    assert "seed0-constant-0ms-blocking and seed0-constant-0ms-concurrent" in text


def test_other_digests_missing_rounds_and_missing_ranks_are_differences() -> None:
    first = done(0, 0.0, BLOCKING, measured(30.0))
    others = [
        measured(20.0, commits={"0": [[0, 1, ["aa"]], [1, 1, ["XX"]]]}),
        measured(20.0, commits={"0": [[0, 1, ["aa"]]]}),
        measured(20.0, losses={}),
    ]
    for other in others:
        assert not compare_bits([first, done(0, 0.0, CONCURRENT, other)]).equal


def test_cells_of_other_seeds_and_taus_are_other_runs() -> None:
    other = measured(20.0, losses={"rack 0 rank 0": [0.3]})
    cells = [
        done(0, 0.0, BLOCKING, measured(30.0)),
        done(1, 0.0, BLOCKING, other),
        done(0, 100.0, CONCURRENT, other, tau=9),
        done(CALIBRATION, 0.0, BLOCKING, other),
    ]
    found = compare_bits(cells)
    assert found.equal
    assert found.compared == 0


def test_a_loss_that_is_no_number_equals_itself() -> None:
    nan = measured(20.0, losses={"rack 0 rank 0": [float("nan")]})
    assert compare_bits([done(0, 0.0, BLOCKING, nan), done(0, 0.0, CONCURRENT, nan)]).equal


def test_a_script_that_does_not_repeat_itself_is_told_apart() -> None:
    """Two baselines of one seed: other losses are the script's doing. One may be longer."""
    longer = measured(20.0, losses={"rack 0 rank 0": [0.1, 0.2, 0.3]})
    fine = [done(0, 0.0, NONE, measured(20.0)), done(0, 100.0, NONE, longer)]
    assert compare_bits(fine).script_differs == ""
    drawn = measured(20.0, losses={"rack 0 rank 0": [0.1, 0.7]})
    found = compare_bits([*fine, done(0, 100.0, NONE, drawn)])
    assert "number 2" in found.script_differs
    assert found.equal, "only cells with exchange are judged"
