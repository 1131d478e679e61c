"""Who looks is answered, never often, never at the cost of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mend.errors import MendError
from mend.events.base import LoggedEvent
from mend.status.messages import HEAD, JobStatus, Look, decode_view, encode_look
from mend.status.server import (
    ANSWERS_PER_SECOND_MAX,
    LOOKER_NS,
    LOOKERS_MAX,
    VIEW_KEPT_NS,
    WINDOW,
    CounterSample,
    Recent,
    StatusServer,
)
from mend.types import SECOND
from tests.noted import pair
from tests.unit.status.seen import followed, view

LOOK = encode_look(Look(""))


class Desk:
    """An Observed, the clock, and what was said."""

    def __init__(self, shown: Callable[[bool], JobStatus] | None = None) -> None:
        self.now_ns = 100 * SECOND
        self.made = 0
        self.replies: list[tuple[bytes, bytes]] = []
        self.refused: list[str] = []
        self.noted: list[tuple[str, dict[str, object]]] = []
        self.reads = True
        self.observed = StatusServer(
            "run7", shown or self._shown, followed, self._reply, lambda: self.now_ns, self._refuse,
            self._note,
        )  # fmt: skip

    def _shown(self, ended: bool) -> JobStatus:
        self.made += 1
        return view(commits=self.made, state="ended" if ended else "running")

    def _reply(self, route: bytes, frame: bytes) -> bool:
        if self.reads:
            self.replies.append((route, frame))
        return self.reads

    def _refuse(self, error: MendError) -> None:
        self.refused.append(str(error))

    def _note(self, event: LoggedEvent) -> None:
        self.noted.append(pair(event))

    def look(self, route: bytes = b"me", frame: bytes = LOOK) -> JobStatus | None:
        """The answer."""
        before = len(self.replies)
        self.observed.take(route, frame)
        if len(self.replies) == before:
            return None
        to, answer = self.replies[-1]
        assert to == route
        return decode_view(answer)

    def farewell(self) -> list[bytes]:
        before = len(self.replies)
        self.observed.farewell()
        assert {decode_view(f).state for _, f in self.replies[before:]} <= {"ended"}
        return [route for route, _ in self.replies[before:]]


def test_a_look_is_answered_with_what_there_is_now() -> None:
    desk = Desk()
    assert desk.look() == view(commits=1)
    desk.now_ns += SECOND
    assert desk.look() == view(commits=2)


def test_many_who_look_at_once_see_one_view() -> None:
    desk = Desk()
    for number in range(20):
        desk.now_ns += VIEW_KEPT_NS // 40
        assert desk.look(b"%d" % number) == view(commits=1)
    desk.now_ns += VIEW_KEPT_NS
    assert desk.look() == view(commits=2)
    assert desk.made == 2


def test_there_are_only_so_many_answers_in_a_second() -> None:
    desk = Desk()
    for number in range(10 * ANSWERS_PER_SECOND_MAX):
        desk.look(b"%d" % number)
    assert len(desk.replies) == ANSWERS_PER_SECOND_MAX
    desk.now_ns += SECOND
    assert desk.look() is not None


def test_garbage_is_refused_and_counts_as_much_as_a_look() -> None:
    desk = Desk()
    for frame in (
        HEAD,
        HEAD + b"\0" * 4 + b"?",
        LOOK[:-1],
        LOOK + b"\0",
        encode_look(Look("run8")),
    ):
        assert desk.look(frame=frame) is None
    assert len(desk.refused) == 5
    assert desk.refused[-1] == "a look at job 'run8', this is job 'run7'"
    assert desk.look(frame=encode_look(Look("run7"))) == view(commits=1)
    for _ in range(1000):
        desk.look(frame=HEAD)
    assert len(desk.refused) < ANSWERS_PER_SECOND_MAX
    assert desk.look() is None


def test_farewell_goes_to_recent_clients_only() -> None:
    desk = Desk()
    desk.look(b"long ago")
    desk.now_ns += LOOKER_NS + 1
    for route in (b"a", b"b", b"a"):
        desk.look(route)
    assert desk.farewell() == [b"b", b"a"]


def test_only_so_many_are_remembered() -> None:
    desk = Desk()
    for number in range(ANSWERS_PER_SECOND_MAX):
        desk.look(b"%d" % number)
    told = desk.farewell()
    assert told == [b"%d" % n for n in range(ANSWERS_PER_SECOND_MAX)][-LOOKERS_MAX:]


def test_farewell_omits_a_client_that_does_not_read() -> None:
    desk = Desk()
    desk.reads = False
    desk.look(b"stuck")
    desk.reads = True
    assert desk.farewell() == []


def test_a_bug_in_what_is_shown_stops_nobody_and_is_said_once() -> None:
    def broken(_: bool) -> JobStatus:
        raise ZeroDivisionError("a bug")

    desk = Desk(broken)
    for _ in range(3):
        desk.now_ns += SECOND
        assert desk.look() is None
    desk.farewell()
    assert desk.noted == [("observer-unanswered", {"reason": "ZeroDivisionError('a bug')"})]


def test_recent_is_some_seconds_and_begins_with_the_first_step() -> None:
    facts: dict[str, Any] = {"at": 0, "step": 0}
    recent = Recent(
        lambda: CounterSample(facts["at"] * SECOND, facts["step"], 0, facts["at"] * SECOND, 0, 0, 0)
    )
    for at, step in ((1, 0), (2, 0), (3, 1), (4, 11)):
        facts |= {"at": at, "step": step}
        recent.note()
    facts |= {"at": 5, "step": 21}
    then, now = recent.span()
    assert (then.step, then.at_ns, now.step, now.at_ns) == (1, 3 * SECOND, 21, 5 * SECOND)
    for at in range(5, 20):
        facts |= {"at": at, "step": 10 * at}
        recent.note()
    then, now = recent.span()
    assert (now.step - then.step, now.at_ns - then.at_ns) == (
        10 * (WINDOW - 1),
        (WINDOW - 1) * SECOND,
    )


def test_before_the_first_step_nothing_is_recent() -> None:
    recent = Recent(lambda: CounterSample(SECOND, 0, 0, 0, 0, 0, 0))
    recent.note()
    then, now = recent.span()
    assert then == now
