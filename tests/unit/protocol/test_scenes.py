"""What a round sees: times that suit whoever is fastest."""

from __future__ import annotations

import pytest

from mend.protocol.scenes import fastest_ns


@pytest.mark.parametrize(
    ("times_ns", "fastest"),
    [([25, 375, 26], 25), ([0, 375], 375), ([0, 0], 0), ([], 0)],
)
def test_the_window_goes_by_the_fastest_rack(times_ns: list[int], fastest: int) -> None:
    """It went by the slowest: beside a rack 15 times slower the others waited in every round, 540
    to 730 ms of 200 (benchmarks/straggler.py). Who has not measured a step has no say."""
    assert fastest_ns(times_ns) == fastest
