"""Admits racks: before the first record, and into a running job."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field

from mend.consensus.log import Log, LogState, witness_votes
from mend.consensus.records import TEXT_MAX, Genesis
from mend.consensus.units import all_free
from mend.consensus.units import resume as resume_units
from mend.coordination.events import CommonEffect, Connect, Note, Send
from mend.coordination.member_view import MemberView
from mend.coordination.messages import Hello, Reason, Refusal
from mend.coordination.validation import (
    Difference,
    describe,
    differences,
    differing,
    hello_misfit,
    plan_hash,
    policy_differences,
    resume_misfit,
)
from mend.events.kinds import BuffersDiffer, HelloHeard, RackRefused
from mend.types import WITNESS, Member, Peer, life_of

VISITOR = 0xFFFF
"""Rank number in the address of a refused rack. No rank of the job has it."""

CONTENDED_MAX = 1_024
"""Limit of remembered incarnations that ask for the seat of a live rack, of all racks together.
Beyond it the oldest is forgotten and starts its wait again."""


def first_to_begin(hellos: Mapping[int, Hello]) -> Hello:
    """The hello whose weights the job begins with: that of the lowest rack that resumes a
    checkpoint, otherwise of the lowest rack."""
    ascending = [hellos[rack] for rack in sorted(hellos)]
    return next((hello for hello in ascending if hello.resume is not None), ascending[0])


def first_record(hellos: Mapping[int, Hello], witness: Member | None) -> Genesis:
    """The first record of the job that these racks found."""
    lowest = first_to_begin(hellos)
    resume = lowest.resume
    votes = witness is None or witness_votes(witness, len(hellos))
    total = lowest.policy.units * lowest.policy.epochs
    units = all_free(total) if total else None
    if resume is not None and resume.units is not None:
        own = {r: hello.seat.member for r, hello in hellos.items() if hello.resume is not None}
        units = resume_units(resume.units, own)
    return Genesis(
        roster=tuple(hellos[rack].seat for rack in sorted(hellos)),
        witness=witness,
        policy=lowest.policy,
        plan=plan_hash(lowest),
        digests=lowest.digests,
        non_voters=() if votes else (WITNESS,),
        versions=resume.versions if resume else (),
        rounds=resume.rounds if resume else (),
        parent=resume.lineage if resume else "",
        parent_checkpoint=resume.number if resume else 0,
        units=units,
    )


def differing_buffers(hellos: Mapping[int, Hello]) -> BuffersDiffer | None:
    """The warning that the founders' buffers differ; None if they are equal. Not checked in a job
    that resumes a checkpoint, because training has changed the buffers of each rack."""
    lowest = hellos[min(hellos)]
    racks = dict[int, list[str]]()
    if all(hello.resume is None for hello in hellos.values()):
        racks = {r: differing(lowest.buffers, hellos[r].buffers) for r in sorted(hellos)}
    racks = {rack: names for rack, names in racks.items() if names}
    if not racks:
        return None
    names = dict.fromkeys(name for found in racks.values() for name in found)
    first, from_rack = next(iter(names)), lowest.seat.member.rack
    return BuffersDiffer(first, len(names) - 1, tuple(racks), from_rack)


@dataclass
class Admission:
    """The hellos of founding racks and of racks that wait for a seat, and the reasons of
    refusals."""

    racks: int
    job: str
    detect_ns: int
    hellos: dict[int, Hello] = field(default_factory=dict)
    joining: dict[int, Hello] = field(default_factory=dict)
    """Hellos of racks that want to join the running job."""
    refused: dict[int, str] = field(default_factory=dict)
    contended_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rack, incarnation) -> when it first asked for the seat of a live rack. Bounded by
    CONTENDED_MAX, because the sender chooses the incarnation and could otherwise exhaust the
    memory."""

    def hear(
        self,
        sender: Member,
        hello: Hello,
        views: Mapping[int, MemberView],
        log: LogState,
        now_ns: int,
        effects: list[CommonEffect],
    ) -> bool:
        """Whether the rack may get a seat. Refuses a rack that does not fit."""
        rack, member = sender.rack, hello.seat.member
        if member.incarnation != sender.incarnation:
            return False  # no rack sends this
        misfit = hello_misfit(hello, self.racks)
        if member.rack != rack or (rack >= self.racks and not misfit):
            last = self.racks - 1
            misfit = f"rack {member.rack}, but this job has racks 0 to {last} (rack, MEND_RACK)"
        if misfit:
            self.refuse(hello, "racks", misfit, misfit, effects)
            return False
        known = views.get(rack)
        if known is not None and known.member == member:
            return not log.begun
        if member in log.former:
            return False  # a late frame of a rack that has left
        if known is not None and known.live(now_ns, self.detect_ns):
            # A restarted rack may meet its own former life. Wait until that is over.
            if now_ns - self._contended_since_ns(member, now_ns) > 2 * self.detect_ns:
                detail = f"another live process says it is rack {rack} of job {self.job!r}"
                self.refuse(hello, "taken", detail, detail, effects)
            return False
        if log.begun and not self._may_join(hello, views, log, now_ns, effects):
            return False
        waiting = self.joining if log.begun else self.hellos
        if rack not in waiting or waiting[rack].seat != hello.seat:
            effects.append(Connect(Peer(rack, 0), hello.seat.address))
            effects.append(Note(HelloHeard(rack, hello.seat.address)))
        waiting[rack] = hello
        return True

    def _may_join(
        self,
        hello: Hello,
        views: Mapping[int, MemberView],
        log: LogState,
        now_ns: int,
        effects: list[CommonEffect],
    ) -> bool:
        """Whether a rack fits a job that has begun and its former incarnation is known to be
        over."""
        rack = hello.seat.member.rack
        if log.over:
            self.report_end(hello.seat.member, hello, log, effects)
            return False
        others = (view for other, view in views.items() if other not in (rack, WITNESS))
        alone = not any(view.live(now_ns, self.detect_ns) for view in others)
        if log.policy is not None and log.policy.lockstep and alone:
            return False  # perhaps all racks are being restarted and will found the job again
        if difference := self._differs(hello, log):
            self.refuse(hello, "plan", *difference, effects)
            return False
        former = log.member(rack)  # a hello may be older than that life; a challenge was sent
        return former is None or life_of(former) in hello.after

    def report_end(
        self, sender: Member, hello: Hello, log: LogState, effects: list[CommonEffect]
    ) -> None:
        """Send a rack that was started too late the refusal that the job is over."""
        known = sender in log.former  # a late frame of a rack that has left
        if not log.over or known or hello.seat.member != sender or sender.rack >= self.racks:
            return
        remedy = (
            "To train again, start all racks, and the witness, once it has ended; or name another "
            "job"
        )
        detail = f"job {self.job!r} is over: all its racks have left. {remedy}"
        self.refuse(hello, "over", detail, detail, effects)

    def report_lost_seat(
        self, sender: Member, views: Mapping[int, MemberView], log: Log, effects: list[CommonEffect]
    ) -> None:
        """Notify a member that it has lost its seat. Orders go to members only, and a rack that
        ignores this rack's next life would never learn why it gets no answer."""
        committed, known = log.committed, views.get(sender.rack)
        served = known is not None and known.member == sender
        if served or committed.over or sender not in committed.former:
            return
        removal = log.removal_of(sender)
        if removal is None:
            return
        seat, why = removal
        visitor = Peer(min(sender.rack, self.racks), VISITOR)
        effects.append(Connect(visitor, seat.address))
        effects.append(Send(visitor, Refusal(sender.incarnation, "seat", why or "it was silent")))

    def _contended_since_ns(self, member: Member, now_ns: int) -> int:
        since_ns = self.contended_ns.setdefault((member.rack, member.incarnation), now_ns)
        if len(self.contended_ns) > CONTENDED_MAX:
            del self.contended_ns[next(iter(self.contended_ns))]
        return since_ns

    def seated(self, members: Collection[Member]) -> None:
        """Forget the pending hellos of members that have a seat now."""
        self.joining = {r: h for r, h in self.joining.items() if h.seat.member not in members}

    def _differs(self, hello: Hello, log: LogState) -> tuple[str, str] | None:
        """Why a rack may not join a running job: (text for the rack, text for this log)."""
        if log.policy is not None and log.policy.lockstep:
            why = "the job runs in lockstep, where racks begin together; restart all racks"
            return why, why
        if log.policy is not None and (found := policy_differences(log.policy, hello.policy)):
            return describe(found)
        if plan_hash(hello) == log.plan:
            return None
        for other in self.hellos.values():
            if plan_hash(other) == log.plan and (found := differences(other, hello)):
                return describe(found)
        return describe([Difference("its plan", plan_hash(hello)[:12], log.plan[:12])])

    def first_misfit(self, effects: list[CommonEffect]) -> int | None:
        """Before the start: refuse the rack whose plan differs from that of the lowest rack."""
        lowest = self.hellos[min(self.hellos)]
        for rack in sorted(self.hellos):
            if found := differences(lowest, self.hellos[rack]):
                head = f"rack {rack} differs from rack {lowest.seat.member.rack}: "
                to_sender, to_log = (head + text for text in describe(found))
                self.refuse(self.hellos.pop(rack), "plan", to_sender, to_log, effects)
                return rack
        for rack in sorted(self.hellos):
            ascending = [self.hellos[other] for other in sorted(self.hellos)]
            if misfit := resume_misfit(self.hellos[rack], ascending):
                to_sender, to_log = (
                    f"rack {rack} cannot begin with the others: {m}" for m in misfit
                )
                self.refuse(self.hellos.pop(rack), "resume", to_sender, to_log, effects)
                return rack
        return None

    def refusals(self, present: Container[int]) -> tuple[Reason, ...]:
        """The racks that are absent because they were refused, with the reasons."""
        absent = [rack for rack in sorted(self.refused) if rack not in present]
        return tuple([Reason(self.refused[rack], refused=rack) for rack in absent])

    def refuse(
        self, hello: Hello, kind: str, detail: str, noted: str, effects: list[CommonEffect]
    ) -> None:
        """Refuse a rack. `detail`: sent to the rack and shown to status clients. Except for the
        number of racks it names the wrong value, never the right one, because the sender may be a
        stranger. `noted`: for the local log."""
        detail = detail[:TEXT_MAX]
        # Racks outside the job share one visitor: numbers from the network must not
        # create connections and events without bound.
        rack = min(hello.seat.member.rack, self.racks)
        visitor = Peer(rack, VISITOR)
        effects.append(Connect(visitor, hello.seat.address))
        refusal = Refusal(hello.seat.member.incarnation, kind, detail)
        effects.append(Send(visitor, refusal))
        if self.refused.get(rack) != detail:
            self.refused[rack] = detail
            effects.append(Note(RackRefused(rack, kind, noted)))
