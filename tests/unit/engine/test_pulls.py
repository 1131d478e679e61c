"""The bytes that a rank pulls, and the waits that go by them."""

from __future__ import annotations

from mend.coordination.messages import Pulled
from mend.engine.state.pulls import Patience, Pulls, Transfers
from mend.types import MB, SECOND


def test_a_wait_past_its_limit_goes_on_while_bytes_arrive() -> None:
    """28 GB of version 0 took 249 s over 1 Gbit/s, and the wait ended after 240."""
    arrived = {0: 0}
    wait = Patience(240 * SECOND, 10 * SECOND, 0, lambda: arrived)
    for second in range(5, 600, 5):
        arrived[0] += 1
        assert not wait.over(second * SECOND)
    assert not wait.over(605 * SECOND)
    assert wait.over(606 * SECOND)


def test_a_wait_without_bytes_ends_at_its_limit() -> None:
    wait = Patience(240 * SECOND, 10 * SECOND, 0, lambda: {0: 7})
    assert not wait.over(240 * SECOND)
    assert wait.over(240 * SECOND + 1)


def test_wait_pull_that_fails_again_and_again_ends_at_its_limit() -> None:
    """A rack pulled from a dead one: each new try was taken for a byte, and it never left."""
    pulls = [dict[int, int](), {3: 0}]
    wait = Patience(SECOND, 10 * SECOND, 0, lambda: pulls[0])
    for _ in range(9):
        pulls.reverse()
        assert not wait.over(SECOND)
    assert wait.over(SECOND + 1)


def test_wait_new_life_of_a_rack_goes_on_with_its_bytes() -> None:
    moved = {3: 80}
    wait = Patience(SECOND, 10 * SECOND, 0, lambda: moved)
    moved[3] = 10
    assert not wait.over(SECOND)
    moved[3] = 20
    assert not wait.over(SECOND + 1)


def test_a_wait_does_not_end_early_for_want_of_bytes() -> None:
    wait = Patience(240 * SECOND, 10 * SECOND, 0, lambda: {0: 0})
    assert not wait.over(200 * SECOND)


def test_a_pull_that_failed_counts_again_only_when_it_gets_further() -> None:
    """A holder that sends wrong bytes for ever must not keep a start waiting for ever."""
    pulls = Pulls()
    first = pulls.begin(1, 100)
    first.verified = 60
    assert pulls.standing({}) == (Pulled(1, 60, 40),)
    pulls.end(1, first, whole=False)
    second = pulls.begin(1, 100)
    second.verified = 50
    assert pulls.standing({}) == (Pulled(1, 60, 50),)
    second.verified = 100
    pulls.end(1, second, whole=True)
    assert pulls.standing({1: 30}) == (Pulled(1, 100, 30),)


def test_bytes_of_several_racks_are_counted_apart() -> None:
    pulls = Pulls()
    pulls.begin(2, 10).verified = 4
    assert pulls.standing({1: 5}) == (Pulled(1, 0, 5), Pulled(2, 4, 6))


def test_transfers_are_told_with_rate_and_time_left() -> None:
    transfers = Transfers()
    transfers.take((Pulled(1, 10 * MB, 90 * MB),), 0, 0)
    transfers.take((Pulled(1, 20 * MB, 80 * MB),), 0, 5 * SECOND)
    assert transfers.sentences() == ("rack 1 has pulled 20.0 of 100.0 MB, at 2.0 MB/s, 40 s left",)
    transfers.take((Pulled(1, 100 * MB, 0),), 0, 6 * SECOND)
    assert transfers.sentences() == ()


def test_a_rate_is_not_that_of_a_former_life() -> None:
    transfers = Transfers()
    transfers.take((Pulled(1, 50 * MB, 50 * MB),), 0, 0)
    transfers.take((Pulled(1, 10 * MB, 90 * MB),), 0, SECOND)
    transfers.take((Pulled(1, 12 * MB, 88 * MB),), 0, 2 * SECOND)
    assert transfers.rate(1) == 2 * MB
