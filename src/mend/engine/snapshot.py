"""Builds the JobStatus by which one process describes its job.

Reads the machines, the published state and the training progress, and changes nothing. Loop
thread; some microseconds per rack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mend.consensus.ballots import number_of
from mend.consensus.log import LogState
from mend.consensus.records import Policy, Seat
from mend.coordination.acceptor_host import WitnessFollower
from mend.coordination.coordinator import Coordinator
from mend.coordination.leader import Leader
from mend.coordination.messages import Orders, RankReport, Reason, Report
from mend.coordination.round import Phase, Round
from mend.engine.state.participation import describe_rounds
from mend.engine.state.training_progress import TrainingProgress
from mend.status.messages import (
    SHOWN_MAX,
    DataSeen,
    JobStatus,
    RackSeen,
    RankSeen,
    RefusedRack,
    RoundSeen,
    TrainingSeen,
    short,
)
from mend.status.server import CounterSample, Recent
from mend.status.status import data_rows
from mend.status.wall_clock import wall_ns
from mend.types import MS, VERSION, Member, Peer, life_of

if TYPE_CHECKING:  # a witness has no published state, and does without torch
    from mend.engine.state.published_state import PublishedState

State = Literal["starting", "running", "leaving", "ended"]
Phased = Literal["open", "merging", "offered"]

WHY_MAX = 16
RECORDED_MAX = 8


@dataclass(frozen=True, slots=True)
class Training:
    """What a leader's process knows besides the state of its machines."""

    published: PublishedState
    pace: TrainingProgress
    recent: Recent
    ranks: int
    missed: Callable[[], int]
    host_bytes: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What this process knows of the job. `decided`: index of the newest decided record. `orders`:
    the newest orders of the coordinator; None: none yet. `hosts`: the coordinator, if it runs in
    this process and leads."""

    log: LogState
    decided: int
    orders: Orders | None
    hosts: Coordinator | None
    leader: Leader | None
    now_ns: int


def view_of_rank(
    job: str, leader: Leader, coordinator: Coordinator | None, training: Training, now_ns: int,
    *, ended: bool,
) -> JobStatus:  # fmt: skip
    """The status, as the leader of a rack knows it."""
    hosts = coordinator if coordinator is not None and coordinator.proposer.leading else None
    log, orders = leader.log, None if leader.left() else leader.orders
    known = Knowledge(log.committed, log.decided, orders, hosts, leader, now_ns)
    state: State = "running"
    detail = ""
    if not log.committed.begun:
        state = "starting"
        detail = "" if orders is not None else "no answer from the coordinator yet"
    elif leader.reports.aggregate.leaving:
        state = "leaving"
    if training.published.finished and not ended:
        detail = "; ".join(training.published.orders.why)
    failure = str(training.published.failure or "")
    return _view(
        known,
        me=leader.member,
        job=job,
        state="ended" if ended else state,
        detail=failure or detail,
        follows=leader.follower.coordinator,
        policy=log.committed.policy or leader.hello.policy,
        why=(*leader.why(), *map(Reason, training.published.look().transfers.sentences())),
        training=_training_seen(leader, training, now_ns),
        retired=coordinator.retired() if coordinator is not None else (),
    )


def view_of_witness(
    job: str, coordinator: Coordinator, follower: WitnessFollower, now_ns: int, *, ended: bool
) -> JobStatus:
    """The status, as the witness knows it."""
    hosts = coordinator if coordinator.proposer.leading else None
    log = hosts.log if hosts is not None else coordinator.acceptor.log
    sent = [(view.sent_ns, view.sent) for view in coordinator.views.values() if view.sent]
    orders = max(sent, key=lambda each: each[0])[1] if sent else None
    known = Knowledge(log.committed, log.decided, orders, hosts, None, now_ns)
    hellos = coordinator.admission.hellos
    return _view(
        known,
        me=coordinator.member,
        job=job,
        state="ended" if ended else "running" if log.committed.begun else "starting",
        detail=coordinator.gave_up,
        follows=coordinator.me if hosts is not None else follower.follower.coordinator,
        policy=log.committed.policy or (hellos[min(hellos)].policy if hellos else None),
        why=orders.why if orders is not None else (),
        configured=coordinator.options.racks,
        retired=coordinator.retired(),
    )


def _view(
    known: Knowledge,
    *,
    me: Member,
    job: str,
    state: State,
    detail: str,
    follows: Peer,
    policy: Policy | None,
    why: Sequence[Reason],
    configured: int = 0,
    training: TrainingSeen | None = None,
    retired: tuple[int, ...] = (),
) -> JobStatus:
    log, orders, hosts = known.log, known.orders, known.hosts
    reasons = {each.fragment: each.text for each in why if each.fragment >= 0}
    general = [str(each) for each in why if each.fragment < 0]
    refused = [RefusedRack(each.refused, short(str(each))) for each in why if each.refused >= 0]
    rounds = _rounds(known, reasons) if log.begun else []
    ballot = hosts.proposer.ballot if hosts is not None else orders.ballot if orders else log.ballot
    return JobStatus(
        job=job,
        mend=VERSION,
        rack=me.rack,
        life=life_of(me),
        state=state,
        detail=short(detail),
        over=log.over,
        coordinator=follows.rack,
        coordinates=hosts is not None,
        ballot=number_of(ballot),
        decided=known.decided,
        commits=sum(log.versions),
        configured=policy.racks if policy else configured,
        fragments=policy.fragments if policy else 0,
        period_steps=policy.period_steps if policy else 0,
        overlap_steps=policy.overlap_steps if policy else 0,
        merge_min_racks=policy.merge_min_racks if policy else 0,
        lockstep=policy.lockstep if policy else False,
        versions=tuple(log.versions[:SHOWN_MAX]),
        racks=_racks(known)[:SHOWN_MAX],
        missing=orders.missing if orders is not None else (),
        in_flight=len(rounds),
        rounds=tuple(rounds[:SHOWN_MAX]),
        why=tuple(map(short, general[:WHY_MAX])),
        refused=tuple(refused[:WHY_MAX]),
        training=training,
        retired=retired,
        slow=orders.slow if orders is not None else (),
        evicted=tuple(log.away),
        evicted_lives=tuple(map(life_of, log.away.values())),
        wall_ns=wall_ns(),
        data=_data(log),
    )


def _data(log: LogState) -> DataSeen | None:
    if log.units is None or log.policy is None:
        return None
    rows = data_rows(log.units, log.policy)
    return DataSeen(rows.done, rows.open, rows.left, rows.given_again, rows.of_epoch)


def _rounds(known: Knowledge, reasons: Mapping[int, str]) -> list[RoundSeen]:
    """The rounds in flight, ascending by fragment."""
    offers = known.orders.offers if known.orders is not None else ()
    proposals = known.orders.proposals if known.orders is not None else ()
    merging = {g.fragment: tuple(offer.member.rack for offer in g.members) for g in proposals}
    offered: dict[int, list[int]] = {}
    for offer in offers:
        offered.setdefault(offer.fragment, []).append(offer.member.rack)
    own = known.hosts.rounds if known.hosts is not None else []
    versions = known.log.versions
    return [
        RoundSeen(
            fragment=fragment,
            version=versions[fragment] + 1,
            phase=_phase(fragment, fragment in merging, own, reasons),
            racks=merging.get(fragment, tuple(offered.get(fragment, ())))[:SHOWN_MAX],
            for_ms=_age_ms(own[fragment], known.now_ns) if fragment < len(own) else -1,
            why=short(reasons.get(fragment, "")),
        )
        for fragment in sorted(offered.keys() | merging.keys() | reasons.keys())
        if fragment < len(versions)
    ]


def _phase(
    fragment: int, merging: bool, own: Sequence[Round], reasons: Mapping[int, str]
) -> Phased:
    """The coordinator knows the phase; other processes infer it from the coordinator's reasons."""
    if merging:
        return "merging"
    if fragment < len(own):
        return "offered" if own[fragment].phase is Phase.IDLE else "open"
    return "open" if fragment in reasons else "offered"


def _age_ms(round_: Round, now_ns: int) -> int:
    if round_.phase is Phase.IDLE:
        return -1
    since_ns = round_.opened_ns if round_.phase is Phase.OPEN else round_.gathered_ns
    return max(0, now_ns - since_ns) // MS


def _racks(known: Knowledge) -> tuple[RackSeen, ...]:
    """All members, ascending; before the first record the racks that have said hello."""
    seats: dict[int, Seat] = dict(known.log.seats)
    if not known.log.begun:
        hellos = known.hosts.admission.hellos if known.hosts is not None else {}
        seats = {rack: hello.seat for rack, hello in hellos.items()}
        if known.leader is not None:
            seats.setdefault(known.leader.member.rack, known.leader.hello.seat)
    return tuple(_rack(known, rack, seats[rack]) for rack in sorted(seats))


def _rack(known: Knowledge, rack: int, seat: Seat) -> RackSeen:
    """One rack, from its own ranks, else from its newest report, else from its offers."""
    orders, decided = known.orders, sum(known.log.versions)
    live = orders is not None and rack in orders.live
    step, step_ns, behind, silent_ms, leaving = -1, 0, -1, -1, False
    report = _report(known, seat.member)
    leader = known.leader
    if leader is not None and rack == leader.member.rack:
        live = live or not known.log.begun
        ranks = leader.reports.ordered()
        if ranks:
            step, step_ns = max(r.step for r in ranks), max(r.step_ns for r in ranks)
            behind = max(0, decided - min(sum(r.versions) for r in ranks))
            silent_ms, leaving = 0, all(r.leaving for r in ranks)
    elif report is not None:
        step, step_ns, leaving = report.step, report.step_ns, report.leaving
        behind = max(0, decided - sum(report.versions))
    elif orders is not None:
        captures = [o.capture_step for o in orders.offers if o.member == seat.member]
        step = max(captures, default=-1)
    if known.hosts is not None and (view := known.hosts.views.get(rack)) is not None:
        silent_ms = max(0, known.now_ns - view.heard_ns) // MS
    return RackSeen(
        rack=rack,
        address=short(seat.address),
        live=live,
        newcomer=rack in known.log.non_voters - known.log.demoted,
        leaving=leaving,
        step=step,
        step_ns=step_ns,
        behind=behind,
        silent_ms=silent_ms,
        life=life_of(seat.member),
    )


def _report(known: Knowledge, member: Member) -> Report | None:
    view = known.hosts.views.get(member.rack) if known.hosts is not None else None
    return view.report if view is not None and view.member == member else None


# ------------------------------------------------------------------ the rack's own training


def note_of(
    pace: TrainingProgress, traffic: Callable[[], tuple[int, int]], now_ns: int
) -> CounterSample:
    step, tokens, step_end_ns, stall_ns = pace.latest
    return CounterSample(now_ns, step, tokens, step_end_ns, stall_ns, *traffic())


def _training_seen(leader: Leader, training: Training, now_ns: int) -> TrainingSeen:
    then, now = training.recent.span()
    age_ns = max(0, wall_ns() - now.step_end_ns)
    newest = leader.reports.newest
    shown = [_rank(rank, report, leader, now_ns) for rank, report in sorted(newest.items())]
    recorded = list(training.pace.recorded.items())[:RECORDED_MAX]
    return TrainingSeen(
        ranks=training.ranks,
        shown=tuple(shown[:SHOWN_MAX]),
        step=now.step,
        tokens=now.tokens,
        step_age_ms=age_ns // MS if now.step else 0,
        stall_us=now.stall_ns // 1000,
        bytes_sent=now.sent,
        bytes_received=now.received,
        recent_steps=now.step - then.step,
        recent_tokens=now.tokens - then.tokens,
        recent_step_ns=_step_time_ns(then, now, age_ns),
        recent_ns=max(0, now.at_ns - then.at_ns),
        recent_stall_us=max(0, now.stall_ns - then.stall_ns) // 1000,
        recent_sent=now.sent - then.sent,
        recent_received=now.received - then.received,
        missed=training.missed(),
        closed_by=short(training.published.rounds.reason),
        host_bytes=training.host_bytes(),
        recorded=tuple((short(name), float(value)) for name, value in recorded),
        participation=short(describe_rounds(training.published.rounds_by_racks()[1])),
    )


def _step_time_ns(then: CounterSample, now: CounterSample, age_ns: int) -> int:
    """Time in ns between the ends of the two steps; up to this moment where the next step is
    overdue, so that a rack that stands still does not go on showing its last speed."""
    steps, took_ns = now.step - then.step, max(0, now.step_end_ns - then.step_end_ns)
    overdue = steps == 0 or age_ns > 2 * took_ns // steps
    return took_ns + (age_ns if overdue else 0)


def _rank(rank: int, report: RankReport, leader: Leader, now_ns: int) -> RankSeen:
    silent_ns = max(0, now_ns - leader.reports.heard_ns.get(rank, now_ns))
    return RankSeen(rank, report.step, report.step_ns, silent_ns // MS)
