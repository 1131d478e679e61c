"""DelayedLane: delays that are drawn from keys."""

from __future__ import annotations

import statistics
from contextlib import closing

import pytest

from mend.errors import ConfigError
from mend.transport.delayed import (
    COEFFICIENT_OF_VARIATION,
    Delay,
    DelayedLane,
    Distribution,
    delay_ns,
)
from mend.types import MS, SECOND, Member, offer_key, state_key

KEYS = [offer_key(Member(n % 7, 5), n % 3, n % 11, n) for n in range(40_000)]


@pytest.mark.parametrize("distribution", ["bimodal", "long_tail"])
def test_mean_and_spread_are_as_stated(distribution: Distribution) -> None:
    drawn = [delay_ns(SECOND, distribution, 4, key) for key in KEYS]
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(SECOND, rel=0.01)
    assert statistics.pstdev(drawn) / mean == pytest.approx(COEFFICIENT_OF_VARIATION, rel=0.02)


def test_the_shapes_are_what_their_names_say() -> None:
    assert {delay_ns(SECOND, "constant", 4, key) for key in KEYS[:99]} == {SECOND}
    assert {delay_ns(100, "bimodal", 4, key) for key in KEYS} == {71, 129}
    tail = sorted(delay_ns(SECOND, "long_tail", 4, key) for key in KEYS)
    assert tail[0] > 0
    assert tail[len(tail) // 2] < SECOND  # skewed: the median is below the mean
    assert tail[-1] > 2.5 * SECOND


def test_a_restarted_job_draws_the_same_delays() -> None:
    before, after = (offer_key(Member(1, life), 0, 2, 3) for life in (111, 222))
    assert delay_ns(SECOND, "long_tail", 1, before) == delay_ns(SECOND, "long_tail", 1, after)


def test_seed_and_key_both_matter() -> None:
    keys = [offer_key(Member(1, 1), 0, 2, 3), offer_key(Member(1, 1), 0, 2, 4)]
    keys.append(state_key(0, 2, 3, "00" * 32))
    drawn = {delay_ns(SECOND, "long_tail", seed, key) for seed in (-1, 0, 1) for key in keys}
    assert len(drawn) == 9


@pytest.mark.parametrize("key", [KEYS[0], state_key(0, 0, 1, "ab" * 32)])
async def test_offers_and_states_come_late_by_their_delay(
    key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    into, delay = bytearray(4), Delay(50 * MS, "bimodal", 9)
    with closing(DelayedLane(delay, "127.0.0.1", None, token=bytes(16))) as lane:
        lane.serve(key, memoryview(b"four"))
        monkeypatch.setattr("mend.transport.delayed.asyncio.sleep", sleep)
        await lane.fetch([lane.address], key, "", memoryview(into))
        assert into == b"four"
        assert slept[-1] == delay_ns(50 * MS, "bimodal", 9, key) / SECOND


def test_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError):
        Delay(-1, "constant", 0)
    with pytest.raises(ConfigError):
        Delay(1, "gaussian", 0)
