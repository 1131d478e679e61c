"""The analytic line, against draws of the very delays that a job makes."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.delay_sweep import cost_model as line
from mend.transport.delayed import Distribution, delay_ns
from mend.types import MS, Member, offer_key

PULLS = 2
ROUNDS = 20_000


def drawn(distribution: Distribution) -> list[float]:
    """The latest of two transfers' delays of each round, in ms; their mean is 100."""

    def one(rack: int, number: int) -> float:
        key = offer_key(Member(rack, 1), 0, number, number)
        return delay_ns(100 * MS, distribution, 5, key) / MS

    return [max(one(rack, number) for rack in range(PULLS)) for number in range(ROUNDS)]


@pytest.mark.parametrize("distribution", ["constant", "bimodal", "long_tail"])
def test_blocking_waits_for_the_latest_transfer(distribution: Distribution) -> None:
    mean = fmean(drawn(distribution))
    assert line.blocking_stall_ms(100, distribution, PULLS, 7.0) == pytest.approx(
        mean + 7, rel=0.01
    )
    assert mean > 100 or distribution == "constant"


@pytest.mark.parametrize("distribution", ["constant", "bimodal", "long_tail"])
@pytest.mark.parametrize("hidden_ms", [0.0, 90.0, 120.0, 500.0])
def test_concurrent_waits_for_what_is_left(distribution: Distribution, hidden_ms: float) -> None:
    left = fmean(max(0.0, delay + 7 - hidden_ms) for delay in drawn(distribution))
    found = line.concurrent_stall_ms(
        100, distribution, PULLS, 7.0, hidden_ms=hidden_ms, in_flight=1
    )
    assert found == pytest.approx(left, rel=0.02, abs=0.3)


@pytest.mark.parametrize("distribution", ["bimodal", "long_tail"])
def test_the_usual_delay_is_exceeded_in_one_round_of_twenty(distribution: Distribution) -> None:
    usual = line.usual_delay_ms(100, distribution, PULLS)
    beyond = sum(delay > usual * 1.0001 for delay in drawn(distribution)) / ROUNDS
    assert beyond == pytest.approx(0.05, abs=0.006) if distribution == "long_tail" else not beyond
    assert line.usual_delay_ms(0, distribution, PULLS) == 0


def test_tau_is_the_least_that_covers() -> None:
    assert line.covering_steps(100, 20) == 5
    assert line.covering_steps(100.1, 20) == 6
    assert line.covering_steps(0, 20) == 1


def test_rounds_in_flight_share_a_wait() -> None:
    assert [line.rounds_in_flight(tau, 10) for tau in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]
    alone = line.concurrent_stall_ms(300, "constant", PULLS, 0, hidden_ms=200, in_flight=1)
    assert alone == 100
    assert line.concurrent_stall_ms(300, "constant", PULLS, 0, hidden_ms=200, in_flight=2) == 50


def test_a_wait_costs_throughput_in_proportion() -> None:
    assert line.throughput_share(0, 20, 10) == 1
    assert line.throughput_share(200, 20, 10) == 0.5
