"""The leader, local rank 0 of a rack: aggregates its ranks into one report and relays orders to
them.

The leader is the rack's voter: it keeps the replica of the log, follows the coordinator, and
forwards decided records to its ranks.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.log import Log
from mend.consensus.records import TEXT_MAX, Lineage
from mend.coordination.acceptor_host import Follower, ways_to_leaders
from mend.coordination.awake import AwakeClock, Sleep
from mend.coordination.donors import asked_of, copy_for
from mend.coordination.events import Effect, Event, Fail, Heard, Note, Send, Summed
from mend.coordination.failures import OF_REFUSALS, REFUSED, START_TIMEOUT, UNEQUAL_RANKS
from mend.coordination.flow import Flow, Portion, ResendPolicy, batch_ns
from mend.coordination.messages import (
    LIVES_MAX,
    Challenge,
    Declined,
    Hello,
    Orders,
    Prepare,
    RankOrders,
    RankReport,
    Reason,
    Refusal,
    Report,
    Total,
)
from mend.coordination.rank_reports import RankReports
from mend.coordination.sums import Totals
from mend.coordination.validation import format_misfit, orders_misfit, rank_report_misfit
from mend.events.kinds import CoordinatorBack, CoordinatorSilent, StillWaiting
from mend.types import SECOND, Member, Peer, life_of, rack_name, rack_names

PROGRESS_NS = 5 * SECOND

EARLY = 0.25
"""Fraction of a heartbeat by which a report that answers orders is sent early. A report that waits
for orders is sent late by the same fraction."""

_ALIKE = ". Make it alike on all racks: the log of who refused has both values"


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """`peers`: leaders of the other racks, one of which may coordinate if the founder does not
    answer."""

    heartbeat_ns: int
    detect_ns: int
    start_timeout_ns: int
    peers: tuple[Peer, ...] = ()


@dataclass
class Leader:
    """A pure machine. `hello`: how this rack introduces itself. `coordinator`: the founder of the
    job."""

    hello: Hello
    coordinator: InitVar[Peer]
    options: LeaderOptions
    started_ns: int
    coordinator_address: str = ""
    acceptor: Acceptor = field(default_factory=Acceptor)
    orders: Orders | None = None
    hello_ns: int | None = None
    seated: bool = False
    declined: dict[int, Declined] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    silent: bool = False
    failure: tuple[str, str] = ("", "")
    lost: str = ""
    """How this rack lost its seat, if another process has reported it."""
    progress_ns: int = 0
    asker: int | None = None
    """Rack of the member that sent a challenge, whose log contains a former life of this rack."""
    named_refusals: tuple[Reason, ...] = ()
    """Refusals that the newest `waiting` event has named."""
    reported: Report | None = None
    """The newest report to the coordinator; None: none yet."""
    reported_ns: int = 0
    sent: dict[int, RankOrders] = field(default_factory=dict)
    """The newest orders by rank."""
    sent_ns: dict[int, int] = field(default_factory=dict)
    flows: dict[int, Flow] = field(default_factory=dict)
    """Flow of the log by rank."""
    serial: int = 0
    totals_told: tuple[Total, ...] = ()
    totals_at: int = -1
    """`news` of the reports when the totals were last updated."""
    state: tuple[RankOrders, int, bool] | None = None
    """The newest orders to all ranks, the last decided record, and whether records were
    forwarded."""
    batch_due_ns: int | None = None
    """When collected news is reported."""
    beat_ns: int = 0
    """Earliest time at which a rank is due a heartbeat."""
    made: tuple[tuple[object, ...], RankOrders] | None = None
    """What the newest orders for the ranks were made from, and the orders."""
    clock: InitVar[AwakeClock | None] = None

    def __post_init__(self, coordinator: Peer, clock: AwakeClock | None) -> None:
        self.follower = Follower(self.member, self.acceptor, coordinator, self.options.detect_ns)
        self.founder = coordinator
        self.sleep = Sleep(clock or AwakeClock(self.options.heartbeat_ns))
        self.ranks_configured = len(self.hello.seat.lanes)
        self.reports = RankReports(self.member, self.ranks_configured, self.hello.policy.fragments)
        self._again = ResendPolicy(self.options.detect_ns, self.options.detect_ns)

    @property
    def log(self) -> Log:
        return self.acceptor.log

    @property
    def member(self) -> Member:
        return self.hello.seat.member

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        self._discount_sleep(now_ns)
        if isinstance(event, Heard):
            self._on_heard(event, now_ns, effects)
        elif isinstance(event, Summed):
            effects += self.totals.on_summed(event)
            self.totals_at = -1
        self._watch(now_ns, effects)
        if not self._is_seated():
            self._say_hello(now_ns, effects)
        self._send_report(now_ns, effects)
        self._send_orders_to_ranks(event, now_ns, effects)
        return effects

    def deadline_ns(self) -> int | None:
        beat_ns = min(self.sent_ns.values(), default=self.started_ns) + self.options.heartbeat_ns
        dues_ns = [self._report_due_ns(answers=False)] if self.reported else []
        dues_ns += [self.batch_due_ns] if self.batch_due_ns is not None else []
        return min([beat_ns, *dues_ns])

    def _discount_sleep(self, now_ns: int) -> None:
        if slept_ns := self.sleep.take(now_ns):
            self.follower.discount(slept_ns)
            self.reports.discount(slept_ns)

    def left(self) -> bool:
        """Whether this rack has lost its seat, according to its own log or a newer one."""
        if self.lost:
            return True
        return self._is_seated() and self.log.committed.member(self.member.rack) != self.member

    def _is_seated(self) -> bool:
        """Whether this rack has, or had, a decided seat. Before that the job may start without it,
        and with another log, so it keeps sending hellos and its ranks read nothing."""
        self.seated = self.seated or not self.follower.homeless()
        return self.seated

    # -------------------------------------------------------------- messages

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
                self._fail(REFUSED, f"the coordinator has {misfit}. {remedy}", effects)
        elif isinstance(body, Prepare):
            vote = self.follower.asked(event.peer, body, now_ns)
            if vote is not None:
                effects.append(
                    Send(event.peer, replace(vote, held=self.reports.aggregate.versions))
                )
        elif isinstance(body, Challenge) and body.to == self.member.incarnation:
            self._answer(event.peer, body.seated)
        elif isinstance(body, Refusal):
            self._on_refusal(event.peer, body, now_ns, effects)

    def _on_refusal(self, peer: Peer, refusal: Refusal, now_ns: int, effects: list[Effect]) -> None:
        """Handle a refusal. A seated rack is never refused by a coordinator that it follows. But a
        candidate may find the job lost, because this rack does not hold all of it either."""
        known = peer in (Peer(self.member.rack, 0), *self._coordinators(now_ns))
        if refusal.kind == "seat":
            mine = refusal.incarnation == self.member.incarnation
            self.lost = self.lost or (refusal.detail if known and mine and self.seated else "")
            return
        for_member = refusal.incarnation == self.member.incarnation
        if refusal.kind == "lost":
            apt = self._is_seated() and min(self.reports.aggregate.versions) < 0
        else:
            apt = not self._is_seated()
        if known and for_member and apt and not self.failure[0]:
            remedy = _ALIKE if refusal.kind == "plan" else ""
            self._fail(OF_REFUSALS.get(refusal.kind, REFUSED), refusal.detail + remedy, effects)

    def _on_rank(self, event: Heard, report: RankReport, now_ns: int) -> None:
        of_member = Member(event.peer.rack, event.incarnation) == self.member
        if not of_member or event.peer.rank >= self.ranks_configured:
            return
        if rank_report_misfit(report, self.hello.policy.fragments):
            return
        self.reports.take(event.peer.rank, report, now_ns)

    def _on_orders(
        self, peer: Peer, incarnation: int, orders: Orders, now_ns: int, effects: list[Effect]
    ) -> None:
        roster = self.log.appended.roster_number if self.log.appended.begun else -1
        before = self.follower.coordinator
        if not self.follower.follow(peer, incarnation, orders, now_ns, effects):
            return
        self.orders = orders
        if self.follower.coordinator != before:
            self.reported = None
        if self.log.appended.begun and self.log.appended.roster_number != roster:
            effects += ways_to_leaders(self.log.appended, self.member.rack)

    def _watch(self, now_ns: int, effects: list[Effect]) -> None:
        """Detect a silent coordinator, ranks that cannot go on together, or a start that takes too
        long."""
        if self.log.committed.begun:
            if (unequal := self.reports.aggregate.unequal) and not self.failure[0]:
                self._fail(UNEQUAL_RANKS, unequal, effects)
            silent = now_ns - (self.follower.orders_ns or self.started_ns) > self.options.detect_ns
            if silent != self.silent:
                self.silent = silent
                peer = self._where()
                noted = CoordinatorSilent(peer) if silent else CoordinatorBack(peer)
                effects.append(Note(noted))
            return
        waited_ns = now_ns - self.started_ns
        if waited_ns > self.options.start_timeout_ns and not self.failure[0]:
            waited = f"after {waited_ns // SECOND} s: {self._start_reason()}"
            self._fail(START_TIMEOUT, waited, effects)
            return
        refused = self.orders.why if self.orders and self.orders.missing else ()
        due = now_ns - (self.progress_ns or self.started_ns) >= PROGRESS_NS
        if due or not set(refused) <= set(self.named_refusals):  # a refusal is reported at once
            self.progress_ns, self.named_refusals = now_ns, refused
            effects.append(Note(StillWaiting(self._start_reason(), waited_ns // SECOND)))

    def _fail(self, kind: str, detail: str, effects: list[Effect]) -> None:
        """Stop this rack. Its other ranks get the failure with their next orders."""
        self.failure = (kind, detail[:TEXT_MAX])
        effects.append(Fail(kind, detail))

    def _start_reason(self) -> str:
        begins_alone = self.orders is None or self.asker in self.orders.missing
        if self.asker is not None and begins_alone:
            who = rack_name(self.asker)
            return (
                f"{who} knows this job, in which a former life of this rack has a seat. It keeps "
                "the seat while no member leads the job (restart every silent rack, or retire it: "
                "mend retire), and while a version is on its way to the last rack that needs it"
            )
        if self.orders is None:
            return (
                f"no answer from the coordinator ({self._where()}); is it running, is the address "
                "right (sideband_peers, witness_addr), does a firewall block it, is the key the "
                "same (key_file); or is the job over (then no process is left to answer: start all "
                "racks again, and the witness)"
            )
        if self.orders.missing:
            absent = "no hello from rack " + ", ".join(map(str, self.orders.missing))
            advice = "start it with the same job_id, racks and addresses"
            return "; ".join([absent, *(list(map(str, self.orders.why)) or [advice])])
        reason = "every rack has to vote for the first record of the log"
        if silent := set(range(self.hello.policy.racks)) - set(self.orders.live):
            reason += f", and {rack_names(silent)} {'are' if len(silent) > 1 else 'is'} silent"
        return reason

    def _where(self) -> str:
        """Name and address of the coordinator, for messages."""
        rack = self.follower.coordinator.rack
        name = rack_name(rack)
        seat = self.log.appended.seats.get(rack)
        address = seat.address if seat else self.coordinator_address
        return f"{name} at {address}" if address else name

    def why(self) -> tuple[Reason, ...]:
        """Why nothing commits, as far as this rack knows. Without a seat it knows only the silence
        of the coordinator."""
        if self.left():
            return ()
        if self.silent:
            return (Reason(f"the coordinator ({self._where()}) is silent"),)
        return self.orders.why if self.orders else ()

    # -------------------------------------------------------------- what we say

    def _say_hello(self, now_ns: int, effects: list[Effect]) -> None:
        due = self.hello_ns is None or now_ns >= self.hello_ns + self.options.heartbeat_ns
        if due and not self.failure[0]:
            self.hello_ns = now_ns
            effects += [Send(peer, self.hello) for peer in self._coordinators(now_ns)]

    def _answer(self, peer: Peer, seated: int) -> None:
        """Answer a challenge at once: the incarnation that has the seat is over."""
        self.asker = peer.rack
        after = self.hello.after
        if seated != life_of(self.member) and seated not in after:
            self.hello = replace(self.hello, after=(*after, seated)[-LIVES_MAX:])
            self.hello_ns = None

    def _coordinators(self, now_ns: int) -> tuple[Peer, ...]:
        """Peers that may coordinate. A rack that returns to a running job asks all of them, because
        its founder may be gone, or may have restarted and wait in vain for all racks."""
        first = (self.follower.coordinator,)
        if now_ns - self.started_ns <= self.options.detect_ns:
            return first
        others = (self.founder, *self.options.peers)
        return tuple(dict.fromkeys((*first, *others)))

    def _send_report(self, now_ns: int, effects: list[Effect]) -> None:
        report, sent, self.batch_due_ns = self._report(now_ns), self.reported, None
        due_ns = self._report_due_ns(answers=self.follower.orders_ns == now_ns)
        if sent is not None and now_ns < due_ns:
            if report == sent:
                return
            due_ns = self.reported_ns + batch_ns(len(self.log.committed.seats))
            if now_ns < due_ns and replace(report, got=sent.got) == sent:
                self.batch_due_ns = due_ns  # collect more news first
                return
        self.reported, self.reported_ns = report, now_ns
        self.serial += 1
        effects.append(Send(self.follower.coordinator, self._numbered(report)))

    def _report_due_ns(self, *, answers: bool) -> int:
        """When a report without news is due. If it may, it `answers` orders, which all racks get at
        about the same time: the reports then arrive together, and the coordinator wakes up once for
        many. A rack without a seat keeps its own pace."""
        heartbeat_ns = self.options.heartbeat_ns
        early_ns = int(heartbeat_ns * EARLY) if self.seated else 0
        return self.reported_ns + heartbeat_ns + (-early_ns if answers else early_ns)

    def _numbered(self, report: Report) -> Report:
        """The report with the fields that change constantly and do not by themselves cause a
        report."""
        reports, heard = self.reports, self.follower.heard[1]
        return replace(
            report,
            serial=self.serial,
            heard=heard,
            step_ns=reports.step_ns,
            pace=reports.paces()[0],
            pulls=reports.pulls(),
        )

    def _send_orders_to_ranks(self, event: Event, now_ns: int, effects: list[Effect]) -> None:
        """Send orders to all ranks if there is news or a heartbeat is due; otherwise to the rank
        that has reported, whose confirmation may make room for more records."""
        orders = self._orders_now(self._totals(effects))
        state = (orders, self.log.decided, self._may_pass_on())
        _, _, passes = state
        if state != self.state or now_ns >= self.beat_ns:
            self.state = state
            for rank in range(self.ranks_configured):
                self._send_orders(rank, orders, passes, now_ns, effects)
            self.beat_ns = min(self.sent_ns.values()) + self.options.heartbeat_ns
        elif isinstance(event, Heard) and event.peer.rank in self.flows:
            self._send_orders(event.peer.rank, self.state[0], passes, now_ns, effects)

    def _send_orders(
        self, rank: int, orders: RankOrders, passes: bool, now_ns: int, effects: list[Effect]
    ) -> None:
        """Send a rank its orders if they are news or a heartbeat is due; with records if
        `passes`."""
        flow, report = self.flows.setdefault(rank, Flow()), self.reports.newest.get(rank)
        due = rank not in self.sent or now_ns >= self.sent_ns[rank] + self.options.heartbeat_ns
        if report is not None:
            flow.hears(report.heard)
        if flow.full and not due:
            return
        portion = Portion(0)
        if passes:
            known = min(report.decided, self.log.decided) if report else 0
            portion = flow.next(self.log, known, now_ns, self._again, self.log.decided)
        if not (portion or due or orders != self.sent.get(rank)):
            return
        self.sent[rank], self.sent_ns[rank] = orders, now_ns
        self.serial += 1
        flow.went(portion, self.serial, now_ns)
        news = {"prev": portion.prev, "records": portion.records, "snapshot": portion.snapshot}
        if self.orders is not None:
            news |= {"moving": self.orders.moving, "taken": self.orders.taken}
        to = Peer(self.member.rack, rank)
        effects.append(Send(to, replace(orders, serial=self.serial, **news)))

    def _may_pass_on(self) -> bool:
        """Whether ranks may act on decided records: not before this rack has a seat, and not while
        a new lineage may still undo them (one is accepted here and undecided, or this voter has
        promised and the promised log has not arrived). Lineages do not concern a rack that has
        left."""
        acceptor = self.acceptor
        awaits = 0 < acceptor.accepted < acceptor.promised
        begins = any(isinstance(record, Lineage) for record in self.log.undecided())
        return self.left() or (self._is_seated() and not awaits and not begins)

    def farewell(self) -> Send:
        """The last report of a rack that stops; its runtime sends it."""
        self.serial += 1
        return Send(self.follower.coordinator, self._numbered(self._report(None, gone=True)))

    def _report(self, now_ns: int | None, gone: bool = False) -> Report:
        """The report without the fields that `_numbered` adds."""
        aggregate = self.reports.aggregate
        fresh = aggregate.complete and (
            now_ns is None or self.reports.all_heard_since(now_ns - self.options.detect_ns)
        )
        return Report(
            serial=0,
            to=self.follower.life or 0,
            acceptor_state=self.acceptor.acceptor_state(),
            fresh=fresh or not self.log.committed.begun,
            step=self.reports.step,
            step_ns=0,
            declined=self._declines(),
            gone=gone,
            pace=self.reports.paces()[1],
            **aggregate.reported(),
        )

    def _declines(self) -> tuple[Declined, ...]:
        """The newest declined capture of every fragment, until the next version is decided."""
        versions, aggregate = self.log.committed.versions, self.reports.aggregate
        for fragment in [
            p for p, d in self.declined.items() if versions and versions[p] > d.applied
        ]:
            del self.declined[fragment]
        self.declined |= {declined.fragment: declined for _, declined in aggregate.declined}
        for offer in aggregate.offers:
            self.declined.pop(offer.fragment, None)
        return tuple(self.declined[fragment] for fragment in sorted(self.declined))

    def _totals(self, effects: list[Effect]) -> tuple[Total, ...]:
        if self.reports.aggregate.complete and self.totals_at != self.reports.news:
            ranks = self.reports.ordered()
            effects += self.totals.collect(ranks)
            self.totals_told, self.totals_at = self.totals.current(ranks), self.reports.news
        return self.totals_told

    def _orders_now(self, totals: tuple[Total, ...]) -> RankOrders:
        """`_rank_orders`, made again only if something of what it reads has changed."""
        orders, aggregate = self.orders, self.reports.aggregate
        if orders is None or self.silent:
            self.made = None
            return self._rank_orders(totals)
        read = (
            orders.offers, orders.proposals, orders.settled, orders.live, orders.slow, orders.why,
            orders.donors, orders.copies, aggregate.declined, totals, self.failure, self.left(),
            self.lost,
        )  # fmt: skip
        if self.made is None or self.made[0] != read:
            self.made = read, self._rank_orders(totals)
        return self.made[1]

    def _rank_orders(self, totals: tuple[Total, ...]) -> RankOrders:
        """The orders for all ranks, without records."""
        orders = self.orders
        return RankOrders(
            serial=0,
            prev=0,
            records=(),
            offers=orders.offers if orders else (),
            proposals=orders.proposals if orders else (),
            totals=totals,
            settled=orders.settled if orders else (),
            live=orders.live if orders and not self.silent else (),
            slow=orders.slow if orders and not self.silent else (),
            discarded=tuple(
                (declined.fragment, seq) for seq, declined in self.reports.aggregate.declined
            ),
            why=tuple(str(reason)[:TEXT_MAX] for reason in self.why()),
            failure=self.failure,
            finish=self.left(),
            lost=self.lost,
            asked=asked_of(orders, self.member) if not self.silent else (),
            copy=copy_for(orders, self.member),
        )
