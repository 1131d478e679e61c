"""Local rank 0 of a rack: aggregates its ranks into one report, relays orders to them.

The leader is the rack's voter: it keeps the replica of the log, follows whoever coordinates, and
passes decided records on to its ranks.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.log import Log
from mend.consensus.records import BAD_MAX, Offer, Record
from mend.coordination.acceptor_host import Follower, ways_to_leaders
from mend.coordination.donors import asked_of, copies_of_rack, copy_for
from mend.coordination.events import Effect, Event, Fail, Heard, Note, Send, Summed
from mend.coordination.flow import Again, Flow, Portion
from mend.coordination.marks import cut_of_rack
from mend.coordination.messages import (
    LIVES_MAX,
    Bad,
    Challenge,
    Declined,
    Held,
    Hello,
    OfferId,
    Orders,
    Pace,
    Part,
    Prepare,
    RankOrders,
    RankReport,
    Refusal,
    Report,
    Total,
)
from mend.coordination.slow import pace_of_rack, verdict_of_rack
from mend.coordination.sums import Totals
from mend.coordination.validation import format_misfit, orders_misfit, rank_report_misfit
from mend.types import SECOND, WITNESS, Member, Peer, life_of

PROGRESS_NS = 5 * SECOND

_FAULTS = {"plan": "PlanMismatch", "resume": "CheckpointError"}


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """`peers`: leaders of the other racks, one of which may coordinate when the founder does not
    answer."""

    heartbeat_ns: int
    detect_ns: int
    start_timeout_ns: int
    peers: tuple[Peer, ...] = ()


@dataclass
class Leader:
    """Pure. `hello` is what this rack says of itself; `coordinator`: who founds the job."""

    hello: Hello
    coordinator: InitVar[Peer]
    options: LeaderOptions
    started_ns: int
    coordinator_address: str = ""
    acceptor: Acceptor = field(default_factory=Acceptor)
    ranks: dict[int, RankReport] = field(default_factory=dict)
    heard_ns: dict[int, int] = field(default_factory=dict)
    orders: Orders | None = None
    hello_ns: int | None = None
    seated: bool = False
    declined: dict[int, Declined] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    silent: bool = False
    failure: tuple[str, str] = ("", "")
    progress_ns: int = 0
    asker: int | None = None
    """Who has asked, as it has a former life of this rack in its log."""
    told: tuple[str, ...] = ()
    """Refusals that `waiting` has named."""
    sent: dict[Peer, Report | RankOrders] = field(default_factory=dict)
    sent_ns: dict[Peer, int] = field(default_factory=dict)
    flows: dict[int, Flow] = field(default_factory=dict)
    """By rank: what of the log it has been sent."""
    serial: int = 0

    def __post_init__(self, coordinator: Peer) -> None:
        self.follower = Follower(self.member, self.acceptor, coordinator, self.options.detect_ns)
        self.founder = coordinator
        self.ranks_configured = len(self.hello.seat.lanes)
        self._again = Again(self.options.detect_ns, self.options.detect_ns)

    @property
    def log(self) -> Log:
        return self.acceptor.log

    @property
    def member(self) -> Member:
        return self.hello.seat.member

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(event, Heard):
            self._on_heard(event, now_ns, effects)
        elif isinstance(event, Summed):
            effects += self.totals.summed(event)
        self._watch(now_ns, effects)
        if not self._is_seated():
            self._say_hello(now_ns, effects)
        self._tell_coordinator(now_ns, effects)
        orders = self._rank_orders(self._totals(effects))
        for rank in range(self.ranks_configured):
            self._tell(rank, orders, now_ns, effects)
        return effects

    def deadline_ns(self) -> int | None:
        return min(self.sent_ns.values(), default=self.started_ns) + self.options.heartbeat_ns

    def left(self) -> bool:
        """Whether the log says that this rack is no member any more."""
        return self._is_seated() and self.log.committed.member(self.member.rack) != self.member

    def _is_seated(self) -> bool:
        """Whether this rack has a decided seat, or had one. Before that the job may go on without
        it, and with another log: it keeps asking, and its ranks read nothing."""
        self.seated = self.seated or not self.follower.homeless()
        return self.seated

    # -------------------------------------------------------------- what is said to us

    def _on_heard(self, event: Heard, now_ns: int, effects: list[Effect]) -> None:
        body = event.body
        if isinstance(body, RankReport):
            self._on_rank(event, body, now_ns)
        elif isinstance(body, Orders) and self.follower.addressed(event.peer, body):
            misfit = orders_misfit(body, self.hello, self.log.appended.begun)
            if not misfit:
                self._on_orders(event.peer, event.incarnation, body, now_ns, effects)
            elif format_misfit(body.records) and not self.failure[0]:
                remedy = "Run the same mend on all racks and the witness."
                self._fail("Refused", f"the coordinator has {misfit}. {remedy}", effects)
        elif isinstance(body, Prepare):
            vote = self.follower.asked(event.peer, body, now_ns)
            if vote is not None:
                effects.append(Send(event.peer, replace(vote, held=self._versions())))
        elif isinstance(body, Challenge) and body.to == self.member.incarnation:
            self._answer(event.peer, body.seated)
        elif isinstance(body, Refusal) and event.peer in self._coordinators(now_ns):
            mine = body.incarnation == self.member.incarnation
            # Who has a seat is in: whatever says no to it is not the coordinator it follows.
            if mine and not self._is_seated() and not self.failure[0]:
                self._fail(_FAULTS.get(body.kind, "Refused"), body.detail, effects)

    def _on_rank(self, event: Heard, report: RankReport, now_ns: int) -> None:
        mine = Member(event.peer.rack, event.incarnation) == self.member
        if not mine or event.peer.rank >= self.ranks_configured:
            return
        if rank_report_misfit(report, self.hello.policy.fragments):
            return
        self.heard_ns[event.peer.rank] = now_ns
        known = self.ranks.get(event.peer.rank)
        if known is None or report.serial > known.serial:
            self.ranks[event.peer.rank] = report

    def _on_orders(
        self, peer: Peer, incarnation: int, orders: Orders, now_ns: int, effects: list[Effect]
    ) -> None:
        roster = self.log.appended.roster_number if self.log.appended.begun else -1
        before = self.follower.coordinator
        if not self.follower.follow(peer, incarnation, orders, now_ns, effects):
            return
        self.orders = orders
        if self.follower.coordinator != before:
            self.sent.pop(before, None)
            self.sent_ns.pop(before, None)
        if self.log.appended.begun and self.log.appended.roster_number != roster:
            effects += ways_to_leaders(self.log.appended, self.member.rack)

    def _watch(self, now_ns: int, effects: list[Effect]) -> None:
        """Notice a coordinator that is silent, or a start that takes too long."""
        if self.log.committed.begun:
            silent = now_ns - (self.follower.orders_ns or self.started_ns) > self.options.detect_ns
            if silent != self.silent:
                self.silent = silent
                effects.append(
                    Note(
                        "coordinator-silent" if silent else "coordinator-back",
                        {"peer": self._where()},
                    )
                )
            return
        waited_ns = now_ns - self.started_ns
        if waited_ns > self.options.start_timeout_ns and not self.failure[0]:
            waited = f"after {waited_ns // SECOND} s: {self._start_reason()}"
            self._fail("StartTimeout", waited, effects)
            return
        refused = self.orders.why if self.orders and self.orders.missing else ()
        due = now_ns - (self.progress_ns or self.started_ns) >= PROGRESS_NS
        if due or not set(refused) <= set(self.told):  # a refusal is said at once
            self.progress_ns, self.told = now_ns, refused
            effects.append(
                Note("waiting", {"for": self._start_reason(), "seconds": waited_ns // SECOND})
            )

    def _fail(self, kind: str, detail: str, effects: list[Effect]) -> None:
        """This rack cannot go on; its other ranks hear it with their next orders."""
        self.failure = (kind, detail)
        effects.append(Fail(kind, detail))

    def _start_reason(self) -> str:
        if self.orders is None and self.asker is not None:
            who = "the witness" if self.asker == WITNESS else f"rack {self.asker}"
            return (
                f"{who} knows this job, in which a former life of this rack has a seat, and nobody "
                "leads it: every rack that is silent has to be started again, or retired (mend "
                "retire)"
            )
        if self.orders is None:
            return (
                f"no answer from the coordinator ({self._where()}); is it running, is the address "
                "right (sideband_peers, witness_addr), is a firewall between, is the key the same "
                "(key_file); or is the job over "
                "(then nobody is left to answer: start all racks again, and the witness)"
            )
        if self.orders.missing:
            absent = "no hello from rack " + ", ".join(map(str, self.orders.missing))
            advice = "start it with the same job_id, racks and addresses"
            return "; ".join([absent, *(self.orders.why or (advice,))])
        silent = sorted(set(range(self.hello.policy.racks)) - set(self.orders.live))
        without = f", and rack {', '.join(map(str, silent))} is silent" if silent else ""
        return f"every rack has to vote for the first record of the log{without}"

    def _where(self) -> str:
        """The coordinator, for people."""
        rack = self.follower.coordinator.rack
        name = "the witness" if rack == WITNESS else f"rack {rack}"
        seat = self.log.appended.seats.get(rack)
        address = seat.address if seat else self.coordinator_address
        return f"{name} at {address}" if address else name

    def why(self) -> tuple[str, ...]:
        """Why nothing commits, as far as it is known here."""
        if self.silent:
            return (f"the coordinator ({self._where()}) is silent",)
        return self.orders.why if self.orders else ()

    # -------------------------------------------------------------- what we say

    def _say_hello(self, now_ns: int, effects: list[Effect]) -> None:
        due = self.hello_ns is None or now_ns >= self.hello_ns + self.options.heartbeat_ns
        if due and not self.failure[0]:
            self.hello_ns = now_ns
            effects += [Send(peer, self.hello) for peer in self._coordinators(now_ns)]

    def _answer(self, peer: Peer, seated: int) -> None:
        """That life of this rack is over: this one has heard of it. Said at once."""
        self.asker = peer.rack
        after = self.hello.after
        if seated != life_of(self.member) and seated not in after:
            self.hello = replace(self.hello, after=(*after, seated)[-LIVES_MAX:])
            self.hello_ns = None

    def _coordinators(self, now_ns: int) -> tuple[Peer, ...]:
        """Who may coordinate. A rack that comes back to a running job looks for the one who does;
        its founder may be gone, or be started again and wait in vain for everybody."""
        first = (self.follower.coordinator,)
        if now_ns - self.started_ns <= self.options.detect_ns:
            return first
        others = (self.founder, *self.options.peers)
        return tuple(dict.fromkeys((*first, *others)))

    def _tell_coordinator(self, now_ns: int, effects: list[Effect]) -> None:
        to, report = self.follower.coordinator, self._report(now_ns)
        if report != self.sent.get(to) or self._is_due(to, now_ns):
            self.sent[to], self.sent_ns[to] = report, now_ns
            self.serial += 1
            heard, pace = self.follower.heard[1], self._pace()
            effects.append(Send(to, replace(report, serial=self.serial, heard=heard, pace=pace)))

    def _tell(self, rank: int, orders: RankOrders, now_ns: int, effects: list[Effect]) -> None:
        """Its orders, if they are news or time for a heartbeat, with the records that are due."""
        to = Peer(self.member.rack, rank)
        flow, due = self.flows.setdefault(rank, Flow()), self._is_due(to, now_ns)
        report = self.ranks.get(rank)
        if report is not None:
            flow.hears(report.heard)
        if flow.full and not due:
            return
        portion = Portion(0)
        if self._is_seated():
            known = min(report.decided, self.log.decided) if report else 0
            portion = flow.next(self.log, known, now_ns, self._again, self._decided_portion)
        if not (portion or due or orders != self.sent.get(to)):
            return
        self.sent[to], self.sent_ns[to] = orders, now_ns
        self.serial += 1
        flow.went(portion, self.serial, now_ns)
        news = {"prev": portion.prev, "records": portion.records, "snapshot": portion.snapshot}
        effects.append(Send(to, replace(orders, serial=self.serial, **news)))

    def _decided_portion(self, known: int, index: int) -> tuple[Record, ...]:
        return self.log.portion(known, index, self.log.decided)

    def _is_due(self, to: Peer, now_ns: int) -> bool:
        """Whether it is time for a heartbeat."""
        return to not in self.sent or now_ns >= self.sent_ns[to] + self.options.heartbeat_ns

    def farewell(self) -> Send:
        """The last word of a rack that stops, to be sent by its runtime."""
        self.serial += 1
        last = replace(self._report(None, gone=True), serial=self.serial)
        return Send(self.follower.coordinator, last)

    def _report(self, now_ns: int | None, gone: bool = False) -> Report:
        ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
        complete = len(ranks) == self.ranks_configured
        fresh = complete and (
            now_ns is None or now_ns - min(self.heard_ns.values()) < self.options.detect_ns
        )
        return Report(
            serial=0,
            to=self.follower.life or 0,
            acceptor_state=self.acceptor.acceptor_state(),
            fresh=fresh or not self.log.committed.begun,
            step=ranks[0].step if ranks else 0,
            step_ns=max((rank.step_ns for rank in ranks), default=0),
            versions=self._versions(),
            offers=self._offers(ranks) if complete else (),
            declined=tuple(self.declined[fragment] for fragment in sorted(self.declined)),
            coming=_coming(ranks),
            got=_in_all([rank.got for rank in ranks]) if complete else (),
            held=self._held(ranks) if complete else (),
            leaving=complete and all(rank.leaving for rank in ranks),
            hurry=complete and any(rank.hurry for rank in ranks),
            idle=complete and all(rank.idle for rank in ranks),
            gone=gone,
            bad=_bad(ranks),
            pace=verdict_of_rack([rank.pace for rank in ranks]),
            cut=cut_of_rack(ranks) if complete else None,
            wants=complete and all(rank.wants for rank in ranks),
            copies=copies_of_rack(self.member, ranks) if complete else (),
        )

    def _pace(self) -> Pace:
        return pace_of_rack([report.pace for report in self.ranks.values()])

    def _versions(self) -> tuple[int, ...]:
        """Per fragment what all ranks of the rack hold; -1 = nothing yet."""
        ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
        if len(ranks) < self.ranks_configured:
            return (-1,) * self.hello.policy.fragments
        return tuple(map(min, zip(*[rank.versions for rank in ranks], strict=True)))

    def _assembled(self, ranks: list[RankReport]) -> list[list[Part]]:
        """The parts of every own offer that all ranks have captured."""
        if not ranks[0].parts:
            return []
        first = [(part.fragment, part.seq) for part in ranks[0].parts]
        found = [{(part.fragment, part.seq): part for part in rank.parts} for rank in ranks]
        return [
            [parts[key] for parts in found] for key in first if all(key in parts for parts in found)
        ]

    def _offers(self, ranks: list[RankReport]) -> tuple[Offer, ...]:
        versions = self.log.committed.versions
        for fragment in [
            p for p, d in self.declined.items() if versions and versions[p] > d.applied
        ]:
            del self.declined[fragment]
        offers = []
        for parts in self._assembled(ranks):
            head, reason = parts[0], _no_offer(parts)
            if reason:
                self.declined[head.fragment] = Declined(head.fragment, head.applied, reason)
                continue
            if any(not part.checksum for part in parts):
                continue
            self.declined.pop(head.fragment, None)
            offers.append(
                Offer(
                    member=self.member,
                    fragment=head.fragment,
                    seq=head.seq,
                    base=head.base,
                    capture_step=head.capture_step,
                    tokens=sum(part.tokens for part in parts),
                    steps=head.steps,
                    checksums=tuple(part.checksum for part in parts),
                    applied=min(part.applied for part in parts),
                    norm=max(part.norm for part in parts),
                    sizes=sizes if any(sizes := tuple(part.size for part in parts)) else (),
                )
            )
        return tuple(offers)

    def _held(self, ranks: list[RankReport]) -> tuple[Held, ...]:
        if not ranks[0].held:
            return ()
        found = [
            {(h.fragment, h.version, h.attempt): h.digests[0] for h in rank.held} for rank in ranks
        ]
        common = [key for key in found[0] if all(key in held for held in found)]
        return tuple(Held(*key, digests=tuple(held[key] for held in found)) for key in common)

    def _totals(self, effects: list[Effect]) -> tuple[Total, ...]:
        ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
        if len(ranks) < self.ranks_configured:
            return ()
        effects += self.totals.collect(ranks)
        return self.totals.told(ranks)

    def _rank_orders(self, totals: tuple[Total, ...]) -> RankOrders:
        """The same to all ranks, without records."""
        orders = self.orders
        ranks = [self.ranks[r] for r in sorted(self.ranks)]
        complete = len(ranks) == self.ranks_configured
        return RankOrders(
            serial=0,
            prev=0,
            records=(),
            offers=orders.offers if orders else (),
            gathers=orders.gathers if orders else (),
            totals=totals,
            settled=orders.settled if orders else (),
            live=orders.live if orders and not self.silent else (),
            slow=orders.slow if orders and not self.silent else (),
            discarded=tuple(
                (parts[0].fragment, parts[0].seq)
                for parts in self._assembled(ranks)
                if _no_offer(parts)
            )
            if complete
            else (),
            why=self.why(),
            failure=self.failure,
            finish=self.left(),
            asked=asked_of(orders, self.member) if not self.silent else (),
            copy=copy_for(orders, self.member),
        )


def _no_offer(parts: list[Part]) -> str:
    """Why a capture gives no offer, or empty. Ranks that did not encode yet may still decline."""
    declined = [part.declined for part in parts if part.declined]
    if declined:
        return declined[0]
    return "no tokens were trained" if sum(part.tokens for part in parts) == 0 else ""


def _coming(ranks: list[RankReport]) -> tuple[int, ...]:
    """Fragments with a part that is not encoded yet; all that is encoded is offered or declined."""
    return tuple(
        sorted({p.fragment for r in ranks for p in r.parts if not p.checksum and not p.declined})
    )


def _bad(ranks: list[RankReport]) -> tuple[Bad, ...]:
    """What any rank has found; of several that found the same, the first speaks."""
    found = {bad.offer: bad for rank in reversed(ranks) for bad in rank.bad}
    if not found:
        return ()
    ordered = sorted(found, key=lambda offer: (offer.member, offer.fragment, offer.seq))
    return tuple(found[offer] for offer in ordered)[:BAD_MAX]


def _in_all(lists: list[tuple[OfferId, ...]]) -> tuple[OfferId, ...]:
    if len(lists) == 1:
        return lists[0]
    common = set(lists[0]).intersection(*lists[1:])
    return tuple(offer for offer in lists[0] if offer in common)
