"""The state of one doctor in a meeting: who is there, and who pulls from whom. Pure.

The lowest rack that is there orders the turns; its orders also reach racks that hear it only
through others. A rack that does not come is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mend.coordination import wire
from mend.errors import WireError
from mend.status import messages as status_messages
from mend.tools.doctor.meeting_messages import (
    About,
    Envelope,
    Here,
    Ping,
    Pong,
    Pull,
    Trips,
    Turn,
    decode,
    encode,
)
from mend.types import MS, SECOND

PINGS = 50
"""Round trips that a median is made of."""

PINGS_MAX = 2 * PINGS
"""Sent to one rack at most, as some may be lost."""

LIVE_NS = 3 * SECOND
"""A rack that was not heard for so long is gone."""

TURN_SPARE_NS = 12 * SECOND
"""Added to the measuring time of a turn, for connections that nobody answers."""

LATE_NS = 5 * SECOND
FAREWELL_NS = 2 * SECOND
STRANGERS_MAX = 16


@dataclass(frozen=True, slots=True)
class Rules:
    """wait_ns: how long to wait for racks that are missing. pull_ns: how long a turn measures;
    0: nothing is pulled."""

    job: str
    rack: int
    racks: int
    wait_ns: int
    pull_ns: int


@dataclass
class Other:
    """One other doctor, in the life that was heard first."""

    nonce: int
    heard_ns: int
    here: Here | None = None
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Pings under way: number -> (clock, time of day)."""
    sent: int = 0
    samples: list[tuple[int, int]] = field(default_factory=list)
    """(round trip, its time of day less ours)."""

    def trips(self, rack: int) -> Trips:
        if not self.samples:
            return Trips(rack, 0, 0, 0, 0)
        took = sorted(trip for trip, _ in self.samples)
        p99 = took[math.ceil(0.99 * len(took)) - 1]
        _, offset = min(self.samples)  # the quickest was held up least on either way
        return Trips(rack, len(took), int(statistics.median(took)), p99, offset)


class MeetingState:
    """The state of one doctor. `now_ns` is a clock that never jumps, `wall_ns` the time of day."""

    def __init__(self, rules: Rules, about: About, nonce: int, now_ns: int) -> None:
        self.rules, self.about, self.nonce = rules, about, nonce
        self.begun_ns = now_ns
        self.others: dict[int, Other] = {}
        self.strangers: set[tuple[int, str]] = set()
        """(rack, job) of doctors of other jobs, and of racks that this job does not have."""
        self.jobs: set[tuple[int, str]] = set()
        """(rack, job) of jobs whose frames came here."""
        self.doubles: set[int] = set()
        """Racks that two processes say to be."""
        self.garbage = 0
        self.pulls: list[Pull] = []
        self.turn: Turn | None = None
        self._turn_ns = now_ns
        self._did: dict[int, int] = {}
        self._ordered: list[Turn] = []
        self._serial = 0

    # ------------------------------------------------------------------ hearing and saying

    def hear(self, frame: bytes, now_ns: int, wall_ns: int) -> tuple[int, bytes] | None:
        """Take in a frame. Returns an answer to send at once, with the rack that it is for."""
        try:
            envelope = decode(frame)
        except WireError:
            self._not_ours(frame)
            return None
        rack, other = envelope.rack, self._sender(envelope, now_ns)
        if other is None:
            return None
        other.heard_ns = now_ns
        match envelope.body:
            case Ping(number=number):
                return rack, self._frame(Pong(number, wall_ns, wall_ns))
            case Pong() as pong:
                self._take(other, pong, now_ns, wall_ns)
            case Here() as here if other.here is None or here.serial > other.here.serial:
                other.here = here
                if here.turn is not None:
                    self._adopt(here.turn, now_ns)
                    self._learn(here.turn, here.did)
        return None

    def _not_ours(self, frame: bytes) -> None:
        if frame.startswith(status_messages.HEAD):
            return  # somebody looks whether a job runs here, as every doctor does first
        try:
            envelope = wire.decode(frame)
        except WireError:
            self.garbage += 1
            return
        if len(self.jobs) < STRANGERS_MAX:
            self.jobs.add((envelope.rack, envelope.job))

    def _sender(self, envelope: Envelope, now_ns: int) -> Other | None:
        """None: not one to listen to."""
        rack, rules = envelope.rack, self.rules
        if envelope.job != rules.job or rack >= rules.racks:
            if len(self.strangers) < STRANGERS_MAX:
                self.strangers.add((rack, envelope.job))
            return None
        if rack == rules.rack:
            if envelope.nonce != self.nonce:
                self.doubles.add(rack)
            return None
        known = self.others.get(rack)
        if known is not None and known.nonce == envelope.nonce:
            return known
        if known is not None and now_ns - known.heard_ns < LIVE_NS:
            self.doubles.add(rack)
            return None
        self.others[rack] = Other(envelope.nonce, now_ns)
        return self.others[rack]

    def _take(self, other: Other, pong: Pong, now_ns: int, wall_ns: int) -> None:
        """Source: RFC 5905, section 8 (offset and delay of four timestamps)."""
        asked = other.asked.pop(pong.number, None)
        if asked is None:
            return
        asked_ns, asked_wall_ns = asked
        trip = max(0, now_ns - asked_ns - (pong.said_ns - pong.heard_ns))
        offset = (pong.heard_ns - asked_wall_ns + pong.said_ns - wall_ns) // 2
        other.samples.append((trip, offset))

    def ping(self, rack: int, now_ns: int, wall_ns: int) -> bytes | None:
        """The next one for that rack. None: it has answered enough, or is not heard."""
        other = self.others.get(rack)
        enough = other is None or len(other.samples) >= PINGS or other.sent >= PINGS_MAX
        if other is None or enough or other.here is None or self.turn is not None:
            return None
        other.sent += 1
        other.asked[other.sent] = now_ns, wall_ns
        return self._frame(Ping(other.sent))

    def here(self, now_ns: int) -> bytes:
        """The state, for everybody."""
        self._serial += 1
        left_ns = max(0, self.begun_ns + self.rules.wait_ns - now_ns)
        return self._frame(
            Here(
                serial=self._serial,
                about=self.about,
                heard=tuple((rack, self.others[rack].nonce) for rack in self.live(now_ns)),
                left_ms=left_ns // MS,
                trips=tuple(self.others[rack].trips(rack) for rack in sorted(self.others)),
                turn=self.turn,
                did=tuple(sorted(self._did.items())),
                pulls=tuple(self.pulls),
            )
        )

    def _frame(self, body: Here | Ping | Pong) -> bytes:
        return encode(Envelope(self.rules.job, self.rules.rack, self.nonce, body))

    # ------------------------------------------------------------------ who is there

    def live(self, now_ns: int) -> list[int]:
        """Racks that are heard at present, ascending."""
        return [
            rack
            for rack in sorted(self.others)
            if self.others[rack].here is not None and now_ns - self.others[rack].heard_ns < LIVE_NS
        ]

    def hears_us(self, rack: int) -> bool:
        """Return whether the rack said so when it was heard last."""
        here = self.others[rack].here if rack in self.others else None
        return here is not None and (self.rules.rack, self.nonce) in here.heard

    def complete(self, now_ns: int) -> bool:
        """Everybody is there, hears everybody, and has taken its round trips."""
        heres = [self.others[rack].here for rack in self.live(now_ns)]
        rest = self.rules.racks - 1
        if len(heres) < rest or not all(map(self.hears_us, self.others)):
            return False
        taken = [other.trips(0).count for other in self.others.values()]
        taken += [trips.count for here in heres if here for trips in here.trips]
        return (
            all(here is not None and len(here.heard) == len(here.trips) == rest for here in heres)
            and min(taken, default=PINGS) >= PINGS
        )

    # ------------------------------------------------------------------ turns

    def step(self, now_ns: int) -> None:
        """Let time pass: begin the turns, or go on to the next, where that is up to us."""
        live, rack = self.live(now_ns), self.rules.rack
        if self.turn is None:
            if live and live[0] < rack:
                return
            if self.complete(now_ns) or self._due(live, now_ns):
                self._ordered = turns_of(rack, self._participants(live), self.rules.pull_ns // MS)
                self._adopt(self._ordered[0], now_ns)
        elif self.turn.by == rack and not self.turn.last:
            pullers = {puller for puller, _ in self.turn.pairs}
            done = all(self._did.get(puller, 0) >= self.turn.number for puller in pullers)
            if done or now_ns - self._turn_ns > self.turn.ms * MS + TURN_SPARE_NS:
                self._adopt(self._ordered[self.turn.number], now_ns)

    def _due(self, live: Sequence[int], now_ns: int) -> bool:
        """Return whether to stop waiting: the first whose patience ends decides for all."""
        heres = (self.others[rack].here for rack in live)
        return now_ns - self.begun_ns >= self.rules.wait_ns or any(
            here is not None and here.left_ms == 0 for here in heres
        )

    def _participants(self, live: Iterable[int]) -> list[int]:
        """Return the racks that pull and are pulled from: those that an order reaches, maybe
        through another rack, except for the unwilling. Empty if this rack is unwilling."""
        if not self.about.serves:
            return []
        near = [rack for rack in live if self.hears_us(rack)]
        present, unwilling = {self.rules.rack, *near}, set()
        for rack in near:
            here = self.others[rack].here
            if here is not None:
                present |= {each for each, _ in here.heard}
                unwilling |= set() if here.about.serves else {rack}
        return sorted(rack for rack in present - unwilling if rack < self.rules.racks)

    def _adopt(self, turn: Turn, now_ns: int) -> None:
        mine = self.turn
        if turn.by == self.rules.rack and turn not in self._ordered:
            return  # an order of this rack's former life
        if mine is not None and (turn.by, -turn.number) >= (mine.by, -mine.number):
            return
        if mine is not None and turn.by != mine.by:
            self._did.clear()
        self.turn, self._turn_ns = turn, now_ns

    def _learn(self, turn: Turn, did: Iterable[tuple[int, int]]) -> None:
        if self.turn is not None and turn.by == self.turn.by:
            for rack, number in did:
                if rack < self.rules.racks:
                    self._did[rack] = max(number, self._did.get(rack, 0))

    def wanted(self) -> tuple[Turn, list[int]] | None:
        """Return the turn and the racks to pull from. None: nothing is left to do in this turn."""
        turn, rack = self.turn, self.rules.rack
        if turn is None or self._did.get(rack, 0) >= turn.number:
            return None
        holders = [holder for puller, holder in turn.pairs if puller == rack]
        return (turn, holders) if holders else None

    def pulled(self, turn: Turn, found: Sequence[Pull]) -> None:
        """Note the result. A turn that was given up meanwhile still counts as measured."""
        self.pulls += found
        if self.turn is not None and turn.by == self.turn.by:
            rack = self.rules.rack
            self._did[rack] = max(turn.number, self._did.get(rack, 0))

    def over(self, now_ns: int) -> bool:
        """Everything is measured and told, or nobody is left who would go on."""
        turn, since_ns = self.turn, now_ns - self._turn_ns
        if turn is None:
            return now_ns - self.begun_ns > self.rules.wait_ns + LATE_NS
        if not turn.last:
            return since_ns > turn.ms * MS + TURN_SPARE_NS + LATE_NS
        heres = [self.others[rack].here for rack in self.live(now_ns)]
        told = all(here is not None and here.turn is not None and here.turn.last for here in heres)
        return told or since_ns > FAREWELL_NS


def turns_of(by: int, present: Sequence[int], ms: int) -> list[Turn]:
    """First each pair alone, one direction at a time, as many pairs at once as there are without a
    rack in two of them; then everybody from everybody, as in a round of training."""
    rounds = _tournament(present) if len(present) > 1 else []
    plans: list[tuple[list[tuple[int, int]], bool]] = []
    for pairs in rounds:
        plans.append((pairs, False))
        plans.append(([(holder, puller) for puller, holder in pairs], False))
    if plans:
        everybody = [(one, other) for one in present for other in present if one != other]
        plans.append((everybody, True))
    plans.append(([], False))
    return [
        Turn(by, number, tuple(pairs), ms, together, number == len(plans))
        for number, (pairs, together) in enumerate(plans, 1)
    ]


def _tournament(present: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair exactly once. Source: the circle method (Kirkman 1847)."""
    seats: list[int | None] = [*present, *([None] if len(present) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in facing if a is not None and b is not None])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds
