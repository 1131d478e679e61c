"""Doctors that meet under an invented clock: who is there, whose turn it is, when it is over."""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations

import pytest
from msgspec.structs import replace

from mend.coordination import wire
from mend.coordination.messages import Envelope as JobEnvelope
from mend.coordination.messages import Refusal
from mend.status.messages import Look, encode_look
from mend.tools.doctor.meeting_messages import Envelope, Ping, Pull, decode, encode
from mend.tools.doctor.meeting_state import (
    FAREWELL_NS,
    LATE_NS,
    LIVE_NS,
    PINGS,
    STRANGERS_MAX,
    TURN_SPARE_NS,
    MeetingState,
    Rules,
    turns_of,
)
from mend.types import MS, SECOND
from tests.unit.tools.test_doctor_meeting_messages import ABOUT

BEAT_NS = 100 * MS
WAIT_NS = 10 * SECOND


class Room:
    """Racks that hear each other after `way_ns`, but for the ways in `cut`. Every rack's time of
    day is its number in seconds ahead. A pull takes two beats."""

    def __init__(
        self, racks: int, present: Collection[int] | None = None,
        cut: Collection[tuple[int, int]] = (), way_ns: int = 5 * MS,
        unwilling: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.now_ns, self.cut, self.way_ns = 0, set(cut), way_ns
        self.states = {
            rack: MeetingState(
                Rules("job", rack, racks, WAIT_NS, SECOND),
                replace(ABOUT, serves=rack not in unwilling), 100 + rack, 0,
            )
            for rack in (range(racks) if present is None else present)
        }  # fmt: skip
        self.over: dict[int, int] = {}
        self._mail: list[tuple[int, int, int, bytes]] = []
        self._pulling: dict[int, int] = {}

    def wall_ns(self, rack: int) -> int:
        return self.now_ns + (rack + 1000) * SECOND

    def send(self, source: int, sink: int, frame: bytes) -> None:
        if (source, sink) not in self.cut and sink in self.states:
            self._mail.append((self.now_ns + self.way_ns, source, sink, frame))

    def leave(self, rack: int) -> None:
        del self.states[rack]

    def run(self, until_ns: int) -> Room:
        while self.now_ns < until_ns and self.states.keys() - self.over.keys():
            self.now_ns += 5 * MS
            self._deliver()
            for rack, state in self.states.items():
                if rack not in self.over:
                    self._live(rack, state)
        return self

    def _deliver(self) -> None:
        due = [mail for mail in self._mail if mail[0] <= self.now_ns]
        self._mail = [mail for mail in self._mail if mail[0] > self.now_ns]
        for _, _, sink, frame in due:
            if sink in self.states and sink not in self.over:
                said = self.states[sink].hear(frame, self.now_ns, self.wall_ns(sink))
                if said is not None:
                    self.send(sink, said[0], said[1])

    def _live(self, rack: int, state: MeetingState) -> None:
        now_ns = self.now_ns
        state.step(now_ns)
        others = [other for other in self.states if other != rack]
        for other in others:
            if (frame := state.ping(other, now_ns, self.wall_ns(rack))) is not None:
                self.send(rack, other, frame)
        wanted = state.wanted()
        if wanted is not None and now_ns >= self._pulling.setdefault(rack, now_ns + 2 * BEAT_NS):
            turn, holders = wanted
            del self._pulling[rack]
            state.pulled(turn, [Pull(turn.number, h, turn.together, 8, 9, "") for h in holders])
        if state.over(now_ns):
            self.over[rack] = now_ns
        if now_ns % BEAT_NS == 0 or rack in self.over:
            for other in others:
                self.send(rack, other, state.here(now_ns))


def test_two_meet_measure_and_leave_together() -> None:
    room = Room(2).run(60 * SECOND)
    assert set(room.over) == {0, 1}
    assert max(room.over.values()) < 4 * SECOND
    first, second = room.states[0], room.states[1]
    assert [(pull.holder, pull.together) for pull in first.pulls] == [(1, False), (1, True)]
    assert [(pull.holder, pull.together) for pull in second.pulls] == [(0, False), (0, True)]
    here = first.others[1].here
    assert here is not None
    assert here.pulls == tuple(second.pulls), "each knows what the other measured"


def test_the_offset_of_the_clocks_is_theirs_less_ours() -> None:
    room = Room(2, way_ns=20 * MS).run(60 * SECOND)
    trips = room.states[0].others[1].trips(1)
    assert trips.count >= PINGS
    assert trips.offset_ns == pytest.approx(SECOND, abs=6 * MS)
    assert trips.p50_ns == pytest.approx(40 * MS, abs=6 * MS)
    assert trips.p50_ns <= trips.p99_ns


@pytest.mark.parametrize("racks", [2, 3, 4, 5, 8])
def test_every_direction_is_measured_alone_once_and_all_at_the_end(racks: int) -> None:
    turns = turns_of(0, range(racks), 1000)
    alone = [pair for turn in turns if not turn.together for pair in turn.pairs]
    assert sorted(alone) == sorted(permutations(range(racks), 2))
    for turn in turns[:-2]:
        busy = [rack for pair in turn.pairs for rack in pair]
        assert len(busy) == len(set(busy)), "no rack is in two pairs at a time"
    assert sorted(turns[-2].pairs) == sorted(permutations(range(racks), 2))
    assert turns[-2].together
    assert [turn.last for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert [turn.number for turn in turns] == list(range(1, len(turns) + 1))


def test_who_is_missing_is_waited_for_and_no_longer() -> None:
    room = Room(3, present=(0, 2)).run(60 * SECOND)
    assert set(room.over) == {0, 2}
    assert all(WAIT_NS <= when < WAIT_NS + 5 * SECOND for when in room.over.values())
    assert {pull.holder for pull in room.states[0].pulls} == {2}
    assert room.states[0].hears_us(2)
    assert not room.states[0].hears_us(1)


def test_nobody_comes() -> None:
    room = Room(2, present=(1,)).run(60 * SECOND)
    assert room.over[1] < WAIT_NS + SECOND
    assert room.states[1].pulls == []


def test_one_direction_fails() -> None:
    room = Room(2, cut={(0, 1)}).run(60 * SECOND)
    deaf, heard = room.states[1], room.states[0]
    assert deaf.others == {}
    assert heard.others[1].here is not None
    assert not heard.hears_us(1)
    assert heard.pulls == [], "nobody is ordered to do what no order reaches"
    assert max(room.over.values()) <= WAIT_NS + FAREWELL_NS + SECOND


def test_orders_reach_a_rack_through_another() -> None:
    """0 and 1 do not hear each other; 2 hears both, so all follow 0, and all end."""
    room = Room(3, cut={(0, 1), (1, 0)}).run(90 * SECOND)
    assert set(room.over) == {0, 1, 2}
    first, second = room.states[0].turn, room.states[1].turn
    assert first is not None
    assert first == second
    assert first.by == 0
    assert first.last
    assert {pull.holder for pull in room.states[1].pulls} == {0, 2}, "it tries what it is told"


def test_the_one_that_orders_dies() -> None:
    room = Room(3).run(1200 * MS)
    assert room.states[1].turn is not None
    room.leave(0)
    room.run(120 * SECOND)
    assert {1, 2} <= set(room.over)
    assert max(room.over.values()) < 2 * SECOND + SECOND + TURN_SPARE_NS + LATE_NS + FAREWELL_NS


def test_who_wants_no_bandwidth_is_left_out_of_it() -> None:
    room = Room(3, unwilling={1}).run(60 * SECOND)
    assert {pull.holder for pull in room.states[0].pulls} == {2}
    assert room.states[1].pulls == []
    assert all(state.pulls == [] for state in Room(2, unwilling={0}).run(SECOND).states.values())


# ------------------------------------------------------------------ those that do not belong


def alone() -> MeetingState:
    return MeetingState(Rules("job", 0, 2, WAIT_NS, SECOND), ABOUT, 100, 0)


def from_(rack: int, *, job: str = "job", nonce: int = 7) -> bytes:
    return encode(Envelope(job, rack, nonce, Ping(1)))


def test_another_job_and_a_rack_too_many_are_noted_and_not_answered() -> None:
    state = alone()
    assert state.hear(from_(1, job="other"), 0, 0) is None
    assert state.hear(from_(2), 0, 0) is None
    assert state.strangers == {(1, "other"), (2, "job")}
    assert state.others == {}


def test_two_that_say_they_are_the_same_rack() -> None:
    state = alone()
    assert state.hear(from_(1, nonce=7), 0, 0) is not None
    assert state.hear(from_(1, nonce=8), SECOND, 0) is None
    assert state.doubles == {1}
    state.hear(from_(0, nonce=9), SECOND, 0)
    assert state.doubles == {0, 1}


def test_a_doctor_that_was_started_again_takes_its_former_place() -> None:
    state = alone()
    state.hear(from_(1, nonce=7), 0, 0)
    state.hear(from_(1, nonce=8), LIVE_NS, 0)
    assert state.others[1].nonce == 8
    assert state.doubles == set()


def test_the_one_that_orders_is_started_again_while_others_still_measure() -> None:
    """It took up an order of its former life, had none to follow it, and ended with an error."""
    room = Room(2)
    while room.states[1].turn is None or room.states[1].turn.number < 2:
        room.run(room.now_ns + BEAT_NS)
    rules, about = room.states[0].rules, room.states[0].about
    room.states[0] = MeetingState(rules, about, 999, room.now_ns)
    room.run(room.now_ns + 100 * SECOND)
    assert room.over.keys() == {0, 1}
    assert room.states[1].doubles == {0}, "the other one says so"


def test_a_job_that_runs_is_recognized_and_garbage_is_counted() -> None:
    state = alone()
    state.hear(wire.encode(JobEnvelope("train", 1, 0, 5, Refusal(1, "plan", "x"))), 0, 0)
    for garbage in (b"", b"mnd", b"mdr\x01", bytes(100)):
        state.hear(garbage, 0, 0)
    state.hear(encode_look(Look("")), 0, 0)  # no garbage: every doctor looks first
    assert state.jobs == {(1, "train")}
    assert state.garbage == 4


def test_strangers_fill_no_memory() -> None:
    state = alone()
    for number in range(1000):
        state.hear(from_(1, job=f"j{number}"), 0, 0)
        state.hear(wire.encode(JobEnvelope(f"j{number}", 1, 0, 5, Refusal(1, "plan", "x"))), 0, 0)
    assert len(state.strangers) == len(state.jobs) == STRANGERS_MAX


def test_an_answer_that_nobody_asked_for_measures_nothing() -> None:
    room = Room(2).run(500 * MS)
    state = room.states[0]
    taken = len(state.others[1].samples)
    answer = room.states[1].hear(encode(Envelope("job", 0, 100, Ping(77_777))), room.now_ns, 0)
    assert answer is not None
    assert decode(answer[1]).rack == 1
    state.hear(answer[1], room.now_ns, 0)
    assert len(state.others[1].samples) == taken
