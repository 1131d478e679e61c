"""Bayesian change points: a change shows at once, noise does not."""

from __future__ import annotations

import random

from mend.detector.change_point import RUNS_MAX, ChangePoints


def after(samples: list[float]) -> ChangePoints:
    points = ChangePoints(hazard=1 / 256, length_max=192)
    for x in samples:
        points.observe(x, samples[0])
    return points


def noise(count: int, level: float = 0.0, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(level, 0.05) for _ in range(count)]


def test_the_length_of_a_steady_run_is_known() -> None:
    points = after(noise(100))
    assert points.changed_within(24) < 0.05
    assert points.lengths[points.probabilities.index(max(points.probabilities))] == 100


def test_a_new_level_is_a_new_run_from_its_first_sample() -> None:
    points = after(noise(100) + noise(6, 0.7, seed=1))
    assert points.changed_within(24) > 0.999
    assert points.likeliest_length(24) == 6


def test_the_beginning_is_no_change() -> None:
    assert after(noise(5)).changed_within(24) < 0.5


def test_long_runs_are_lumped_and_few_lengths_are_kept() -> None:
    points = after(noise(600))
    assert len(points.lengths) <= RUNS_MAX
    assert points.lengths == sorted(set(points.lengths))
    assert points.lengths[-1] == 192
    assert abs(sum(points.probabilities) - 1) < 1e-9


def test_a_sample_that_no_run_explains_begins_a_new_one() -> None:
    points = after([*noise(300), 1e200])
    assert points.lengths == [1]


def test_run_of_full_length_forgets_the_spread_of_its_oldest_samples() -> None:
    """A run that stays as long as is told apart must not count the squares of all its samples: it
    would take every change for noise in the end."""
    points = ChangePoints(hazard=1e-9, length_max=16)
    spread = []
    for turn in range(40):
        for x in noise(16, seed=turn):
            points.observe(x, 0.0)
        spread.append(points.betas[points.lengths.index(16)])
    assert max(spread[20:]) < 2 * max(spread[:20])
