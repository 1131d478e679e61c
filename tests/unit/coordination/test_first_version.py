"""A first version that no rack which is left holds."""

from __future__ import annotations

from mend.consensus.log import LogState
from mend.coordination.events import Effect, Send
from mend.coordination.first_version import FirstVersion, unheld, why_first_version_missing
from mend.coordination.messages import Refusal
from mend.types import Peer
from tests.unit.coordination.job import Job
from tests.unit.coordination.nouns import DETECT_NS, HEARTBEAT_NS, genesis, hello, member, report

NONE, HELD, HALF = (-1, -1), (0, 0), (0, -1)


def begun(racks: int = 3) -> LogState:
    log = LogState()
    log.take(genesis(racks, fragments=2))
    return log


def lost(*versions: tuple[int, ...], dead: int = 0, live: tuple[int, ...] = (1, 2)) -> bool:
    """Whether it is lost after a detection time. `versions`: of racks 1, 2."""
    reports = {rack: report(1, 2, versions=held) for rack, held in enumerate(versions, 1)}
    first, log = FirstVersion(), begun()
    gone = [member(rack) for rack in range(dead)]
    assert not first.lost(log, reports, live, gone, 0, DETECT_NS), "a last report may be under way"
    assert not first.lost(log, reports, live, gone, DETECT_NS - 1, DETECT_NS)
    return first.lost(log, reports, live, gone, DETECT_NS, DETECT_NS)


def test_first_version_that_only_the_dead_held_is_lost() -> None:
    assert lost(NONE, NONE, dead=1)
    assert lost(HALF, HALF, dead=1), "one fragment is enough"
    assert not lost(HELD, NONE, dead=1)
    assert not lost(HALF, (-1, 0), dead=1), "each has what the other lacks"


def test_first_version_is_not_lost_while_a_rack_may_hold_it() -> None:
    assert not lost(NONE, NONE), "rack 0 is silent, and may live"
    assert not lost(NONE, NONE, dead=1, live=(1,)), "rack 2 may have copied it since"
    assert not lost(NONE, dead=1), "rack 2 has not reported yet"
    assert not lost(dead=3), "nobody is left to be told"


def test_first_version_that_comes_late_is_not_lost() -> None:
    """The last bytes of a copy were under way when their sender died."""
    first, log, gone = FirstVersion(), begun(), [member(0)]
    without = {rack: report(1, 2, versions=NONE) for rack in (1, 2)}
    first.lost(log, without, (1, 2), gone, 0, DETECT_NS)
    arrived = without | {2: report(2, 2, versions=HELD)}
    assert not first.lost(log, arrived, (1, 2), gone, DETECT_NS, DETECT_NS)
    assert not first.lost(log, without, (1, 2), gone, 2 * DETECT_NS, DETECT_NS), "counted anew"


def test_racks_that_wait_for_a_silent_holder_say_so() -> None:
    reports = {rack: report(1, 2, versions=HALF) for rack in (1, 2)}
    (reason,) = why_first_version_missing(begun(), reports, (1, 2))
    said = "fragment 1: no rack that is heard holds its first version; start rack 0 again"
    assert str(reason) == said
    assert why_first_version_missing(begun(), reports, (0, 1, 2)) == (), "it has not reported yet"
    assert unheld(begun(), {1: report(1, 2, versions=HELD)}, (1,)) == []


# -------------------------------------------------------------- the coordinator


def told_lost(effects: list[Effect]) -> list[tuple[Peer, int]]:
    return [
        (each.to, each.body.incarnation)
        for each in effects
        if isinstance(each, Send) and isinstance(each.body, Refusal) and each.body.kind == "lost"
    ]


def test_coordinator_tells_racks_that_the_first_version_died_with_its_rack() -> None:
    """Rack 0 died before another rack had copied its weights, and was started again. The rest was a
    quorum, so no lineage could begin; its next life got no seat, as nobody held the bytes; and all
    waited for version 0 until their start timed out."""
    job = Job(4, witness=True, fragments=2).begun()
    for rack in range(1, 4):
        job.say(rack, versions=NONE)
    for _ in range(2 * DETECT_NS // HEARTBEAT_NS):
        for rack in range(1, 4):
            job.say(rack)
        assert told_lost(job.tick(HEARTBEAT_NS)) == [], "rack 0 is silent, and may live"
        job.vote()
    assert "start rack 0 again" in str(job.orders[1].why[0])
    job.hear(0, hello(0, racks=4, fragments=2, life=1), life=1)
    told: list[tuple[Peer, int]] = []
    for beat in range(2 * DETECT_NS // HEARTBEAT_NS):
        for rack in range(1, 4):
            job.say(rack)
        job.vote()
        told += (now := told_lost(job.tick(HEARTBEAT_NS)))
        assert len(now) in (0, 3)
        assert not now or beat * HEARTBEAT_NS >= DETECT_NS - HEARTBEAT_NS
    assert set(told) == {(Peer(rack, 0), member(rack).incarnation) for rack in (1, 2, 3)}
    assert len(told) > 3, "a message may be lost"
