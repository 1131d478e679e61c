"""A rack against the median of the others: three racks at least, onset and relief."""

from __future__ import annotations

from mend.detector import MeasuredPace, PeerComparison


def paces(*times: float, margin: float = 0.05) -> dict[int, MeasuredPace]:
    return {rack: MeasuredPace(time, margin) for rack, time in enumerate(times)}


def test_a_rack_that_is_slow_from_the_start_is_found() -> None:
    peers = PeerComparison()
    assert peers.compare(paces(1.0, 1.0, 2.0, 1.1)) == (frozenset({2}), frozenset())
    assert peers.slow == {2: 2.0}
    assert peers.compare(paces(1.0, 1.0, 2.0, 1.1)) == (frozenset(), frozenset())


def test_relief_needs_more_than_the_loss_of_the_margin() -> None:
    peers = PeerComparison()
    peers.compare(paces(1.0, 1.0, 1.5))
    assert peers.compare(paces(1.0, 1.0, 1.09)) == (frozenset(), frozenset())
    assert peers.compare(paces(1.0, 1.0, 1.04)) == (frozenset(), frozenset({2}))


def test_noise_and_racks_without_a_median_are_no_verdict() -> None:
    compared = PeerComparison().compare
    assert compared(paces(1.0, 1.0, 1.3, margin=0.3))[0] == frozenset()
    assert compared(paces(1.0, 1.0, 1.3, margin=0.05))[0] == {2}
    assert compared(paces(1.0, 9.0))[0] == frozenset(), "two racks have none"
    assert compared(paces(1.0, 9.0, 0.0))[0] == frozenset(), "unknown is no peer"


def test_a_rack_that_cannot_be_compared_any_more_is_not_judged() -> None:
    peers = PeerComparison()
    peers.compare(paces(1.0, 1.0, 2.0))
    assert peers.compare(paces(1.0, 1.0)) == (frozenset(), frozenset({2}))
