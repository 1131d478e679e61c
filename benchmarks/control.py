"""benchmarks.control: the cost of control in a large job. Prints one JSON object.

    python -m benchmarks.control --racks 8 --ranks 72
    python -m benchmarks.control --racks 64 --ranks 72 --seconds 2

The real coordinator, all leaders and one rank machine per rack live in this process under a virtual
clock, and talk in real frames. The rank machine of a rack stands for all its ranks: its reports
reach the leader once per rank, with a checksum and a digest of each rank's own. Where nothing is
measured, in racks 2 and up, they reach it once, and what the leader makes of them gets the other
ranks' checksums and digests on its way out. Racks train `--step-ms` per step and exchange
`--fragments` fragments every `--period` steps; what would be work on tensors takes its time, and
nothing else: a payload `--fetch-ms`, of which a rank pulls four at a time.

`measured` is the CPU time of the coordinator, with the frames that it reads and writes, per virtual
second after the start, in percent of one core. `leader` is the same of the leader of rack 1 and
`wire_mbit` what a rack and the coordinator say to each other, both ways together.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from msgspec.structs import replace

from benchmarks._common import Goal, read_options, report
from mend.consensus.records import Commit, Policy, Seat, checksums_of
from mend.coordination import events as ev
from mend.coordination import wire
from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import LeaderOptions
from mend.coordination.machines import (
    CoordinatorSpec,
    LeaderSpec,
    ProcessSpec,
    RankSpec,
    machines_of,
)
from mend.coordination.messages import Hello, Message, RankOrders, RankReport, Report, Vote
from mend.coordination.streams import Streams
from mend.types import SECOND, Address, Member, Peer

MS = SECOND // 1000
GOAL = Goal("<= 20 % of one core, <= 1 Mbit/s per rack", 20.0, "% of a core", digits=2)
GOAL_MBIT = 1.0
JOB = "control"
LAN_NS, WAN_NS = MS // 10, 5 * MS
ENCODE_NS, MERGE_NS = 5 * MS, 20 * MS
MEASURED_RACKS = 2
"""The coordinator's, and the one whose leader is measured."""
OPTIONS = {
    "racks": (8, "racks of the job"),
    "ranks": (72, "ranks per rack"),
    "fragments": (24, "P"),
    "period": (128, "steps between captures of a fragment"),
    "step_ms": (400, "time of a step"),
    "fetch_ms": (200, "time that a payload takes"),
    "seconds": (10, "virtual time measured"),
}


@dataclass
class Cost:
    """CPU seconds and bytes since the measurement began."""

    cpu_s: float = 0.0
    handled: int = 0
    bytes: int = 0


@dataclass
class Rack:
    """Machines of one rack, and what its training would know."""

    number: int
    member: Member
    parts: ProcessSpec
    step: int = 0
    seq: int = 0
    applied: list[int] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)
    """fragment -> seq of its open offer."""
    due: list[tuple[int, int]] = field(default_factory=list)
    """(fragment, version) to be applied at the next step, with what it ended."""
    ended: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machines = machines_of(self.parts)
        assert self.machines.rank_machine is not None
        assert self.machines.leader is not None
        self.rank, self.leader = self.machines.rank_machine, self.machines.leader
        self.coordinator = self.machines.coordinator
        self.streams = Streams(self.member)
        ranks = self.parts.rank_machine.options.ranks if self.parts.rank_machine else 0
        self.speaks = ranks if self.number < MEASURED_RACKS else 1
        if self.speaks < ranks:  # one rank speaks for all
            self.leader.ranks_configured = self.leader.reports.configured = 1
        self.rank_streams = [Streams(self.member) for _ in range(self.speaks)]


class World:
    """All racks under one clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.now_ns = options, SECOND
        self.fetch_ns = options.fetch_ms * MS
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.coordinating, self.leading = Cost(), Cost()
        self.commits = 0
        self.racks = [self._rack(number) for number in range(options.racks)]
        for rack in self.racks:
            self._step(rack)
            self._beat(rack)

    def _rack(self, number: int) -> Rack:
        o, member = self.options, Member(number, (1000 + number) << 16)
        policy = Policy(
            racks=o.racks, ranks=o.ranks, fragments=o.fragments,
            merge_min_racks=o.racks // 2 + 1,
            grace_ns=-1, lockstep=False, staleness_max_rounds=4, period_steps=o.period,
            overlap_steps=8, overlap_ramp=0, stall_max_ns=SECOND, seat_timeout_ns=0,
            restart_attests=True,
        )  # fmt: skip
        lanes = tuple(Address(f"rack{number}", 20_000 + rank) for rank in range(o.ranks))
        seat = Seat(member, f"tcp://rack{number}:17000", lanes)
        digests = tuple(
            tuple(_hex("start", p, rank) for rank in range(o.ranks)) for p in range(o.fragments)
        )
        leads = LeaderOptions(100 * MS, SECOND, 60 * SECOND)
        coordinates = CoordinatorOptions(o.racks, 100 * MS, SECOND)
        parts = ProcessSpec(
            Peer(number, 0),
            member,
            RankSpec(RankOptions(100 * MS, o.ranks), tuple(each[0] for each in digests)),
            LeaderSpec(
                Hello(seat, policy, (("model", "large"),), digests), Peer(0, 0), leads, self.now_ns
            ),
            CoordinatorSpec(JOB, coordinates) if number == 0 else None,
        )
        return Rack(number, member, parts, applied=[0] * o.fragments)

    # -------------------------------------------------------------- time

    def run(self, until_ns: int) -> None:
        while self.queue and self.queue[0][0] <= until_ns:
            self.now_ns, _, job = heapq.heappop(self.queue)
            job()
        self.now_ns = until_ns

    def _at(self, after_ns: int, job: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_ns + after_ns, next(self.order), job))

    # -------------------------------------------------------------- machines

    def _give(self, rack: Rack, machine: ev.Machine, event: ev.Event) -> None:
        with self._counted(rack, machine) as cost:
            effects = machine.handle(event, self.now_ns)
            machine.deadline_ns()  # as the loop does after each event
            cost.handled += 1
        for effect in effects:
            self._perform(rack, machine, effect)

    @contextlib.contextmanager
    def _counted(self, rack: Rack, machine: ev.Machine) -> Iterator[Cost]:
        """Adds the CPU time inside to the cost of the machine, if that is measured."""
        cost = self._cost(rack, machine) or Cost()
        before = time.process_time()
        yield cost
        cost.cpu_s += time.process_time() - before

    def _cost(self, rack: Rack, machine: ev.Machine) -> Cost | None:
        if machine is rack.coordinator:
            return self.coordinating
        return self.leading if rack.number == 1 and machine is rack.leader else None

    def _beat(self, rack: Rack) -> None:
        """Each machine looks at the clock when it asked to, as its process would have it."""
        for machine in (rack.rank, rack.leader, rack.coordinator):
            if machine is not None:
                due = machine.deadline_ns()
                if due is not None and due <= self.now_ns:
                    self._give(rack, machine, ev.Tick())
        self._at(5 * MS, lambda: self._beat(rack))

    def _send(self, rack: Rack, machine: ev.Machine, to: Peer, body: Message) -> None:
        if isinstance(body, RankReport):
            for rank in range(rack.speaks):
                self._at(LAN_NS, partial(self._from_rank, rack, rank, _of_rank(body, rank)))
        elif isinstance(body, RankOrders):
            if to.rank > 0 and self._cost(rack, machine) is not None:
                with self._counted(rack, machine):
                    frame = wire.encode(rack.streams.envelope(JOB, Peer(rack.number, 0), to, body))
                rack.rank_streams[to.rank].read(wire.decode(frame))
            if to.rank == 0:
                self._at(LAN_NS, lambda: self._hear(rack, Peer(rack.number, 0), rack, body))
        else:
            self._frame(rack, machine, self.racks[to.rack], body)

    def _from_rank(self, rack: Rack, rank: int, report: RankReport) -> None:
        """Report to its leader. Where that is measured, in a frame; rank 0 lives in the same
        process."""
        peer, body = Peer(rack.number, rank), cast(Message, report)
        if rank > 0 and self._cost(rack, rack.leader) is not None:
            streams = rack.rank_streams[rank]
            frame = wire.encode(streams.envelope(JOB, peer, Peer(rack.number, 0), report))
            with self._counted(rack, rack.leader):
                body = rack.streams.read(wire.decode(frame))
        self._hear(rack, peer, rack, body)

    def _frame(self, rack: Rack, machine: ev.Machine, to: Rack, body: Message) -> None:
        if rack.speaks < self.options.ranks and isinstance(body, Report):
            body = _of_all_ranks(body, self.options.ranks)
        if to is rack:  # no frame: both machines live in one process
            self._at(0, lambda: self._hear(rack, Peer(rack.number, 0), rack, body))
            return
        me, there = Peer(rack.number, 0), Peer(to.number, 0)
        with self._counted(rack, machine):
            frame = wire.encode(rack.streams.envelope(JOB, me, there, body))
        if 1 in (rack.number, to.number):
            self.leading.bytes += len(frame)

        def arrive() -> None:
            coordinates = isinstance(body, Hello | Report | Vote)
            theirs = to.coordinator if coordinates else to.leader
            assert theirs is not None
            with self._counted(to, theirs):
                message = to.streams.read(wire.decode(frame))
            self._hear(rack, Peer(rack.number, 0), to, message)

        self._at(WAN_NS, arrive)

    def _hear(self, sender: Rack, peer: Peer, to: Rack, body: Message) -> None:
        heard = ev.Heard(peer, sender.member.incarnation, body)
        for machine in to.machines.receivers(body):
            self._give(to, machine, heard)

    def _perform(self, rack: Rack, machine: ev.Machine, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(to, body):
                self._send(rack, machine, to, body)
            case ev.Encode(p, seq):
                done = ev.Encoded(p, seq, _hex("payload", rack.number, p, seq)[:32], norm=1.0)
                self._at(ENCODE_NS, lambda: self._give(rack, rack.rank, done))
            case ev.Fetch(offer):
                got = ev.Fetched(offer.member, offer.fragment, offer.seq)
                self._at(self.fetch_ns, lambda: self._give(rack, rack.rank, got))
            case ev.Merge(p, version, attempt):
                made = ev.Merged(p, version, attempt, _hex("merged", p, version))
                self._at(MERGE_NS, lambda: self._give(rack, rack.rank, made))
            case ev.Copy(p, version):
                self._at(self.fetch_ns, lambda: self._give(rack, rack.rank, ev.Copied(p, version)))
            case ev.RecordCommitted(Commit() as commit):
                self.commits += rack.number == 0
                rack.due.append((commit.fragment, commit.version))
                for share in commit.members:
                    if share.member == rack.member:
                        rack.ended[commit.fragment] = share.seq

    # -------------------------------------------------------------- training

    def _step(self, rack: Rack) -> None:
        """One step of training: apply what is decided, capture what is due."""
        o = self.options
        rack.step += 1
        for p, version in rack.due:
            ended = rack.ended.pop(p, 0)
            if ended and rack.open.get(p) == ended:
                del rack.open[p]
            rack.applied[p] = version
            self._give(rack, rack.rank, ev.Applied(p, version, ended))
            if p in rack.open:
                self._give(rack, rack.rank, ev.StillOpen(p, version))
        rack.due.clear()
        self._give(rack, rack.rank, ev.StepReached(rack.step, o.step_ms * MS))
        gap = max(1, o.period // o.fragments)
        if rack.step % gap == 0 and rack.leader.log.committed.begun:
            p = rack.step // gap % o.fragments
            if p not in rack.open:
                rack.seq += 1
                rack.open[p] = rack.seq
                self._give(
                    rack,
                    rack.rank,
                    ev.Captured(p, rack.seq, rack.applied[p], rack.step, 1000, o.period),
                )
        # Racks and steps drift apart by up to 2 %, as they do.
        late = (rack.number * 7919 + rack.step * 104_729) % 2000
        self._at(o.step_ms * MS * (100_000 + late) // 100_000, lambda: self._step(rack))


def _of_rank(report: RankReport, rank: int) -> RankReport:
    """The report of another rank in its place."""
    if rank == 0:
        return report
    parts = tuple(
        replace(part, checksum=_hex(part.checksum, rank)[:32]) if part.checksum else part
        for part in report.parts
    )
    held = tuple(replace(each, digests=(_hex(each.digests[0], rank),)) for each in report.held)
    return replace(report, parts=parts, held=held)


def _of_all_ranks(report: Report, ranks: int) -> Report:
    """The report of a leader that has heard all its ranks, and not the first one only."""
    offers = tuple(
        replace(offer, checksums=_checksums(offer.checksum(0), ranks)) for offer in report.offers
    )
    held = tuple(
        replace(
            each, digests=(each.digests[0], *(_hex(each.digests[0], r) for r in range(1, ranks)))
        )
        for each in report.held
    )
    return replace(report, offers=offers, held=held)


@functools.cache
def _checksums(first: str, ranks: int) -> bytes:
    return checksums_of([first, *(_hex(first, rank)[:32] for rank in range(1, ranks))])


@functools.cache
def _hex(*about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()


def main() -> None:
    options = read_options("control", __doc__, OPTIONS)
    world = World(options)
    world.run(4 * SECOND)
    assert world.racks[0].leader.log.committed.begun, "the job did not begin in 4 s"
    world.coordinating, world.leading, before = Cost(), Cost(), world.commits
    world.run((4 + options.seconds) * SECOND)
    share = 100 * world.coordinating.cpu_s / options.seconds
    mbit = world.leading.bytes * 8 / 1e6 / options.seconds
    more = {
        "leader_pct": round(100 * world.leading.cpu_s / options.seconds, 2),
        "wire_mbit": round(mbit, 3),
        "commits": world.commits - before,
        "coordinator_events_per_second": round(world.coordinating.handled / options.seconds),
        "leader_events_per_second": round(world.leading.handled / options.seconds),
    }
    report("control", GOAL, [share], options, None, more, also=mbit <= GOAL_MBIT)


if __name__ == "__main__":
    main()
