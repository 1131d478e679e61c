"""A rank against its own past: onset, how much, since when, relief; and what is no slowdown."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from mend.detector import DetectorOptions, OwnPast
from mend.detector.own_past import _shift

OPTIONS = DetectorOptions()


def noisy(factors: Sequence[float], seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [1e6 * factor * math.exp(chance.gauss(0.0, 0.05)) for factor in factors]


def verdicts(samples: Sequence[float]) -> tuple[OwnPast, list[int]]:
    """The samples at which the verdict changed."""
    past = OwnPast(OPTIONS)
    return past, [k for k, sample in enumerate(samples) if past.observe(sample)]


def test_a_lasting_slowdown_is_found_within_ten_steps_with_its_beginning_and_its_size() -> None:
    past, changed = verdicts(noisy([1.0] * 100 + [2.0] * 50))
    assert len(changed) == 1
    assert 100 <= changed[0] < 110
    assert abs(past.slowdown.since - 100) <= 1
    assert past.slowdown.ratio == pytest.approx(2.0, rel=0.1)
    assert past.slowdown.probability > OPTIONS.probability_min


def test_relief_is_found_and_the_next_slowdown_is_one_of_its_own() -> None:
    past, changed = verdicts(noisy([1.0] * 100 + [2.0] * 300 + [1.0] * 100 + [1.5] * 50))
    assert [k // 10 * 10 for k in changed] == [100, 400, 500]
    assert past.slowdown is not None


def test_samples_on_both_sides_of_the_level_are_no_shift() -> None:
    assert _shift([1.0, 2.0, 4.0, 5.0], 3.0) == 0.0
    assert _shift([1.0, 4.0, 4.0, 5.0], 3.0) == 1.0
    assert _shift([1.0, 2.0, 2.0, 5.0], 3.0) == -1.0


def test_a_ramp_is_found_soon_and_its_ratio_grows() -> None:
    rise = [1 + 3 * (k + 1) / 200 for k in range(200)]
    past, changed = verdicts(noisy([1.0] * 100 + rise))
    assert len(changed) == 1
    assert changed[0] < 100 + 7 + 10
    assert past.slowdown.ratio > 3.5, "it is compared with what was before the ramp"


def test_four_slow_steps_are_proposed_as_a_change_and_refused() -> None:
    samples = noisy([1.0] * 100 + [1.5] * 4 + [1.0] * 60)
    past, proposed = OwnPast(OPTIONS), 0.0
    for sample in samples:
        assert not past.observe(sample)
        proposed = max(proposed, past.proposed)
    assert proposed > OPTIONS.probability_min, "without verification this was a slowdown"


def test_a_rank_that_becomes_faster_has_a_new_past() -> None:
    past, changed = verdicts(noisy([2.0] * 100 + [1.0] * 100 + [1.5] * 20))
    assert len(changed) == 1
    assert changed[0] >= 200
    assert past.slowdown.ratio == pytest.approx(1.5, rel=0.1)


def test_nothing_is_judged_before_there_is_a_past() -> None:
    past, changed = verdicts(noisy([1.0] * 8 + [3.0] * 4))
    assert changed == []
    assert past.pace.time > 0
    assert OwnPast(OPTIONS).pace.time == 0


def test_steps_of_exactly_equal_length_are_fine() -> None:
    assert verdicts([1e6] * 300)[1] == []
    assert len(verdicts([1e6] * 100 + [1.2e6] * 20)[1]) == 1


def test_the_minimum_of_samples_is_what_a_verdict_waits_for() -> None:
    past = OwnPast(DetectorOptions(samples_min=20))
    changed = [k for k, s in enumerate(noisy([1.0] * 100 + [2.0] * 50)) if past.observe(s)]
    assert 109 <= changed[0] < 120, "half of them have to be slow"


def test_the_threshold_is_the_probability_that_a_change_needs() -> None:
    assert DetectorOptions(zscore=1.0).probability_min == pytest.approx(0.683, abs=1e-3)
    assert OPTIONS.probability_min == pytest.approx(0.9973, abs=1e-4)
    certain = OwnPast(DetectorOptions(zscore=40.0))
    assert not any(certain.observe(s) for s in noisy([1.0] * 100 + [2.0] * 50))
