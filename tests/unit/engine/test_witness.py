"""The witness as a process: it leaves when it has heard that the job is over."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.records import Mitigation
from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.ending import END_REPEATED_NS
from mend.coordination.ladder import event_of
from mend.coordination.machines import CoordinatorSpec, ProcessSpec
from mend.coordination.messages import Refusal
from mend.engine.witness import Witness, build_witness, run
from mend.errors import AddressInUse
from mend.events.base import LoggedEvent, log_text
from mend.events.kinds import JobFounded, RoundDecided
from mend.types import MS, SECOND, WITNESS, Peer
from tests.unit.coordination.nouns import genesis, hello, log_of, member, orders, roster

ME = member(WITNESS)


class Outside:
    """Counts how often the witness says that it has nothing more to do, keeps what it sends."""

    def __init__(self) -> None:
        self.ends, self.time_ns, self.sent = 0, SECOND, list[Any]()

    def now_ns(self) -> int:
        return self.time_ns

    def finished(self) -> None:
        self.ends += 1

    def connect(self, *_: Any) -> None: ...
    def send(self, _: Peer, body: Any) -> None:
        self.sent.append(body)

    def note(self, *_: Any) -> None: ...


def following(outside: Any, on_progress: Callable[[str], None] = lambda line: None) -> Witness:
    options = CoordinatorOptions(2, 100 * MS, 2 * SECOND)
    parts = ProcessSpec(Peer(WITNESS, 0), ME, coordinator=CoordinatorSpec("job", options))
    return build_witness(parts, outside, on_progress)


def printed(*events: LoggedEvent) -> list[str]:
    """What a witness prints of the events."""
    lines = list[str]()
    witness = following(Outside(), lines.append)
    for event in events:
        witness._note(event)
    return lines


def test_a_witness_that_follows_leaves_at_the_last_word_of_whoever_led() -> None:
    """Nobody says anything after it: a witness that waited for more stayed for ever."""
    outside = Outside()
    witness = following(outside)
    begun = orders(1, [genesis(witness=True)], to=ME.incarnation)
    witness.heard(Peer(0, 0), member(0).incarnation, begun)
    assert outside.ends == 0
    last = [genesis(witness=True), roster(2, [], witness=True)]
    witness.heard(Peer(0, 0), member(0).incarnation, orders(2, last, to=ME.incarnation))
    assert outside.ends == 1


def test_a_witness_that_followed_stays_for_racks_that_come_too_late_and_says_so() -> None:
    """Whoever led is gone; a rack that is started again would ask nobody until its time is over."""
    outside = Outside()
    witness = following(outside)
    last = [genesis(witness=True), roster(2, [], non_voters=[1], witness=True)]
    witness.heard(Peer(0, 0), member(0).incarnation, orders(2, last, to=ME.incarnation))
    assert outside.ends == 0
    witness.heard(Peer(1, 0), member(1).incarnation, hello(1))
    assert not [each for each in outside.sent if isinstance(each, Refusal)], "of its former life"
    witness.heard(Peer(1, 0), member(1, 1).incarnation, hello(1, life=1))
    (refusal,) = [each for each in outside.sent if isinstance(each, Refusal)]
    assert (refusal.kind, refusal.incarnation) == ("over", member(1, 1).incarnation)
    assert witness.deadline_ns() == outside.time_ns + END_REPEATED_NS
    outside.time_ns += END_REPEATED_NS
    witness.tick()
    assert outside.ends == 1


def test_a_witness_that_was_started_again_leaves_when_it_hears_that_its_job_is_over() -> None:
    """Whoever coordinated died before it gave the new life its seat, and the next one ended the job
    at once: what is said to the former life is all that will be said."""
    for lost, stays_ns in (((), 0), ((1,), END_REPEATED_NS)):
        outside = Outside()
        witness = following(outside)
        last = [genesis(witness=True), roster(2, [], non_voters=lost, witness=True)]
        log = log_of(*last)
        log.decide(2)
        told = replace(
            orders(1, last, to=7), prev=2, chain=log.chain(2), records=(), snapshot=log.snapshot()
        )
        witness.heard(Peer(0, 0), member(0).incarnation, told)
        assert outside.ends == (not stays_ns)
        assert witness.deadline_ns() == (outside.time_ns + stays_ns if stays_ns else None)
        witness.heard(Peer(1, 0), member(1, 1).incarnation, hello(1, life=1))
        (refusal,) = [each for each in outside.sent if isinstance(each, Refusal)]
        assert refusal.kind == "over"
        outside.time_ns += 10 * SECOND
        witness.tick()
        assert not witness.coordinator.proposer.leading, "it founds no other job"
        outside.time_ns += stays_ns
        witness.tick()
        assert outside.ends > 0


def test_a_witness_prints_every_move_of_a_slow_rack() -> None:
    events = [
        event_of(before, Mitigation(1, stage, "rack 1 is slow"))
        for before in (1, 2, 3)
        for stage in (1, 2, 3, 4)
    ]
    lines = printed(*events)
    assert lines == [log_text(event) for event in events]
    assert len({line.split()[0] for line in lines}) == 4


def test_witness_prints_no_event_of_every_round() -> None:
    assert printed(RoundDecided(0, 1), JobFounded((0, 1))) == [
        'genesis racks=0,1 msg="racks 0,1 have met: the job begins"'
    ]


def test_a_witness_whose_port_is_taken_leaves_no_thread_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        before = set(threading.enumerate())
        with pytest.raises(AddressInUse):
            run(f"tcp://127.0.0.1:{other.getsockname()[1]}", 2, "job", diagnostics_dir=tmp_path)
    assert not [each for each in threading.enumerate() if each not in before]
