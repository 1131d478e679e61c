"""The coordinator's soft state of one member; the next report restores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from mend.consensus.log import Log
from mend.coordination.flow import Flow, Portion, ResendPolicy, whole
from mend.coordination.messages import OfferId, Orders, Pace, Pulled, Report
from mend.types import Member


@dataclass
class MemberView:
    """What the coordinator knows of one rack (or of the witness), from its newest messages."""

    member: Member
    heard_ns: int
    lively_ns: int = 0
    """When it was last live. Demotion and eviction count from here."""
    report: Report | None = None
    got: frozenset[OfferId] = frozenset()
    gone: bool = False
    sent: Orders | None = None
    """The newest orders sent to it, without records."""
    sent_ns: int = 0
    serial: int = 0
    vote_ns: int = 0
    """When it may get a vote again, if nothing changes."""
    flow: Flow = field(default_factory=Flow)

    def live(self, now_ns: int, detect_ns: int) -> bool:
        fresh = self.report is None or self.report.fresh
        return fresh and not self.gone and now_ns - self.heard_ns < detect_ns

    def discount(self, slept_ns: int) -> None:
        """The coordinator's process slept for `slept_ns` and could hear nothing meanwhile."""
        self.heard_ns += slept_ns
        self.lively_ns += slept_ns

    def hears(self, report: Report, ballot: int) -> None:
        """Take its newest report, which usually repeats the one before. Its answer to orders counts
        only for orders of `ballot`."""
        known, self.report = self.report, report
        if known is None or known.got is not report.got:
            self.got = frozenset(report.got)
        if report.acceptor_state.promised == ballot:
            self.flow.hears(report.heard)

    def repeats(self, report: Report) -> bool:
        """Whether the report is the newest one, repeats the one before except for the fields that
        always change, and needs no answer."""
        known = self.report
        return (
            known is not None
            and report.serial > known.serial
            and self.flow.calm
            and _lasting(known) == _lasting(report)
        )

    def next_orders(
        self,
        orders: Orders,
        log: Log,
        known: int,
        now_ns: int,
        heartbeat_ns: int,
        detect_ns: int,
        progress: tuple[tuple[Pulled, ...], int] = ((), 0),
    ) -> Orders | None:
        """The state to send, with the records that are due, if there is news or a heartbeat is due.
        `orders`: the part that is the same for all members. `known`: records that the reader is
        known to have; negative: unknown. `progress`: `moving` and `taken`, which are not news by
        themselves."""
        due = now_ns >= self.sent_ns + heartbeat_ns
        if self.flow.full and not due:
            return None
        again = ResendPolicy(detect_ns, 2 * heartbeat_ns)
        if known >= 0:
            portion = self.flow.next(log, known, now_ns, again)
        else:
            portion = whole(log) if due else Portion(log.decided)
        if not (portion or due or orders != self.sent):
            return None
        self.sent, self.sent_ns, self.serial = orders, now_ns, self.serial + 1
        self.flow.went(portion, self.serial, now_ns)
        return replace(
            orders,
            serial=self.serial,
            to=self.member.incarnation,
            prev=portion.prev,
            lineage=log.lineage_at(portion.prev),
            chain=log.chain(portion.prev),
            records=portion.records,
            snapshot=portion.snapshot,
            moving=progress[0],
            taken=progress[1],
        )


def _lasting(report: Report) -> Report:
    return replace(report, serial=0, heard=0, step=0, step_ns=0, pace=Pace(), pulls=())


@dataclass
class Holders:
    """Which racks hold the bytes of which offers, from `MemberView.got`. The cost of an update
    grows with what has changed: with R racks, R racks hold each offer of a round."""

    _racks: dict[OfferId, set[int]] = field(default_factory=dict)
    _seen: dict[int, frozenset[OfferId]] = field(default_factory=dict)

    def follow(self, views: Mapping[int, MemberView]) -> Mapping[OfferId, set[int]]:
        """The racks that hold each offer now."""
        for rack in self._seen.keys() - views.keys():
            self._update(rack, frozenset())
            del self._seen[rack]
        for rack, view in views.items():
            if self._seen.get(rack) is not view.got:
                self._update(rack, view.got)
        return self._racks

    def _update(self, rack: int, got: frozenset[OfferId]) -> None:
        before = self._seen.get(rack, frozenset())
        for offer in got - before:
            self._racks.setdefault(offer, set()).add(rack)
        for offer in before - got:
            racks = self._racks[offer]
            racks.discard(rack)
            if not racks:
                del self._racks[offer]
        self._seen[rack] = got


def view_of(member: Member, known: MemberView | None, now_ns: int) -> MemberView:
    """The view of a seated member. `known`: the view of the member that had the seat before. Its
    serial continues, because a witness may have answered orders to its former life."""
    if known is not None and known.member == member:
        return known
    return MemberView(member, now_ns, now_ns, serial=known.serial if known else 0)
