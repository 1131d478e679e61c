"""The machine of one rank: fetches offers, merges the members of a merge proposal, holds decided
versions.

The runtime keeps the tensors. Here a payload is named (member, fragment, seq) and an anchor
(fragment, version).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from mend.consensus.ballots import count_of
from mend.consensus.log import LogState, log_state_of
from mend.consensus.records import (
    BAD_MAX,
    TEXT_MAX,
    CheckpointRecord,
    Commit,
    Drop,
    Genesis,
    Lineage,
    Offer,
    Record,
    Roster,
    Snapshot,
    all_closing,
)
from mend.coordination import events as ev
from mend.coordination.fetch_queue import FetchQueue, Key
from mend.coordination.flow import batch_ns
from mend.coordination.fragment_replica import HELD_BEHIND, LINGER_NS, FragmentReplica, RankOptions
from mend.coordination.messages import (
    Bad,
    BarrierState,
    CapturePart,
    MergeProposal,
    OfferId,
    Pulled,
    RankOrders,
    RankReport,
    UnitsAsk,
)
from mend.coordination.slow import RankPace
from mend.coordination.state_copy import StateCopies
from mend.coordination.sums import SumPhase
from mend.coordination.validation import rank_orders_misfit
from mend.events.kinds import DigestDiffers, FetchFailed, RackExpelled, VersionsUndone
from mend.types import SECOND, Address, Member, Peer

ENDED_NS = 3 * SECOND
"""How long a rank that has missed the end of the job tries to get what was decided before it. A
pull in progress may take longer."""


@dataclass
class RankMachine:
    """A pure machine. `own_digests`: per fragment the digest of the state that this rank begins
    with, its own weights or a checkpoint. `own_versions`: their versions; empty: all are 0."""

    me: Peer
    member: Member
    options: RankOptions
    own_digests: tuple[str, ...]
    own_versions: tuple[int, ...] = ()
    folded: LogState = field(default_factory=LogState)
    decided: int = 0
    replicas: list[FragmentReplica] = field(default_factory=list)
    fetch_queue: FetchQueue = field(default_factory=FetchQueue)
    bad: dict[Key, str] = field(default_factory=dict)
    """Open offers that this rank refuses to merge although their bytes arrived intact, and why."""
    parts: dict[int, CapturePart] = field(default_factory=dict)
    step: int = 0
    step_ns: int = 0
    leaving: bool = False
    hurry: bool = False
    idle_versions: tuple[int, ...] | None = None
    orders_serial: int = 0
    finished: bool = False
    failure: tuple[str, str] = ("", "")
    """The newest failure from the leader's orders."""
    settled: tuple[int, ...] = ()
    sent: RankReport | None = None
    sent_ns: int = 0
    batch_due_ns: int | None = None
    """When collected news is reported; None: there is none."""
    serial: int = 0
    barrier: BarrierState | None = None
    """The checkpoint barrier that this rank has reached."""
    pulls: tuple[Pulled, ...] = ()
    ask: UnitsAsk | None = None
    """The newest ask for units of data."""
    before_end: LogState | None = None
    """The state before the record that ended the job, if this rank had a seat in it: the racks of
    that time may still serve what was decided. None: the job runs, or nothing can be pulled any
    more."""
    ended_ns: int = 0
    touched: set[int] = field(default_factory=set)
    """Fragments that an event has touched since they were settled last."""
    due_ns: list[int] = field(default_factory=list)
    """Per fragment the time at which settling it again may do something, without any event."""
    orders: RankOrders | None = None
    """The newest orders, as long as nothing has happened that reading them again would see."""
    news: bool = True
    """Whether the report may differ from the one that was sent, or found equal to it."""

    def __post_init__(self) -> None:
        self.replicas = [FragmentReplica() for _ in self.own_digests]
        self.touched, self.due_ns = set(range(len(self.replicas))), [0] * len(self.replicas)
        self.pace = RankPace(self.me.rack, self.me.rank, self.options.detector)
        self.copies = StateCopies(self.me)
        self.own_versions = self.own_versions or (0,) * len(self.own_digests)

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Effect]:
        quiet, effects = self._is_quiet(event), self._pull_ended(event, now_ns)
        if quiet:
            self._on_quiet(event, effects)
        else:
            self.orders = None
            self._touch(event)
            self._on(event, now_ns, effects)
        if self._reaches():
            self._settle_due(now_ns, effects)
        if self._seated():
            effects += self.copies.pull(self.folded, now_ns)
        effects += self.pace.search.tick(now_ns)
        self.news = self.news or bool(effects) or not quiet
        if effects or not quiet or self.fetch_queue.due(now_ns):
            self._pull(now_ns, effects)
            self._time_pulls(effects, now_ns)
        self._flush(now_ns, effects)
        return effects

    def _seated(self) -> bool:
        return self.folded.member(self.me.rack) == self.member

    def _reaches(self) -> bool:
        """Whether it pulls decided versions: until the job is over, and afterwards those that it
        missed."""
        return self._seated() or self.before_end is not None

    def _rail(self, first: int | None = None) -> tuple[Address, ...]:
        return (self.before_end or self.folded).rail(self.me, first)

    def expected(self, fragment: int, base: int) -> list[tuple[Member, Address]]:
        """Racks of which this rank may soon pull an offer of this fragment against version `base`,
        from the one after this rack around: all that it knows of no such offer of."""
        if not self._seated() or self._shards():
            return []
        known = self.fetch_queue.sources(fragment, base)
        racks = sorted(self.folded.seats, key=lambda rack: (rack < self.me.rack, rack))
        seats = [self.folded.seats[rack] for rack in racks if rack != self.me.rack]
        return [(s.member, s.lanes[self.me.rank]) for s in seats if s.member not in known]

    def deadline_ns(self) -> int | None:
        waits = [self.sent_ns + self.options.heartbeat_ns]
        waits += [self.batch_due_ns] if self.batch_due_ns is not None else []
        waits += self.fetch_queue.dues_ns() + self.pace.search.due_ns()
        if self._reaches():  # only then `handle` serves them; otherwise they would stay due
            waits += [replica.retry_ns for replica in self.replicas if replica.retry_ns]
        if self._seated():
            waits += self.copies.due_ns()
            for replica in self.replicas:
                if replica.slices.proposal is not None and replica.pulls_slices:
                    waits += replica.slices.dues_ns()
        return min(waits)

    # -------------------------------------------------------------- what an event changes

    def _is_quiet(self, event: ev.Event) -> bool:
        """Whether the event changes only a clock, the pace, or the serial of the orders. On an idle
        rank all do, and the training thread waits for the interpreter's lock while the loop handles
        them."""
        if isinstance(event, ev.Heard):
            return self._repeats(event)
        return isinstance(event, ev.Tick | ev.Timed | ev.Moved)

    def _repeats(self, event: ev.Heard) -> bool:
        """Whether these are the orders that were read last, and nothing has happened since then."""
        known, orders = self.orders, event.body
        if known is None or not isinstance(orders, RankOrders):
            return False
        sender = (*event.peer, event.incarnation) == (self.me.rack, 0, self.member.incarnation)
        bare = not orders.records and orders.snapshot is None
        return sender and bare and _as_read(orders) == _as_read(known)

    def _on_quiet(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        match event:
            case ev.Heard(_, _, RankOrders(serial=serial)):
                self.orders_serial = max(self.orders_serial, serial)
            case ev.Timed():
                effects += self.pace.observe(event)
            case ev.Moved(pulls):
                self.pulls = pulls

    def _touch(self, event: ev.Event) -> None:
        """Note which fragments the event may give something to do. Orders do so as they are
        read."""
        match event:
            case (
                ev.Fetched(fragment=p) | ev.SliceFetched(fragment=p) | ev.SliceMerged(fragment=p)
                | ev.Measured(fragment=p) | ev.Merged(fragment=p) | ev.Copied(fragment=p)
                | ev.Spoiled(fragment=p) | ev.Applied(fragment=p) | ev.Discarded(fragment=p)
            ):  # fmt: skip
                self.touched.add(p)
            case ev.BarrierChanged():
                self._touch_all()

    def _touch_all(self) -> None:
        self.touched.update(range(len(self.replicas)))

    # -------------------------------------------------------------- events

    def _on(  # noqa: C901 - one flat table
        self, event: ev.Event, now_ns: int, effects: list[ev.Effect]
    ) -> None:
        match event:
            case ev.Heard(peer, incarnation, RankOrders() as orders):
                if (*peer, incarnation) == (self.me.rack, 0, self.member.incarnation):
                    self._on_orders(orders, now_ns, effects)
            case ev.Captured():
                self._on_captured(event, effects)
            case ev.StillOpen(p, applied) if p in self.parts:
                self.parts[p] = replace(self.parts[p], applied=applied)
            case ev.Encoded():
                self._on_encoded(event)
            case ev.Fetched():
                self._on_fetched(event, now_ns, effects)
            case ev.SliceFetched(p, version):
                slices, decided = self.replicas[p].slices, self.folded.versions[p] >= version
                effects += slices.on_fetched(event, decided, now_ns)
            case ev.SliceMerged(p):
                effects += self.replicas[p].slices.on_merged(event, self.me)
            case ev.Measured(p):
                effects += self.replicas[p].on_measured(event, now_ns)
            case ev.Merged(p):
                effects += self.replicas[p].on_merged(event, now_ns)
                keys = [(member, p, seq) for member, seq in event.bad]
                reason = event.error[:TEXT_MAX]
                self.bad |= {key: reason for key in keys if self.folded.is_open(*key)}
            case ev.Copied():
                effects += self._on_copied(event, now_ns)
            case ev.Wanting() | ev.UnitsAsked():
                self._on_wanted(event)
            case ev.StateTaken():
                self.copies.on_taken(event)
            case ev.StateCopied():
                effects += self.copies.on_copied(event, now_ns)
            case ev.Spoiled(p, version):
                self.replicas[p].held.discard(version)
                effects.append(ev.DropAnchor(p, version))
            case ev.Applied(p, version, ended):
                self.replicas[p].train_on(version)
                self._end_part(p, ended)
                self._stop_if_undone(effects)
            case ev.Discarded(p, seq):
                self._end_part(p, seq)
                self.fetch_queue.forget((self.member, p, seq))
                effects.append(ev.Free(self.member, p, seq))
            case ev.StepReached(step, step_ns):
                self.step, self.step_ns = step, step_ns
            case ev.Started():
                effects += self.pace.observe(event)
            case ev.Validated() | ev.Probed():
                effects += self.pace.on_measured(event, self._lanes(), now_ns)
            case ev.Leaving(now):
                self.leaving, self.hurry = True, self.hurry or now
            case ev.Idle(versions):
                self.idle_versions = versions
            case ev.BarrierChanged():
                self._on_barrier(event)

    def _on_wanted(self, event: ev.Wanting | ev.UnitsAsked) -> None:
        if isinstance(event, ev.Wanting):
            self.copies.set_wanted(event.on)
        else:
            self.ask = UnitsAsk(event.given, event.size, event.empty)

    def _on_captured(self, event: ev.Captured, effects: list[ev.Effect]) -> None:
        p, seq, base = event.fragment, event.seq, event.base
        self.parts[p] = CapturePart(
            p, seq, base, event.step, event.tokens, event.steps, "", base, "",
            closing=event.closing, units=event.units,
        )  # fmt: skip
        effects.append(ev.Encode(p, seq))

    def _on_copied(self, event: ev.Copied, now_ns: int) -> list[ev.Effect]:
        effects = self.replicas[event.fragment].on_copied(event, now_ns)
        if event.error and now_ns - self.ended_ns > ENDED_NS:
            self.before_end = None
        return effects

    def _on_encoded(self, event: ev.Encoded) -> None:
        part = self.parts.get(event.fragment)
        if part is not None and part.seq == event.seq:
            outcome = {"checksum": event.checksum, "declined": event.declined}
            signs = {"along": event.along, "against": event.against}
            part = replace(part, **outcome, **signs, norm=event.norm, size=event.size)
            self.parts[event.fragment] = part

    def _on_barrier(self, event: ev.BarrierChanged) -> None:
        number = (
            self.barrier.number
            if self.barrier and event.written
            else self.folded.checkpoint_number + 1
        )
        self.barrier = BarrierState(number, event.name, event.written) if event.name else None
        if self.barrier is None:
            for replica in self.replicas:
                replica.pinned = -1

    def _on_orders(self, orders: RankOrders, now_ns: int, effects: list[ev.Effect]) -> None:
        misfit = rank_orders_misfit(orders, len(self.replicas), self.options.ranks)
        if misfit or orders.serial <= self.orders_serial:
            return
        self.orders_serial = orders.serial
        self._on_settled(orders.settled)
        self._read(orders, now_ns, effects)
        effects += self.copies.read(orders, self.folded)
        for offer in orders.offers:
            if not self._shards() or offer.member == self.member:
                self._on_offer(offer)
        for proposal in orders.proposals:
            if (
                self.folded.begun
                and proposal.version == self.folded.versions[proposal.fragment] + 1
            ):
                self._on_proposal(proposal, effects)
        for total in orders.totals:
            self.replicas[total.fragment].sums.take_total(total)
            self.touched.add(total.fragment)
        for fragment, seq in orders.discarded:
            if fragment in self.parts and self.parts[fragment].seq == seq:
                effects.append(ev.DropOffer(fragment, seq))
        self._on_end(orders, effects)
        if not orders.discarded:  # those are asked for again until they are gone
            self.orders = orders

    def _on_settled(self, settled: tuple[int, ...]) -> None:
        """Read which versions every live rack holds."""
        if len(settled) != len(self.settled):
            self._touch_all()
        pairs = zip(settled, self.settled, strict=False)
        self.touched.update([p for p, (now, before) in enumerate(pairs) if now != before])
        self.settled = settled

    def _read(self, orders: RankOrders, now_ns: int, effects: list[ev.Effect]) -> None:
        """Read the new records."""
        if orders.snapshot is not None and orders.snapshot.index > self.decided:
            self._on_snapshot(orders.snapshot, now_ns, effects)
        if orders.prev <= self.decided:
            for record in orders.records[self.decided - orders.prev :]:
                self.decided += 1
                self._on_record(record, now_ns, effects)

    def _on_end(self, orders: RankOrders, effects: list[ev.Effect]) -> None:
        """Stop if the rack has failed or has left. Its leader may know that before this rank has
        read it; records decided before that must be read first."""
        if orders.failure[0] and self.me.rank != 0 and orders.failure != self.failure:
            self.failure = orders.failure
            effects.append(ev.Fail(*orders.failure))
        known = bool(orders.lost) or (self.folded.begun and not self._seated())
        if orders.finish and known and not self.finished:
            self.finished = True
            if not self.leaving and self.folded.over:
                reason = "the other racks ended the job while this one was silent"
                effects.append(ev.Note(RackExpelled(reason)))
            effects.append(ev.Finished(orders.lost))

    def _on_record(self, record: Record, now_ns: int, effects: list[ev.Effect]) -> None:
        before = self.folded.rounds[record.fragment] if isinstance(record, Commit) else 0
        units = self.folded.units
        known = self.folded.copy() if isinstance(record, Roster) else None
        if isinstance(record, Lineage) and self.me.rank == 0 and self._seated():
            effects += _undone(self.folded.versions, record)
        self.folded.take(record)
        self._note_end(known, now_ns)
        after = self.folded.rounds[record.fragment] if isinstance(record, Commit) else 0
        effects.append(ev.RecordCommitted(record, before, after - before))
        if self.folded.units is not None and self.folded.units is not units:
            effects.append(ev.UnitsChanged(self.folded.units))
        self.bad = {key: why for key, why in self.bad.items() if self.folded.is_open(*key)}
        if isinstance(record, Commit | Drop):
            self.touched.add(record.fragment)
        else:
            self._touch_all()
        match record:
            case Genesis():
                self._on_genesis(record, effects)
            case Commit():
                self._on_commit(record, now_ns, effects)
            case Drop():
                self._on_drop(record, effects)
            case Roster():
                self._on_roster(effects)
            case Lineage():
                self._on_roster(effects)
                self._on_lineage(record, effects)
            case CheckpointRecord():
                self._on_checkpoint(record)

    def _note_end(self, before: LogState | None, now_ns: int) -> None:
        """Remember the last racks of the job if it has ended while this rank had a seat."""
        if before is not None and self.folded.over and before.member(self.me.rack) == self.member:
            self.before_end, self.ended_ns = before, now_ns

    def _on_snapshot(self, snapshot: Snapshot, now_ns: int, effects: list[ev.Effect]) -> None:
        """Continue from a snapshot: the records before it will not come. The log state has their
        effect on offers; versions are copied, or are here as tentative results."""
        self._touch_all()
        known = self.folded
        self.folded, self.decided = log_state_of(snapshot), snapshot.index
        self._note_end(known, now_ns)
        effects.append(ev.Restored(snapshot))
        if snapshot.units is not None:
            effects.append(ev.UnitsChanged(snapshot.units))
        if snapshot.checkpoint is not None:
            self._on_checkpoint(snapshot.checkpoint)
        for p, replica in enumerate(self.replicas):
            version, digest = snapshot.versions[p], snapshot.digests[p][self.me.rank]
            own = (self.own_versions[p], self.own_digests[p])
            if version == own[0] and replica.begin(version, digest, own):
                effects.append(ev.PublishAnchor(p, version, 0))
            effects += [ev.DropAnchor(p, gone) for gone in replica.restore(version, digest)]
            if replica.forget_rounds(version):
                effects += replica.slices.undo(p, version)
            ended = self.folded.ended.get((self.member, p), 0)
            named, _ = self.folded.named.get((self.member, p), (0, 0))
            if p in self.parts and named < self.parts[p].seq <= ended:
                effects.append(ev.DropOffer(p, self.parts[p].seq))
        for member, p, seq in self.fetch_queue.wanted():
            if not self.folded.is_open(member, p, seq):
                self.replicas[p].linger.setdefault((member, seq), (snapshot.versions[p], now_ns))

    def _on_genesis(self, record: Genesis, effects: list[ev.Effect]) -> None:
        for fragment, version in enumerate(record.first()):
            own = (self.own_versions[fragment], self.own_digests[fragment])
            digest = record.digests[fragment][self.me.rank]
            if self.replicas[fragment].begin(version, digest, own):
                effects.append(ev.PublishAnchor(fragment, version, 0))

    def _on_commit(self, record: Commit, now_ns: int, effects: list[ev.Effect]) -> None:
        replica = self.replicas[record.fragment]
        replica.commit(record, record.digests[self.me.rank], now_ns)
        for ended in record.dropped:
            self._free(ended.member, record.fragment, ended.seq, effects)

    def _on_drop(self, record: Drop, effects: list[ev.Effect]) -> None:
        for ended in record.dropped:
            if ended.member == self.member:
                bad = record.reason if record.diverged else ""
                effects.append(ev.DropOffer(record.fragment, ended.seq, bad))
            else:
                self._free(ended.member, record.fragment, ended.seq, effects)

    def _on_roster(self, effects: list[ev.Effect]) -> None:
        """Drop the offers of removed members, which no commit can name any more."""
        self.pace.links.keep(seat.member for seat in self.folded.seats.values())
        for member, fragment, seq in self.fetch_queue.wanted():
            removed = self.folded.member(member.rack) != member
            if removed and (member, seq) not in self.replicas[fragment].linger:
                self._free(member, fragment, seq, effects)

    def _on_lineage(self, record: Lineage, effects: list[ev.Effect]) -> None:
        """An own offer that only an undone commit named counts as dropped."""
        for p, replica in enumerate(self.replicas):
            named = replica.begin_anew(record.versions[p], record.digests[p][self.me.rank])
            version = record.versions[p]
            effects += [ev.DropAnchor(p, gone) for gone in replica.drop_outgrown(version)]
            replica.forget_rounds(version)
            effects += replica.slices.undo(p, version)
            if p in self.parts and (self.member, self.parts[p].seq) in named:
                effects.append(ev.DropOffer(p, self.parts[p].seq))
        self._stop_if_undone(effects)

    def _stop_if_undone(self, effects: list[ev.Effect]) -> None:
        """Stop if this rank trains on a version that a lineage has undone: it got the version after
        its leader had reported, and the number will be given to other bits."""
        decided = self.folded.versions
        undone = [p for p, r in enumerate(self.replicas) if decided and r.applied > decided[p]]
        if undone and not self.finished:
            self.finished = True
            names = ", ".join(f"version {self.replicas[p].applied} of fragment {p}" for p in undone)
            reason = (
                f"it trained on {names}, which the other racks undid, because it arrived too late"
            )
            effects.append(ev.Finished(reason))

    def _on_checkpoint(self, record: CheckpointRecord) -> None:
        """Pin the versions of a checkpoint that this rank asked for; or ask for the next number if
        another checkpoint has taken this one."""
        if self.barrier is None or self.barrier.written:
            return
        if self.barrier.name != record.name:
            self.barrier = replace(self.barrier, number=record.number + 1)
        elif not record.written:
            for replica, version in zip(
                self.replicas, self.folded.checkpoint_versions, strict=True
            ):
                replica.pinned = version if version > replica.applied else -1

    def _on_offer(self, offer: Offer) -> None:
        key = (offer.member, offer.fragment, offer.seq)
        mine = offer.member == self.member
        if self.folded.is_open(*key) and self.fetch_queue.want(key, offer, mine=mine):
            self.touched.add(offer.fragment)

    def _on_proposal(self, proposal: MergeProposal, effects: list[ev.Effect]) -> None:
        replica = self.replicas[proposal.fragment]
        known = replica.proposal
        if known and proposal.which <= known.which:
            if replica.slices.news(proposal):
                self.touched.add(proposal.fragment)
            return
        self.touched.add(proposal.fragment)
        replica.proposal = proposal
        effects += replica.slices.begin(proposal, self.member)
        for offer in proposal.members:
            if not proposal.sharded or offer.member == self.member:
                self._on_offer(offer)
        if replica.tentative and replica.tentative.version >= proposal.version:  # decided: it stays
            effects.append(ev.DropAnchor(*replica.tentative.key))
            replica.tentative = None

    def _on_fetched(self, event: ev.Fetched, now_ns: int, effects: list[ev.Effect]) -> None:
        member, p, seq, error = event.member, event.fragment, event.seq, event.error
        if not self.fetch_queue.end_pull((member, p, seq), error, now_ns):
            effects.append(ev.Free(member, p, seq))
        elif error:
            effects.append(ev.Note(FetchFailed(member.rack, p, seq, error)))

    def _end_part(self, fragment: int, seq: int) -> None:
        if fragment in self.parts and self.parts[fragment].seq <= seq:
            del self.parts[fragment]

    # -------------------------------------------------------------- towards the newest version

    def _settle_due(self, now_ns: int, effects: list[ev.Effect]) -> None:
        """Settle the fragments that events have touched, or whose time has come. Settling another
        one would do nothing (tests/sim/test_quiet.py)."""
        for fragment, due_ns in enumerate(self.due_ns):
            if fragment in self.touched or now_ns >= due_ns:
                self._settle(fragment, now_ns, effects)
                self.due_ns[fragment] = self.replicas[fragment].due_ns()
        self.touched.clear()

    def _settle(self, fragment: int, now_ns: int, effects: list[ev.Effect]) -> None:
        """Make the due progress of a fragment: merge what is proposed, adopt what is decided, copy
        what cannot be merged, free the rest."""
        replica, newest = self.replicas[fragment], self.folded.versions[fragment]
        if replica.retry_ns and now_ns >= replica.retry_ns:
            replica.retry_ns = 0
        if self._seated() and replica.pulls_slices and (sharded := replica.slices.proposal):
            weights = self.folded.weights(sharded.members)
            effects += replica.slices.move(self.folded, self.me, weights, now_ns)
        if newest not in replica.held:
            self._reach(fragment, newest, effects)
        proposal, holds_newest = replica.proposal, newest in replica.held
        if proposal and holds_newest and proposal.version == newest + 1 and replica.lacks(proposal):
            self._merge(proposal, proposal.attempt, effects)
        self._tidy(fragment, newest, now_ns, effects)  # also on a rank that is always late

    def _reach(self, fragment: int, newest: int, effects: list[ev.Effect]) -> None:
        """Get the newest decided version: adopt the tentative one, or merge it, or copy it."""
        replica = self.replicas[fragment]
        digest = replica.digests[newest]
        if replica.tentative is not None and replica.tentative.version == newest:
            key, (mine,) = replica.tentative.key, replica.tentative.digests
            replica.tentative = None
            if mine == digest:
                replica.held.add(newest)
                effects.append(ev.PublishAnchor(*key))
                return
            effects.append(ev.DropAnchor(*key))
            if replica.same_members(
                newest
            ):  # otherwise another attempt was decided, not other bits
                effects.append(ev.Note(DigestDiffers(fragment, newest, mine, digest)))
            replica.proposal = replica.slices.proposal = None
        if replica.merging is not None or replica.copying is not None or replica.retry_ns:
            return
        if newest - 1 in replica.held and self._merges(fragment, newest, effects):
            return
        replica.copying = newest
        rounds = self.folded.rounds[fragment]
        effects.append(ev.Copy(fragment, newest, digest, self._rail(), rounds))

    def _merges(self, fragment: int, newest: int, effects: list[ev.Effect]) -> bool:
        """Whether the newest decided version, which is missing here, is or will be merged here."""
        replica = self.replicas[fragment]
        commit, proposal = replica.commits.get(newest), replica.proposal
        if commit is None or proposal is None or proposal.version != newest:
            return False
        if self._seated() and replica.slices.going(newest):
            same = replica.same_members(newest)
            if same:
                self._merge(proposal, proposal.attempt, effects)
            return same
        names = [(share.member, share.seq) for share in commit.members]
        # Sums belong to an attempt and its members; those of another attempt do not fit.
        if self.options.sums and names != [(o.member, o.seq) for o in proposal.members]:
            return False
        keys = [(member, fragment, seq) for member, seq in names]
        merges = self._merge(commit, proposal.attempt, effects)
        return merges or any(map(self.fetch_queue.flying, keys))

    def _merge(
        self, wanted: MergeProposal | Commit, attempt: int, effects: list[ev.Effect]
    ) -> bool:
        """Start the merge, or the sums that it needs first, if every payload is here and nothing
        else is being merged. Returns False if the version cannot be merged here."""
        fragment = wanted.fragment
        replica = self.replicas[fragment]
        names = tuple((each.member, each.seq) for each in wanted.members)
        keys = [(member, fragment, seq) for member, seq in names]
        sharded = isinstance(wanted, MergeProposal) and wanted.sharded
        here = (
            replica.slices.whole(wanted.version, attempt)
            if sharded
            else all(self.fetch_queue.here(key) and key not in self.bad for key in keys)
        )
        if not here or replica.merging is not None or replica.retry_ns:
            return False
        merge = ev.Merge(
            fragment, wanted.version, attempt, names, self.folded.weights(wanted.members),
            sharded=sharded, verify=count_of(attempt) > 1,
            part=self.folded.part(wanted.members, wanted.absent),
            stretch=self.folded.stretch(wanted.members),
            closing=all_closing(wanted.members, wanted.absent),
            waits=self.folded.waits(wanted.members),
        )  # fmt: skip
        step: ev.Merge | ev.Measure | None = merge
        if self.options.sums and len(names) > 1:
            step = replica.sums.towards(merge)
        if step is None:  # the other ranks of this rack lag behind, or will never get there
            return replica.sums.phase is not SumPhase.NEVER
        replica.merging = (wanted.version, attempt)
        effects.append(step)
        return True

    def _shards(self) -> bool:
        """Whether payloads are pulled only as a merge proposal requires."""
        return self.folded.policy is not None and self.folded.policy.sharded

    def _tidy(self, fragment: int, newest: int, now_ns: int, effects: list[ev.Effect]) -> None:
        """Free payloads whose result every live rack holds, and versions that are not needed."""
        replica = self.replicas[fragment]
        settled = self.settled[fragment] if fragment < len(self.settled) else 0
        settled = min(settled, replica.newest)  # a missing version may yet be merged from them
        for (member, seq), (version, since_ns) in list(replica.linger.items()):
            stale = newest - version >= HELD_BEHIND or now_ns - since_ns > LINGER_NS
            if settled >= version or stale:
                self._free(member, fragment, seq, effects)
        effects += replica.slices.tidy(fragment, newest, settled, HELD_BEHIND, now_ns)
        effects += [ev.DropAnchor(fragment, version) for version in replica.drop_outgrown(newest)]

    def _free(self, member: Member, fragment: int, seq: int, effects: list[ev.Effect]) -> None:
        self.replicas[fragment].linger.pop((member, seq), None)
        if self.fetch_queue.forget((member, fragment, seq)):
            effects.append(ev.Free(member, fragment, seq))

    # -------------------------------------------------------------- pulling

    def _pull(self, now_ns: int, effects: list[ev.Effect]) -> None:
        proposals = [replica.proposal for replica in self.replicas if replica.proposal]
        named = {
            (o.member, proposal.fragment, o.seq) for proposal in proposals for o in proposal.members
        }
        effects += self.fetch_queue.start(now_ns, named, self.me.rack, self._rail)

    def _time_pulls(self, effects: list[ev.Effect], now_ns: int) -> None:
        """Start timing the pulls that these effects ask for."""
        for effect in effects:
            if isinstance(effect, ev.Fetch):
                self.pace.links.begin(effect.offer.member, now_ns)
            elif isinstance(effect, ev.FetchSlice):
                self.pace.links.begin(effect.member, now_ns)

    def _pull_ended(self, event: ev.Event, now_ns: int) -> list[ev.Effect]:
        if isinstance(event, ev.Fetched):
            member = event.member
        elif isinstance(event, ev.SliceFetched) and event.rack in self.folded.seats:
            member = self.folded.seats[event.rack].member
        else:
            return []
        return self.pace.links.end(member, event.size, event.error, self.step, now_ns)

    def _lanes(self) -> dict[int, Address]:
        """Lanes of the same rank of the other racks."""
        seats, rank = self.folded.seats, self.me.rank
        return {r: seats[r].lanes[rank] for r in sorted(seats) if r != self.me.rack}

    # -------------------------------------------------------------- telling

    def _flush(self, now_ns: int, effects: list[ev.Effect]) -> None:
        sent = self.sent
        due = sent is None or now_ns >= self.sent_ns + self.options.heartbeat_ns
        if not (due or self.news):
            return
        report = self._report() if sent is None or self.news else sent
        self.batch_due_ns = None
        if sent is not None and not due:
            if report == sent:
                self.news = False
                return
            due_ns = self.sent_ns + batch_ns(len(self.folded.seats))
            if now_ns < due_ns and replace(report, got=sent.got) == sent:
                self.batch_due_ns = due_ns  # collect more news first
                return
        self.news = False
        self.sent, self.sent_ns, self.serial = report, now_ns, self.serial + 1
        numbered = replace(
            report,
            serial=self.serial,
            heard=self.orders_serial,
            pace=self.pace.pace,
            pulls=self.pulls,
        )
        effects.append(ev.Send(Peer(self.me.rack, 0), numbered))

    def _report(self) -> RankReport:
        versions = tuple(replica.newest for replica in self.replicas)
        idle = self.idle_versions == versions == tuple(self.folded.versions) and not self.parts
        got = [key for key in self.fetch_queue.held() if self.folded.is_open(*key)]
        partials = [r.sums.partial(p, versions[p]) for p, r in enumerate(self.replicas)]
        slices = [r.slices.report(versions[p]) for p, r in enumerate(self.replicas)]
        return RankReport(
            serial=0,
            step=self.step,
            step_ns=self.step_ns,
            decided=self.decided,
            versions=versions,
            parts=tuple(self.parts[p] for p in sorted(self.parts)),
            got=tuple([OfferId(*key) for key in got]),
            held=tuple([r.tentative for r in self.replicas if r.tentative]),
            partials=tuple([partial for partial in partials if partial]),
            leaving=self.leaving,
            hurry=self.hurry,
            idle=idle,
            bad=tuple(Bad(OfferId(*key), why) for key, why in sorted(self.bad.items()))[:BAD_MAX],
            pace=self.pace.verdict,
            barrier=self.barrier,
            wants=self.copies.wants,
            copies=tuple(self.copies.given[to] for to in sorted(self.copies.given)),
            slices=tuple([sliced for sliced in slices if sliced]),
            units=self.ask,
        )


def _as_read(orders: RankOrders) -> tuple[object, ...]:
    """What a rank reads of orders, besides records."""
    return (
        orders.offers, orders.proposals, orders.totals, orders.settled, orders.discarded,
        orders.failure, orders.finish, orders.lost, orders.asked, orders.copy,
    )  # fmt: skip


def _undone(versions: Sequence[int], record: Lineage) -> list[ev.Effect]:
    """The event that names the decided versions that are undone, because only the dead held
    them."""
    both = list(enumerate(zip(versions, record.versions, strict=True)))
    back = [f"fragment {p} from version {old} to {new}" for p, (old, new) in both if old > new]
    if not back:
        return []
    racks = tuple([member.rack for member in record.dead])
    return [ev.Note(VersionsUndone(tuple(back), racks))]
