"""protocol: the member that appends to the log.

Soft state only: everything it knows comes again in the next reports. The coordinator is fixed (the
witness, else rack 0's leader) and its epoch is 1. It decides by its replica of the log and by what
the racks report; it never sees a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mend.protocol.border import first_difference, hello_misfit, plan_hash, report_misfit
from mend.protocol.events import Connect, Effect, Event, Finished, Heard, Note, Send
from mend.protocol.grace import Mean
from mend.protocol.log import Log
from mend.protocol.messages import (
    TEXT_MAX,
    Commit,
    Drop,
    Genesis,
    Hello,
    Offer,
    Orders,
    Refusal,
    Report,
    Roster,
    Seat,
)
from mend.protocol.quorum import hold, quorum
from mend.protocol.round import Round, Scene
from mend.protocol.view import View
from mend.terms import SECOND, WITNESS, Peer

EPOCH = 1
FAREWELL_NS = 3 * SECOND
"""How long the end of the log is repeated to racks that did not confirm it."""

VISITOR = 0xFFFF
"""Rank number under which a rack that is refused is addressed, so that it takes nobody's place."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """`racks` must say hello, orders repeat every heartbeat, `detect_ns` of silence means dead."""

    racks: int
    heartbeat_ns: int
    detect_ns: int


@dataclass
class Coordinator:
    """Pure. `me` is where it runs: Peer(WITNESS, 0) votes as the witness, else it is a leader."""

    me: Peer
    job: str
    options: CoordinatorOptions
    log: Log = field(default_factory=Log)
    views: dict[int, View] = field(default_factory=dict)
    offers: dict[tuple[int, int], Offer] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    contended_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    round_dues: list[int] = field(default_factory=list)
    over_ns: int | None = None

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(event, Heard):
            if isinstance(event.body, Hello):
                self._on_hello(event.peer, event.body, now_ns, effects)
            elif isinstance(event.body, Report):
                self._on_report(event.peer.rack, event.incarnation, event.body, now_ns)
        self._move(now_ns, effects)
        self._send_orders(now_ns, effects)
        return effects

    def deadline_ns(self) -> int | None:
        waits = [
            view.sent_ns + self.options.heartbeat_ns
            for view in self.views.values()
            if not view.gone
        ]
        return min([*waits, *self.round_dues], default=None)

    # -------------------------------------------------------------- what racks say

    def _on_hello(self, peer: Peer, hello: Hello, now_ns: int, effects: list[Effect]) -> None:
        rack, member = peer.rack, hello.seat.member
        misfit = hello_misfit(hello, self.options.racks)
        if member.rack != rack or rack >= self.options.racks:
            misfit = f"rack {member.rack} of a job with {self.options.racks} racks"
        if misfit:
            self._refuse(hello, "racks", misfit, effects)
            return
        known = self.views.get(rack)
        same = known is not None and known.hello.seat.member == member
        if self.log.written.begun:
            if not same:
                detail = (
                    "the job has begun; a restarted or additional rack cannot join it yet. "
                    "Restart all racks"
                )
                self._refuse(hello, "started", detail, effects)
            return
        if known is not None and not same and known.live(now_ns, self.options.detect_ns):
            # A rack that was just started again meets its own former life; wait until that is over.
            since_ns = self.contended_ns.setdefault((rack, member.incarnation), now_ns)
            if now_ns - since_ns > 2 * self.options.detect_ns:
                detail = f"another live process says it is rack {rack} of job {self.job!r}"
                self._refuse(hello, "taken", detail, effects)
            return
        if not same:
            self.views[rack] = View(hello, now_ns)
            effects.append(Connect(peer, hello.seat.address))
            effects.append(Note("hello", {"rack": rack, "address": hello.seat.address}))
        self.views[rack].heard_ns = now_ns
        lowest = self.views[min(self.views)].hello
        for other in sorted(self.views):
            difference = first_difference(lowest, self.views[other].hello)
            if difference:
                self._refuse(
                    self.views[other].hello,
                    "plan",
                    f"rack {other} differs from rack {lowest.seat.member.rack}: {difference}",
                    effects,
                )
                del self.views[other]

    def _refuse(self, hello: Hello, kind: str, detail: str, effects: list[Effect]) -> None:
        rack = hello.seat.member.rack
        visitor = Peer(rack, VISITOR)
        effects.append(Connect(visitor, hello.seat.address))
        refusal = Refusal(hello.seat.member.incarnation, kind, detail[:TEXT_MAX])
        effects.append(Send(visitor, refusal))
        if self.refused.get(rack) != detail:
            self.refused[rack] = detail
            effects.append(Note("refused", {"rack": rack, "cause": kind, "detail": detail}))

    def _on_report(self, rack: int, incarnation: int, report: Report, now_ns: int) -> None:
        view = self.views.get(rack)
        if view is None or view.hello.seat.member.incarnation != incarnation:
            return
        if report_misfit(report, view.hello):
            return
        view.heard_ns = now_ns
        if view.report is not None and report.serial <= view.report.serial:
            return
        view.report, view.gone = report, report.gone
        view.got = frozenset((offer.member.rack, offer.fragment, offer.seq) for offer in report.got)
        if report.gone and not self.log.written.begun:
            del self.views[rack]
            return
        member = view.hello.seat.member
        for offer in report.offers:
            if offer.member == member and self._is_open(offer):
                self.offers[(rack, offer.fragment)] = offer

    def _is_open(self, offer: Offer) -> bool:
        log = self.log.written
        return offer.fragment < len(log.versions) and log.is_open(
            offer.member, offer.fragment, offer.seq
        )

    # -------------------------------------------------------------- deciding

    def _move(self, now_ns: int, effects: list[Effect]) -> None:
        """To a fixed point: a decision lets rounds commit, and a commit may be decided at once."""
        if not self.log.written.begun:
            self._try_genesis(effects)
        before = -1
        while before != (before := self.log.last + self.log.decided):
            self._decide(now_ns, effects)
            if self.log.told.seats and not any(isinstance(r, Roster) for r in self.log.undecided()):
                self._advance_rounds(now_ns, effects)
                self._try_roster(now_ns, effects)
        if self.log.told.over:
            self._farewell(now_ns, effects)
        elif self.views and all(view.gone for view in self.views.values()):
            effects.append(Finished())

    def _try_genesis(self, effects: list[Effect]) -> None:
        if len(self.views) < self.options.racks:
            return
        roster = tuple(self.views[rack].hello.seat for rack in sorted(self.views))
        lowest = self.views[min(self.views)].hello
        self.log.append(Genesis(roster, self.me.rack == WITNESS, plan_hash(lowest), lowest.digests))
        quorum_time, sync_time = Mean(), Mean()
        self.rounds = [Round(p, quorum_time, sync_time) for p in range(lowest.policy.fragments)]
        effects.append(Note("genesis", {"racks": sorted(self.views)}))

    def _decide(self, now_ns: int, effects: list[Effect]) -> None:
        """Index i is decided when a quorum of the roster in force at i has accepted it.

        Nothing is appended behind an undecided Roster, so the roster in force is the decided one
        (Genesis: its own).
        """
        voters = (self.log.told if self.log.told.begun else self.log.written).voters
        accepted = {
            rack: view.report.accepted if view.report else 0 for rack, view in self.views.items()
        }
        accepted[WITNESS] = self.log.last if self.me.rack == WITNESS else 0
        index = self.log.decided
        while index < self.log.last and quorum(
            {rack for rack in accepted if accepted[rack] > index}, voters
        ):
            index += 1
        for record in self.log.decide(index):
            if isinstance(record, Commit):
                self.rounds[record.fragment].decided(now_ns)
                effects.append(
                    Note("decided", {"fragment": record.fragment, "version": record.version})
                )

    def _advance_rounds(self, now_ns: int, effects: list[Effect]) -> None:
        busy = {
            record.fragment for record in self.log.undecided() if isinstance(record, Commit | Drop)
        }
        self.round_dues = []
        around = self._surroundings(now_ns)
        for round_ in self.rounds:
            if round_.fragment in busy:
                continue
            scene = self._scene(round_, around)
            commit = round_.advance(scene, now_ns)
            if commit is None and (due := round_.deadline_ns(scene)) is not None:
                self.round_dues.append(due)
            effects += [Note("fault", {"detail": fault}) for fault in round_.faults]
            round_.faults.clear()
            if commit is not None:
                self.log.append(commit)
                self.offers = {key: o for key, o in self.offers.items() if self._is_open(o)}

    def _surroundings(self, now_ns: int) -> Scene:
        """What all rounds see alike; `_scene` adds what is special to one."""
        log = self.log.told
        seated = {rack: self.views[rack] for rack in sorted(log.seats)}
        live = frozenset(rack for rack in seated if self._live(rack, now_ns))
        reports = {rack: view.report for rack, view in seated.items() if view.report}
        return Scene(
            version=0,
            voters=log.voters,
            policy=next(iter(seated.values())).hello.policy,
            offers=(),
            arrived=(),
            declined=frozenset(),
            contributors=frozenset(seated)
            - {rack for rack, r in reports.items() if r.leaving and r.idle},
            live=live,
            held={},
            step_ns=max((reports[rack].step_ns for rack in reports if rack in live), default=0),
        )

    def _scene(self, round_: Round, around: Scene) -> Scene:
        fragment, version = round_.fragment, self.log.told.versions[round_.fragment]
        racks = sorted(self.log.told.seats)
        offers = tuple(
            self.offers[(rack, fragment)] for rack in racks if (rack, fragment) in self.offers
        )
        arrived = []
        for offer in offers:
            key = (offer.member.rack, fragment, offer.seq)
            holders = {
                rack
                for rack in around.live
                if key in self.views[rack].got or rack == offer.member.rack
            }
            if hold(holders, around.voters) and version - offer.base <= around.policy.max_age:
                arrived.append(offer)
        declined, held = set(), {}
        for rack in racks:
            report = self.views[rack].report
            if report is None:
                continue
            if any(d.fragment == fragment and d.applied == version for d in report.declined):
                declined.add(rack)
            for result in report.held:
                if (result.fragment, result.version) == (fragment, version + 1):
                    held[rack] = (result.attempt, result.digests)
        return replace(
            around,
            version=version,
            offers=offers,
            arrived=tuple(arrived),
            declined=frozenset(declined),
            held=held,
        )

    def _live(self, rack: int, now_ns: int) -> bool:
        return self.views[rack].live(now_ns, self.options.detect_ns)

    # -------------------------------------------------------------- leaving

    def _try_roster(self, now_ns: int, effects: list[Effect]) -> None:
        """The job ends when every live rack is done and holds everything.

        A rack in a hurry leaves alone.
        """
        log = self.log.written
        if not log.seats or self.log.last != self.log.decided:
            return
        seated = {rack: self.views[rack] for rack in sorted(log.seats)}
        live = {rack for rack in seated if self._live(rack, now_ns)}
        reports = {rack: view.report for rack, view in seated.items() if view.report}
        done = {
            rack
            for rack, report in reports.items()
            if report.leaving and report.idle and list(report.versions) == log.versions
        }
        if live and live <= done and not any(rack in live for rack, _ in self.offers):
            self._append_roster((), "all racks are done", effects)
            return
        for rack, report in reports.items():
            if not (report.gone and rack not in live) and not (
                report.leaving and report.hurry and report.idle
            ):
                continue
            rest = {other: seated[other].hello.seat for other in seated if other != rack}
            voters = frozenset(rest) | ({WITNESS} if log.witness else frozenset())
            if rest and all(
                hold(
                    {r for r in rest if r in reports and reports[r].versions[p] >= version}, voters
                )
                for p, version in enumerate(log.versions)
            ):
                self._append_roster(tuple(rest.values()), f"rack {rack} left", effects)
                self.offers = {key: offer for key, offer in self.offers.items() if key[0] != rack}
                return

    def _append_roster(self, seats: tuple[Seat, ...], reason: str, effects: list[Effect]) -> None:
        self.log.append(Roster(self.log.written.roster_number + 1, seats, reason))
        effects.append(
            Note("roster", {"racks": [seat.member.rack for seat in seats], "reason": reason})
        )

    def _farewell(self, now_ns: int, effects: list[Effect]) -> None:
        """The last decision is repeated until everybody has confirmed it, or is not there to."""
        if self.over_ns is None:
            self.over_ns = now_ns
        confirmed = all(
            view.gone or (view.report is not None and view.report.decided >= self.log.last)
            for view in self.views.values()
        )
        if confirmed or now_ns >= self.over_ns + FAREWELL_NS:
            effects.append(Finished())

    # -------------------------------------------------------------- orders

    def _send_orders(self, now_ns: int, effects: list[Effect]) -> None:
        log = self.log
        versions = log.told.versions
        gathers = tuple(
            g for r in self.rounds if versions and (g := r.gather(versions[r.fragment]))
        )
        live = tuple(rack for rack in sorted(self.views) if self._live(rack, now_ns))
        reports = [self.views[rack].report for rack in live]
        settled = tuple(
            min((r.versions[p] if r and p < len(r.versions) else -1 for r in reports), default=-1)
            for p in range(len(versions))
        )
        offers = tuple(self.offers[key] for key in sorted(self.offers))
        missing = (
            ()
            if log.written.begun
            else tuple(r for r in range(self.options.racks) if r not in self.views)
        )
        why = tuple(f"fragment {r.fragment}: {r.why}" for r in self.rounds if r.why)
        if missing:
            why = tuple(
                f"rack {rack} was refused: {self.refused[rack]}" for rack in sorted(self.refused)
            )
        for rack, view in self.views.items():
            if view.gone:
                continue
            prev = min(view.report.accepted if view.report else 0, log.last)
            orders = Orders(
                0,
                EPOCH,
                prev,
                log.chain(prev) if log.reaches(prev) else "",
                log.after(prev),
                log.decided,
                offers,
                gathers,
                settled,
                live,
                missing,
                why,
            )
            if orders != view.sent or now_ns >= view.sent_ns + self.options.heartbeat_ns:
                view.sent, view.sent_ns, view.serial = orders, now_ns, view.serial + 1
                effects.append(Send(Peer(rack, 0), orders.numbered(view.serial)))
