"""The table of benchmarks/results/failslow.md in small: every goal, on fewer series."""

from __future__ import annotations

import pytest

from benchmarks.failslow import FALSE_GOAL, FOUND_GOAL, GROUP, KINDS, Kind, mend, score
from mend.detector import own_past

SLOW = [kind for kind in KINDS if kind.onset is not None]
HEALTHY = [kind for kind in KINDS if kind.onset is None]


def name(kind: Kind) -> str:
    return kind.name


@pytest.mark.parametrize("kind", SLOW, ids=name)
def test_slow_ranks_are_found_within_ten_steps(kind: Kind) -> None:
    found = score(kind, mend, range(10))
    assert found.found >= FOUND_GOAL * found.series
    assert found.false_per_1000 <= FALSE_GOAL


@pytest.mark.parametrize("kind", HEALTHY, ids=name)
def test_healthy_ranks_are_not_named(kind: Kind) -> None:
    found = score(kind, mend, range(5))
    assert found.series == 5 * GROUP
    assert found.false == 0


def test_without_verification_healthy_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the rows above do fail when it is taken out."""
    monkeypatch.setattr(own_past, "_shift", lambda recent, level: 0.2)
    found = score(next(k for k in HEALTHY if "three steps" in k.name), mend, range(5))
    assert found.false_per_1000 > FALSE_GOAL
