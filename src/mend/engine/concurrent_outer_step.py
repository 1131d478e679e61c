"""The asyncio side of one rank: gives its machines their events and performs their effects.

It keeps the tensors that the machines only name. Everything here runs on the loop's thread; jobs go
to workers by way of the host and come back as events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from mend.codec import CLOSING
from mend.consensus.records import Commit, Record, Roster, all_closing
from mend.consensus.weights import WHOLE
from mend.coordination import events as ev
from mend.coordination.machines import Machines
from mend.coordination.messages import Hello, Message, RankOrders
from mend.engine.equal_offers import EqualOffers
from mend.engine.fragment_state import OpenOffer
from mend.engine.host import EventQueue, Foreigners, HostInterface, OtherJobs
from mend.engine.merging import Merging, Slicing, said
from mend.engine.micro_benchmark import MicroBenchmark, probe, serve_probes
from mend.engine.numerics import Anchor, Numerics
from mend.engine.offers import Encoded
from mend.engine.published_state import PublishedState
from mend.engine.pulls import Pulls
from mend.engine.rack_state_mirror import RackStateMirrors
from mend.engine.state_copying import StateCopying
from mend.engine.sums import tensors_of
from mend.engine.training_state import Given
from mend.errors import (
    CheckpointError,
    InvariantError,
    JobLost,
    MendError,
    NonFinite,
    OtherJob,
    OtherVersion,
    PlanMismatch,
    Refused,
    StartTimeout,
    WorkerFailed,
    require,
)
from mend.events.base import LoggedEvent
from mend.events.kinds import (
    AbsentRack,
    DigestDiffers,
    DroppedOffer,
    JobBegunAgain,
    MergedShare,
    OfferDeclined,
    OfferEncoded,
    ProtocolFault,
    RackBack,
    RackSilent,
    RoundCommitted,
    RoundsShort,
    SeatLost,
    SnapshotRead,
    StillWaiting,
)
from mend.trace.writer import Tape
from mend.types import Extent, Member, Owned, Peer, offer_key, rack_name, state_key

T = TypeVar("T")
Payload = tuple[Member, int, int]


class ConcurrentOuterStep:
    """The loop side of a rank."""

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
    ) -> None:
        """`machines`: those of a rank's process. `plain`: per fragment, which of its tensors are
        merged by the mean whatever the rule; empty: none. `tape`: records the machines' events.
        `moments`: number of fragments of moments, the last ones."""
        self.rank_machine = require(machines.rank_machine, "a rank without a machine")
        self.leader = machines.leader
        self.coordinator = machines.coordinator
        self._receivers, self._machines = machines.receivers, machines.named()
        self.me, self.member, self.owned = me, member, owned
        self.tape = tape
        self.numerics, self.published, self.host = numerics, published, host
        of_moments = numerics.for_moments()
        self.numerics_of = [numerics] * (len(owned) - moments) + [of_moments] * moments
        """Per fragment."""
        self.anchors: dict[tuple[int, int], Anchor] = {
            (p, anchor.version): anchor for p, anchor in enumerate(genesis)
        }
        self.tentative: dict[tuple[int, int, int], Anchor] = {}
        self.payloads: dict[Payload, Tensor] = {}
        self.checksums: dict[Payload, str] = {}
        self.offers: dict[tuple[int, int], OpenOffer] = {}
        flags = plain or [()] * len(owned)
        tensors = [tensors_of(part, plain) for part, plain in zip(owned, flags, strict=True)]
        self._merging = Merging(self, tensors)
        self.slicing = Slicing(self)
        self._states = StateCopying(self)
        self.pulls = Pulls()
        self.mirrors: RackStateMirrors | None = None
        """Set where racks keep state of scope rack for each other."""
        self._give = EventQueue(self._machines, host.now_ns, self._perform, tape).give
        self.benchmark: MicroBenchmark | None = None
        """Of the training thread; set where slow racks are validated."""
        if self.rank_machine.options.detector.validates:
            serve_probes(host, me.rank)
        self._equal_offers = EqualOffers()
        self._silent: set[int] = set()
        self._twin = ""
        self._met: set[int] = set()
        """Other racks, and the witness, that have sent a message."""
        self._foreigners, self._other_jobs = Foreigners(host), OtherJobs(host)
        for fragment, anchor in enumerate(genesis):
            host.serve(self._state_key(fragment, anchor), anchor.view())

    # -------------------------------------------------------------- in

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        """Handle a message of any process."""
        self._met.add(peer.rack)
        if isinstance(body, RankOrders) and not self.published.finished:
            self._watch(body.live, body.why)
            opened = _opened_in(body)
            self.published.heard(body.live, body.why, body.settled, opened, body.slow)
            if self.me.rank == 0 and (same := self._equal_offers.warning(body.offers)):
                self.host.note(same)
            self.published.moves(body.moving, body.taken, self.host.now_ns())
        elif isinstance(body, Hello) and peer == self.me and incarnation != self.member.incarnation:
            # It expects the coordinator here, so its list of addresses has another order.
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
        silent = set(self.published.seats) - set(live) - {self.me.rack}
        for rack in sorted(silent - self._silent):
            effect = "; ".join(why) or "rounds go on without it"
            self.host.note(RackSilent(rack, effect))
        for rack in sorted((self._silent - silent) & set(live)):
            self.host.note(RackBack(rack))
        self._silent = silent

    def tell(self, event: ev.Event) -> None:
        """Give an event of this rank's own threads to the rank machine."""
        self._give(self.rank_machine, event)

    def own(self, offer: OpenOffer) -> None:
        """Take the tensors of a capture from the training thread, before the Captured event."""
        self.offers[(offer.fragment, offer.seq)] = offer

    def give_state(self, to: Member, step: int, data_B: Given) -> None:
        """Take the copy of the training state for a joining rack, or the reason for none."""
        self._states.give(to, step, data_B)

    def reserve_state(self, size: int) -> None:
        """Prepare memory: the training thread is about to copy this many bytes."""
        self._states.reserve(size)

    def tick(self) -> None:
        """Give a Tick to every machine whose deadline has passed."""
        if not self.published.begun and self._foreigners.settled():
            self.published.fail(Refused(self._foreigners.said))
        now_ns = self.host.now_ns()
        for machine in self._machines.values():
            due = machine.deadline_ns()
            if due is not None and due <= now_ns:
                self._give(machine, ev.Tick())
        self._count()

    def _count(self) -> None:
        """Tell how far the pulls of this rank are."""
        waiting: dict[int, int] = {}
        for member, fragment, _ in self.rank_machine.fetch_queue.waiting():
            size = self.numerics_of[fragment].payload_bytes(self.owned[fragment])
            waiting[member.rack] = waiting.get(member.rack, 0) + size
        standing = self.pulls.standing(waiting)
        if standing != self.rank_machine.pulls:
            self.published.pulled = sum(each.moved for each in standing)
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
        """Answer a process of another version or job. One of another version stops this rank, only
        before the start."""
        if isinstance(found, OtherJob):
            self._other_jobs.met(found)
            return
        leader = self.leader
        self._foreigners.met(
            found, leader.options.peers if leader and not self.published.begun else ()
        )
        self.published.last_error = str(found)

    def deadline_ns(self) -> int | None:
        dues = [machine.deadline_ns() for machine in self._machines.values()]
        return min((due for due in dues if due is not None), default=None)

    # -------------------------------------------------------------- out

    def _perform(self, effect: ev.Effect, machine: ev.Machine) -> None:  # noqa: C901 - one flat table
        match effect:
            case ev.Send(to, body):
                self._send(to, body)
            case ev.Connect(peer, address):
                self.host.connect(peer, address)
            case ev.Encode(fragment, seq):
                self._encode(self.offers[(fragment, seq)])
            case ev.Fetch():
                self._fetch(effect)
            case ev.FetchSlice() | ev.MergeSlice() | ev.FreeSlices():
                self.slicing.perform(effect)
            case ev.Measure():
                self._merging.measure(effect)
            case ev.Sum():
                self._merging.sum(effect, partial(self._give, machine))
            case ev.Merge():
                self._merging.merge(effect)
            case ev.Copy():
                self._copy(effect)
            case ev.CopyState():
                self._states.copy(effect)
            case ev.NoState(reason):
                self.published.receive(reason)
            case ev.AskedState(racks):
                self.published.ask(racks)
            case ev.FreeState(to):
                self._states.free(to)
                self.published.free(to)
            case ev.Validate():
                if self.benchmark is not None:
                    self.benchmark.ask(effect)
            case ev.Probe():
                probe(self.host, self.me.rank, effect, self.tell)
            case ev.PublishAnchor(fragment, version, attempt):
                self._publish(fragment, version, attempt)
            case ev.RecordCommitted(record, rounds, part):
                self._committed(record, rounds, part)
            case ev.Restored(snapshot):
                self.host.note(SnapshotRead(snapshot.index))
                self.published.restore(snapshot)
            case ev.Free(member, fragment, seq):
                self._free(member, fragment, seq)
            case ev.DropAnchor(fragment, version, attempt):
                self._forget(fragment, version, attempt)
            case ev.DropOffer(fragment, seq, bad):
                self.published.discard(fragment, seq, bad)
            case ev.Note(noted):
                self._note(noted)
            case ev.Fail(kind, detail):
                self._fail(kind, detail)
            case ev.Finished(reason):
                if machine is self.rank_machine:
                    self._finish(reason)
                else:
                    self.host.finished()
            case _:
                raise TypeError(f"a rank does not know the effect {effect!r}")

    def _note(self, event: LoggedEvent) -> None:
        if isinstance(event, StillWaiting):
            event = StillWaiting(event.what + self._more(), event.seconds)
        self.host.note(event)
        if isinstance(event, DigestDiffers | ProtocolFault):
            self.published.last_error = event.sentence()

    def _finish(self, reason: str) -> None:
        """This rack has no seat any more. One that has not asked to leave learns it at its next
        step."""
        if reason:
            self.published.removed[self.member] = reason
        self.published.finish(self.member)
        if self.published.lost_seat(self.member) and not self.rank_machine.leaving:
            reason = self.published.why_out(self.member)
            self.host.note(SeatLost(reason))

    def _fail(self, kind: str, detail: str) -> None:
        if kind == JobLost.__name__:
            replicas = self.rank_machine.replicas
            if self.published.trains or all(replica.newest >= 0 for replica in replicas):
                return  # the last bytes arrived after this rank had reported them missing
            if self.published.failure is None:
                self.host.note(JobBegunAgain(detail))
        more = self._more() if kind == StartTimeout.__name__ else ""
        self.published.fail(_error(kind, detail + more))

    def _more(self) -> str:
        """What this rank knows beside the leader of a start that waits."""
        jobs = self._other_jobs.in_words
        return (f"; {jobs}" if jobs else "") + self._unheard() + self._twin

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
        return text + (f"; heard, and waiting as well: {', '.join(heard)}" if heard else "")

    def _committed(self, record: Record, rounds: int, part: int) -> None:
        if not isinstance(record, Commit):
            self.published.told(record)
            if isinstance(record, Roster) and self.mirrors is not None:
                self.mirrors.retired(record.retired)
            return
        numerics = self.numerics_of[record.fragment]
        if numerics.of_values:
            self.published.told(record, None)
            self._note_commit(record)
        else:
            momentum = numerics.rates(
                rounds, part, len(record.members), all_closing(record.members, record.absent)
            ).momentum
            self.published.told(record, (rounds / WHOLE, momentum))
            self._note_commit(record, (part / WHOLE, rounds / WHOLE, momentum))
        if self.mirrors is not None and not numerics.of_values:
            number = sum(panel.decided for panel in self.published.panels)
            self.mirrors.committed(record, number)

    def _note_commit(self, commit: Commit, outer: tuple[float, float, float] | None = None) -> None:
        """`outer`: part of a full round, rounds before it, momentum; None: a round of moments."""
        _, live = self.published.turnout.recent[-1]
        self.host.note(_event_of(commit, live, outer))
        warning = self.published.turnout.warning()
        if warning and self.me.rank == 0:
            self.host.note(RoundsShort(warning))

    def _send(self, to: Peer, body: Message) -> None:
        if to == self.me:
            self.heard(self.me, self.member.incarnation, body)
        else:
            self.host.send(to, body)

    def _encode(self, offer: OpenOffer) -> None:
        def job() -> Encoded:
            if offer.encoding is not None:
                return offer.encoding()
            if offer.landed is not None:
                offer.landed()
            numerics = self.numerics_of[offer.fragment]
            anchor_N = None if offer.encoded or numerics.of_values else offer.anchor.values
            whole = offer.closing and numerics.in_weights
            codec = CLOSING if whole else offer.anchor.codec
            return numerics.encode(offer.delta_N, offer.residual_N, anchor_N, codec)

        def done(result: Encoded | Exception) -> None:
            fragment, seq = offer.fragment, offer.seq
            if isinstance(result, NonFinite):
                self.published.last_error = offer.declined = reason = str(result)
                self.host.note(OfferDeclined(fragment, seq, reason))
                self.tell(ev.Encoded(fragment, seq, "", declined="its delta is not finite"))
            elif isinstance(result, Exception):
                self.broken(result)
            else:
                offer.pend_N, offer.sent_N, offer.encoded = result.pend, result.sent, True
                self._encoded(offer, result)
                self._keep((self.member, fragment, seq), result.payload, result.checksum)
                size = result.payload.numel() if self._varies(fragment) else 0
                self.tell(ev.Encoded(fragment, seq, result.checksum, norm=result.norm, size=size))

        self.work(job, done)

    def _varies(self, fragment: int) -> bool:
        """Whether offers of this fragment differ in size, and must carry it."""
        return self.numerics_of[fragment].codecs(self.owned[fragment]).varies

    def _encoded(self, offer: OpenOffer, encoded: Encoded) -> None:
        """Count the bytes and note the offer."""
        size, fp32_bytes = encoded.payload.numel(), 4 * offer.delta_N.numel()
        residual = encoded.unsent / encoded.length if 0 < encoded.length < math.inf else 0.0
        numerics = self.numerics_of[offer.fragment]
        about = (offer.fragment, offer.seq, size, fp32_bytes, residual)
        with self.published.changed:
            if numerics.of_values:
                self.published.moment_bytes += size
            else:
                self.published.sent = self.published.sent.plus(size, fp32_bytes, residual)
        if numerics.of_values:
            self.host.note(OfferEncoded(*about, moments=True))
        elif not numerics.codec.exact:
            self.host.note(OfferEncoded(*about))

    def _fetch(self, effect: ev.Fetch) -> None:
        offer = effect.offer
        name = (offer.member, offer.fragment, offer.seq)
        owned, numerics = self.owned[offer.fragment], self.numerics_of[offer.fragment]
        size, most = numerics.payload_bytes(owned), numerics.payload_bytes_max(owned)
        if self._varies(offer.fragment) and offer.sizes:
            size = offer.sizes[self.me.rank]
        if size > most:
            why = f"its offer has {size} bytes; the limit is {most}"
            self.tell(ev.Fetched(*name, error=why))
            return
        payload = self.numerics.buffers.empty(size, torch.uint8, locked=False)
        checksum = offer.checksum(self.me.rank) or "absent"

        def done(error: Exception | None) -> None:
            self.pulls.end(offer.member.rack, meter, whole=error is None)
            if error is None:
                self._keep(name, payload, checksum)
            self.tell(ev.Fetched(*name, error=said(error), size=size))

        meter, key = self.pulls.begin(offer.member.rack, size), self._offer_key(name)
        data = payload.numpy().data
        self.host.fetch(effect.holders, key, checksum, data, done, meter=meter)

    def _copy(self, effect: ev.Copy) -> None:
        fragment, version = effect.fragment, effect.version
        owned, numerics = self.owned[fragment], self.numerics_of[fragment]
        data = numerics.empty(owned, locked=False)

        def finish(result: Anchor | Exception) -> None:
            error, good = "", isinstance(result, Anchor) and result.digest == effect.digest
            self.pulls.end(self.me.rack, meter, whole=good)
            if isinstance(result, Exception):
                error = said(result)
            elif result.digest != effect.digest:
                error = "the donor's bits are not those of the log"
            else:
                self.anchors[(fragment, version)] = result
            self.published.copies_failed[fragment] = error
            self.tell(ev.Copied(fragment, version, error=error))

        def done(error: Exception | None) -> None:
            if error is not None:
                finish(error)
            else:
                adopt = partial(numerics.adopt, data, owned, version, effect.rounds)
                first = partial(numerics.adopt_first, data, owned)
                self.work(adopt if version else first, finish)

        key, data_B = state_key(self.me.rank, fragment, version, effect.digest), data.numpy().data
        extent, into_B = Extent(0, data_B.nbytes), data_B.cast("B")
        if not version:  # its outer states are zero
            into_B = into_B[: owned.numel * data.element_size()]
        meter = self.pulls.begin(self.me.rack, into_B.nbytes)
        self.host.fetch(effect.holders, key, "", into_B, done, extent, meter)

    def _publish(self, fragment: int, version: int, attempt: int) -> None:
        if attempt:
            self.anchors[(fragment, version)] = self.tentative.pop((fragment, version, attempt))
        anchor = self.anchors[(fragment, version)]
        self.host.serve(self._state_key(fragment, anchor), anchor.view())
        self.published.publish(fragment, anchor)

    def _forget(self, fragment: int, version: int, attempt: int) -> None:
        if attempt:
            self.tentative.pop((fragment, version, attempt), None)
            return
        anchor = self.anchors.pop((fragment, version), None)
        if anchor is not None:
            self.host.drop(self._state_key(fragment, anchor))
        self.published.forget(fragment, version)

    def _keep(self, name: Payload, payload: Tensor, checksum: str) -> None:
        self.payloads[name], self.checksums[name] = payload, checksum
        self.host.serve(self._offer_key(name), payload.numpy().data)

    def _free(self, member: Member, fragment: int, seq: int) -> None:
        name = (member, fragment, seq)
        self.host.drop(self._offer_key(name))
        self.payloads.pop(name, None)
        self.checksums.pop(name, None)
        if member == self.member:
            self.offers.pop((fragment, seq), None)

    def work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """As `HostInterface.work`. A broken invariant is no result: it stops this rank. Taken for a
        failed merge or copy, it would be tried again for ever."""

        def ended(result: T | Exception) -> None:
            if isinstance(result, InvariantError):
                raise result
            done(result)

        self.host.work(job, ended)

    def broken(self, error: Exception) -> None:
        """Fail this rank: a background job met a bug, or the machine is out of memory."""
        failure = WorkerFailed(f"a background job of rack {self.me.rack} failed: {error!r}")
        failure.__cause__ = error
        self.published.fail(failure)

    def _offer_key(self, name: Payload) -> bytes:
        return offer_key(name[0], self.me.rank, name[1], name[2])

    def _state_key(self, fragment: int, anchor: Anchor) -> bytes:
        return state_key(self.me.rank, fragment, anchor.version, anchor.digest)


def _opened_in(orders: RankOrders) -> dict[int, int]:
    """fragment -> version that a rack with an open offer trained on when it passed a capture point,
    unless the members of that round are fixed."""
    opened: dict[int, int] = {}
    for offer in orders.offers:
        opened[offer.fragment] = max(offer.applied, opened.get(offer.fragment, 0))
    gathers = {(gather.fragment, gather.version - 1) for gather in orders.gathers}
    return {p: version for p, version in opened.items() if (p, version) not in gathers}


_FAILURES: dict[str, type[MendError]] = {
    kind.__name__: kind for kind in (CheckpointError, JobLost, PlanMismatch, Refused, StartTimeout)
}
"""What may end a rank by name: all errors that a leader names."""


def _error(kind: str, detail: str) -> MendError:
    """The exception by name. The name comes from the rack's leader, another process."""
    known = _FAILURES.get(kind)
    return known(detail) if known is not None else MendError(f"{kind}: {detail}")


def _event_of(
    commit: Commit, live: int, outer: tuple[float, float, float] | None
) -> RoundCommitted:
    """`live`: number of live racks; 0: not known. `outer`: as in `_note_commit`."""
    part, rounds, momentum = outer or (None, None, None)
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
        moments=outer is None,
    )
