"""The asyncio side of one rank: gives its machines their events and performs their effects.

Everything here runs on the loop's thread. The host passes jobs to workers; their results come back
as events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from mend.consensus.records import Commit, all_closing
from mend.consensus.weights import WHOLE
from mend.coordination import events as ev
from mend.coordination.failures import JOB_LOST, START_TIMEOUT, error_of
from mend.coordination.machines import Machines
from mend.coordination.messages import Hello, Message, RankOrders
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.io.host import HostInterface, OtherJobs, VersionMismatches
from mend.engine.loop.effects import EventQueue, Handlers
from mend.engine.loop.equal_offers import EqualOffers
from mend.engine.loop.feature import Features, LoopFeature, LoopParts
from mend.engine.loop.growing_offers import GrowingOffers
from mend.engine.loop.jobs import Jobs
from mend.engine.loop.merging import Merging, Slicing
from mend.engine.loop.pipeline import Pipeline
from mend.engine.loop.store import TensorStore, rules_of
from mend.engine.state.fragment_state import OpenOffer
from mend.engine.state.published_state import NewestOrders, PublishedState
from mend.errors import (
    MendError,
    OtherJob,
    OtherVersion,
    Refused,
    ensure,
    require,
)
from mend.events.base import LoggedEvent
from mend.events.kinds import (
    AbsentRack,
    DigestDiffers,
    DroppedOffer,
    JobBegunAgain,
    MergedShare,
    OwnSeatLost,
    ProtocolFault,
    RackBack,
    RackSilent,
    RoundCommitted,
    RoundsShort,
    SnapshotRead,
    StillWaiting,
)
from mend.trace.writer import Tape
from mend.types import Member, Owned, Peer, rack_name

F = TypeVar("F", bound=LoopFeature)

_Outer = tuple[float, float, float, float | None]
"""Of a round of weights: part of a full round, rounds before it, momentum, balance of signs."""


class ConcurrentOuterStep:
    """The loop's half of a rank. `store` has the tensors that the machines only name."""

    def __init__(
        self,
        me: Peer,
        member: Member,
        machines: Machines,
        owned: Sequence[Owned],
        genesis: Sequence[Anchor],
        numerics: Numerics,
        published: PublishedState,
        host: HostInterface,
        plain: Sequence[Sequence[bool]] = (),
        tape: Tape | None = None,
        moments: int = 0,
        features: Features = lambda _: (),
    ) -> None:
        """`machines`: those of a rank's process. `owned`, `genesis`: per fragment, what this rank
        owns and the anchor to begin with. `plain`: per fragment, which of its tensors are merged by
        the mean whatever the rule; empty: none. `tape`: records the machines' events. `moments`:
        number of fragments of moments, the last ones. `features`: makes the features of this
        rank."""
        self.rank_machine = require(machines.rank_machine, "a rank without a machine")
        self.leader = machines.leader
        self.coordinator = machines.coordinator
        self._receivers, self._machines = machines.receivers, machines.named()
        self.me, self.member, self.published, self.host = me, member, published, host
        rules = rules_of(owned, numerics, plain, moments)
        self.store = TensorStore(host, me, member, rules, genesis)
        self.jobs = jobs = Jobs(host, published, me.rack, self.tell)
        self._pipeline = Pipeline(self.store, jobs)
        self._merging = Merging(self.store, jobs, numerics, taped=tape is not None)
        self._slicing = Slicing(self.store, jobs)
        parts = LoopParts(self.store, jobs, self.rank_machine, self.leader)
        self._features = tuple(features(parts))
        self._queue = EventQueue(self._machines, host.now_ns, self._handlers, tape)
        self._equal_offers, self._growing_offers = EqualOffers(), GrowingOffers()
        self._silent: set[int] = set()
        self._twin = ""
        self._met: set[int] = set()
        """Other racks, and the witness, that have sent a message."""
        self._mismatches, self._other_jobs = VersionMismatches(host), OtherJobs(host)

    # -------------------------------------------------------------- in

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        """Handle a message of any process."""
        self._met.add(peer.rack)
        if isinstance(body, RankOrders) and not self.published.finished:
            self._watch(body.live, body.why)
            opened = _opened_in(body)
            ending = _ending_in(body, self.published.orders.ending)
            orders = NewestOrders(body.live, body.why, body.settled, opened, body.slow, ending)
            self.published.heard(orders)
            if self.me.rank == 0 and (same := self._equal_offers.warning(body.offers)):
                self.host.note(same)
            self.published.moves(body.moving, body.taken, self.host.now_ns())
        elif isinstance(body, Hello) and peer == self.me and incarnation != self.member.incarnation:
            # That process takes this one for the coordinator: its list of addresses has another
            # order.
            at = body.seat.address
            self._twin = (
                f"; the process at {at} says that it is rack {self.me.rack} as well: compare "
                "MEND_RACK and the order of sideband_peers there and here"
            )
        for machine in self._receivers(body):
            self._give(machine, ev.Heard(peer, incarnation, body))

    def _watch(self, live: tuple[int, ...], why: tuple[str, ...]) -> None:
        """Note once when a rack of the roster falls silent, and when it is back."""
        if not live:
            return
        silent = set(self.published.job.seats) - set(live) - {self.me.rack}
        for rack in sorted(silent - self._silent):
            effect = "; ".join(why) or "rounds go on without it"
            self.host.note(RackSilent(rack, effect))
        for rack in sorted((self._silent - silent) & set(live)):
            self.host.note(RackBack(rack))
        self._silent = silent

    def _give(self, machine: ev.Machine, event: ev.Event) -> None:
        self._queue.give(machine, event)

    def tell(self, event: ev.Event) -> None:
        """Give an event of this rank's own threads to the rank machine."""
        self._give(self.rank_machine, event)

    def feature(self, kind: type[F]) -> F | None:
        """The feature of this kind; None: this rank has none."""
        return next((each for each in self._features if isinstance(each, kind)), None)

    def captured(self, offer: OpenOffer) -> None:
        """Take a capture of the training thread."""
        self.store.put_offer(offer)
        if not self.published.finished:
            base = offer.anchor.version
            racks = self.rank_machine.expected(offer.fragment, base)
            self._pipeline.ahead.begin(offer.fragment, base, racks)
        self.tell(offer.captured)

    def tick(self) -> None:
        """Give a Tick to every machine whose deadline has passed."""
        if not self.published.job.begun and self._mismatches.settled():
            self.published.fail(Refused(self._mismatches.reason))
        now_ns = self.host.now_ns()
        for machine in self._machines.values():
            due = self._queue.deadline_ns(machine)
            if due is not None and due <= now_ns:
                self._give(machine, ev.Tick())
        self._count()

    def _count(self) -> None:
        """Tell the machine how far this rank's pulls are."""
        waiting: dict[int, int] = {}
        for member, fragment, _ in self.rank_machine.fetch_queue.waiting():
            size = self.store.rules[fragment].payload_bytes
            waiting[member.rack] = waiting.get(member.rack, 0) + size
        standing = self.store.pulls.standing(waiting)
        if standing != self.rank_machine.pulls:
            self.published.pulled(sum(each.moved for each in standing))
            self.tell(ev.Moved(standing))

    def say_farewell(self) -> None:
        """Tell the coordinator, if it is elsewhere, that this rack leaves."""
        if self.leader is not None:
            effect = self.leader.farewell()
            if effect.to != self.me:
                self.host.send(effect.to, effect.body)

    def crashed(self, error: MendError) -> None:
        """Fail the threads that wait: the loop stopped."""
        self.published.fail(error)

    def foreign(self, found: OtherVersion | OtherJob) -> None:
        """Answer a process of another version or job. One of another version stops this rank, but
        only before the start (see `tick`)."""
        if isinstance(found, OtherJob):
            self._other_jobs.met(found)
            return
        leader = self.leader
        self._mismatches.met(
            found, leader.options.peers if leader and not self.published.job.begun else ()
        )
        self.published.erred(str(found))

    def deadline_ns(self) -> int | None:
        dues = [self._queue.deadline_ns(machine) for machine in self._machines.values()]
        return min([due for due in dues if due is not None], default=None)

    # -------------------------------------------------------------- out

    def _handlers(self, machine: ev.Machine) -> Handlers:
        """What this rank does for each effect of one of its machines."""
        found = self._core_handlers(machine)
        for feature in self._features:
            own = feature.handlers()
            twice = own.keys() & found.keys()
            ensure(not twice, "two parts of a rank perform an effect", effects=twice)
            found |= own
        return found

    def _core_handlers(self, machine: ev.Machine) -> dict[type[ev.Effect], Callable[[Any], None]]:
        pipeline, merging, slicing = self._pipeline, self._merging, self._slicing
        host, published, give = self.host, self.published, partial(self._give, machine)
        mine = machine is self.rank_machine
        return {
            ev.Send: lambda it: self._send(it.to, it.body),
            ev.Connect: lambda it: host.connect(it.peer, it.address),
            ev.Encode: pipeline.encode,
            ev.Fetch: pipeline.fetch,
            ev.FetchSlice: slicing.fetch,
            ev.MergeSlice: slicing.merge,
            ev.FreeSlices: slicing.free,
            ev.Measure: merging.measure,
            ev.Sum: lambda it: merging.sum(it, give),
            ev.Merge: merging.merge,
            ev.Copy: pipeline.copy,
            ev.PublishAnchor: pipeline.publish,
            ev.RecordCommitted: self._committed,
            ev.Restored: self._restored,
            ev.Free: pipeline.free,
            ev.DropAnchor: pipeline.drop_anchor,
            ev.DropOffer: lambda it: published.discard(it.fragment, it.seq, it.bad),
            ev.Note: lambda it: self._note(it.event),
            ev.Fail: lambda it: self._fail(it.kind, it.detail),
            ev.Finished: self._finish if mine else lambda _: host.finished(),
        }

    def _restored(self, effect: ev.Restored) -> None:
        self.host.note(SnapshotRead(effect.snapshot.index))
        self.published.restore(effect.snapshot)

    def _note(self, event: LoggedEvent) -> None:
        if isinstance(event, StillWaiting):
            event = StillWaiting(self._explained(event.what), event.seconds)
        self.host.note(event)
        if isinstance(event, DigestDiffers | ProtocolFault):
            self.published.erred(event.sentence())

    def _finish(self, effect: ev.Finished) -> None:
        """This rack has no seat any more. If it has not asked to leave, its training thread learns
        that at its next step."""
        self.published.finish(self.member, effect.reason)
        if self.published.lost_seat(self.member) and not self.rank_machine.leaving:
            reason = self.published.job.why_out(self.member)
            self.host.note(OwnSeatLost(reason))

    def _fail(self, kind: str, detail: str) -> None:
        if kind == JOB_LOST:
            if all(replica.newest >= 0 for replica in self.rank_machine.replicas):
                # The last bytes arrived after the rack had reported them missing; or another rank
                # of it lacks some.
                self.published.look_again()
                return
            if self.published.failure is None:
                self.host.note(JobBegunAgain(detail))
        if kind == START_TIMEOUT:
            detail = self._explained(detail)
        self.published.fail(error_of(kind, detail))

    def _explained(self, reason: str) -> str:
        """The leader's reason why the start waits, with what this rank knows besides. Processes of
        other jobs are a known cause, so they come before the guesses of the leader."""
        jobs = self._other_jobs.in_words
        return (f"{jobs}; " if jobs else "") + reason + self._unheard() + self._twin

    def _unheard(self) -> str:
        """While the coordinator has not answered: the processes that were heard, and those that
        were not, in words."""
        leader = self.leader
        if leader is None or leader.orders is not None:
            return ""
        asked = dict.fromkeys((leader.founder.rack, *(p.rack for p in leader.options.peers)))
        others = [rack for rack in asked if rack != self.me.rack]
        silent = [rack_name(rack) for rack in others if rack not in self._met]
        heard = [rack_name(rack) for rack in others if rack in self._met]
        text = f"; nothing was heard from {', '.join(silent)}" if silent else ""
        return text + (f"; heard from {', '.join(heard)}" if heard else "")

    def _committed(self, effect: ev.RecordCommitted) -> None:
        if isinstance(effect.record, Commit):
            self._take(effect.record, effect.rounds, effect.part)
        else:
            self.published.on_decided(effect.record)
        for feature in self._features:
            feature.decided(effect.record)

    def _take(self, record: Commit, rounds: int, part: int) -> None:
        numerics = self.store.rules[record.fragment].numerics
        if numerics.of_values:
            self.published.on_decided(record, None)
            self._note_commit(record)
        else:
            members = record.members
            folded = self.rank_machine.folded
            closing, waits = all_closing(members, record.absent), folded.waits(members)
            momentum = numerics.rates(rounds, part, len(members), closing, waits=waits).momentum
            self.published.on_decided(record, (rounds / WHOLE, momentum))
            outer = part / WHOLE, rounds / WHOLE, momentum, folded.balance(members)
            self._note_commit(record, outer)
            if self.me.rank == 0 and (growing := self._growing_offers.warning(record)):
                self.host.note(growing)

    def _note_commit(self, commit: Commit, outer: _Outer | None = None) -> None:
        """`outer`: None for a round of moments."""
        _, live = self.published.participation.recent[-1]
        self.host.note(_event_of(commit, live, outer))
        warning = self.published.participation.warning(self.host.now_ns())
        if warning and self.me.rank == 0:
            self.host.note(RoundsShort(warning))

    def _send(self, to: Peer, body: Message) -> None:
        if to == self.me:
            self.heard(self.me, self.member.incarnation, body)
        else:
            self.host.send(to, body)


def _opened_in(orders: RankOrders) -> dict[int, int]:
    """fragment -> the newest version on which a rack with an open offer trained when it passed the
    capture point, unless the members of that round are fixed already."""
    opened: dict[int, int] = {}
    for offer in orders.offers:
        opened[offer.fragment] = max(offer.applied, opened.get(offer.fragment, 0))
    proposals = {(proposal.fragment, proposal.version - 1) for proposal in orders.proposals}
    return {p: version for p, version in opened.items() if (p, version) not in proposals}


def _ending_in(orders: RankOrders, before: frozenset[int]) -> frozenset[int]:
    """`NewestOrders.ending`. `before`: as of the orders before; it stays for racks without an open
    offer."""
    offering = {offer.member.rack for offer in orders.offers}
    closing = {offer.member.rack for offer in orders.offers if offer.closing}
    return (before - offering) | closing


def _event_of(commit: Commit, live: int, outer: _Outer | None) -> RoundCommitted:
    """`live`: number of live racks; 0: not known. `outer`: as in `_note_commit`."""
    part, rounds, momentum, balance = outer or (None, None, None, None)
    return RoundCommitted(
        fragment=commit.fragment,
        version=commit.version,
        members=tuple(
            [
                MergedShare(s.member.rack, s.seq, s.base, s.capture_step, s.tokens, s.steps)
                for s in commit.members
            ]
        ),
        live=live,
        absent=tuple([AbsentRack(a.rack, a.tokens, a.steps, a.closing) for a in commit.absent]),
        dropped=tuple([DroppedOffer(ended.member.rack, ended.seq) for ended in commit.dropped]),
        digests=tuple(commit.digests),
        reason=commit.reason,
        part=part,
        rounds=rounds,
        momentum=momentum,
        balance=balance,
        moments=outer is None,
        closed_by=commit.closed_by,
    )
