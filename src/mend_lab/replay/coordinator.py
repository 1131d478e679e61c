"""A coordinator that repeats the decisions of a recorded log and makes none of its own.

It waits for the offers that the next record of a fragment names, has them merged by all racks, and
writes the record when all results have the digests that it had. No K, no grace, no eviction: who
is in a merge, and what is dropped, is known. Members are matched by rack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mend.consensus.log import offers_of
from mend.consensus.records import Commit, Drop, Ended, Offer, Record, Roster, merge_member_of
from mend.coordination.coordinator import Coordinator
from mend.coordination.events import CommonEffect, Effect, Event, Fail
from mend.coordination.grace import Mean
from mend.coordination.round import Phase, Round, RoundInputs

DIFFERS = "ReplayDiffers"
"""Name of the exception for what is not as it was."""


@dataclass
class ReplayRound(Round):
    """One fragment: its Commits and Drops, oldest first."""

    script: deque[Commit | Drop] = field(default_factory=deque)
    settled: int = -1
    """The version that every rack holds: a MergeProposal of the next would make the others forget
    what they have merged and not heard to be decided."""
    differs: str = ""
    """What is not as it was, as a sentence. Nothing is decided any more then."""

    def advance(self, inputs: RoundInputs, now_ns: int) -> Commit | Drop | None:
        self.why = ""
        if not self.script or self.differs or self.settled < inputs.version:
            return None
        record, offers = self.script[0], {offer.member.rack: offer for offer in inputs.offers}
        named = record.members if isinstance(record, Commit) else ()
        absent = [
            each.member.rack
            for each in offers_of(record)
            if each.member.rack not in offers or offers[each.member.rack].seq != each.seq
        ]
        if absent:
            self.why = f"waiting for the offers of racks {','.join(map(str, sorted(absent)))}"
            return None
        dropped = tuple(Ended(offers[e.member.rack].member, e.seq) for e in record.dropped)
        if isinstance(record, Drop):
            self.script.popleft()
            return Drop(self.fragment, dropped, record.reason, record.diverged)
        members = tuple(offers[share.member.rack] for share in named)
        self.differs = first_other(record, members)
        if self.differs or not self._all_hold(record, members, inputs, now_ns):
            return None
        self.script.popleft()
        shares = tuple(merge_member_of(offer) for offer in members)
        return Commit(
            self.fragment, record.version, shares, dropped, record.digests, record.closed_by,
            record.detail, record.absent,
        )  # fmt: skip

    def _all_hold(
        self, record: Commit, members: tuple[Offer, ...], inputs: RoundInputs, now_ns: int
    ) -> bool:
        if self.phase is not Phase.PROPOSED:
            self.phase, self.members, self.count = Phase.PROPOSED, members, 1
            self.absent = record.absent
            self.gathered_ns = self.started_ns = now_ns
        results = {
            rack: digests
            for rack, (attempt, digests) in inputs.held.items()
            if attempt == self.attempt
        }
        if missing := sorted(inputs.contributors - results.keys()):
            self.why = f"waiting for the results of racks {','.join(map(str, missing))}"
        for rack in sorted(results):
            if results[rack] != record.digests:
                self.differs = (
                    f"fragment {self.fragment} version {record.version}: the result of rack {rack} "
                    "is another than that on the tape"
                )
        return not missing and not self.differs

    def deadline_ns(self, inputs: RoundInputs) -> int | None:
        """Nothing here is a matter of time."""
        return None


def first_other(record: Commit, members: Sequence[Offer]) -> str:
    """What of the offers is not as the record has it, as a sentence, or empty."""
    for share, offer in zip(record.members, members, strict=True):
        for name in ("base", "capture_step", "tokens", "steps"):
            then, now = getattr(share, name), getattr(offer, name)
            if then != now:
                return (
                    f"rack {offer.member.rack}, fragment {record.fragment}, offer {offer.seq}: "
                    f"{name} is {then} in the log of the tape, {now} now"
                )
    return ""


@dataclass
class ReplayCoordinator(Coordinator):
    """`script`: Commits and Drops. The job is over when all are decided and every rack leaves."""

    script: tuple[Record, ...] = ()

    def _new_rounds(self, fragments: int) -> None:
        self.rounds = []
        for p in range(fragments):
            script = [r for r in self.script if isinstance(r, Commit | Drop) and r.fragment == p]
            self.rounds.append(
                ReplayRound(p, Mean(), Mean(), self.proposer.ballot, script=deque(script))
            )

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        known, effects = self._differences(), super().handle(event, now_ns)
        return effects + [Fail(DIFFERS, each) for each in self._differences() if each not in known]

    def _advance_rounds(
        self, live: frozenset[int], now_ns: int, effects: list[CommonEffect]
    ) -> None:
        reports = [view.report for view in self.views.values()]
        for round_ in (each for each in self.rounds if isinstance(each, ReplayRound)):
            round_.settled = min(r.versions[round_.fragment] if r else -1 for r in reports)
        super()._advance_rounds(live, now_ns, effects)

    def _differences(self) -> list[str]:
        return [r.differs for r in self.rounds if isinstance(r, ReplayRound) and r.differs]

    def _try_roster(self, live: frozenset[int], now_ns: int, effects: list[CommonEffect]) -> None:
        log = self.log.appended
        done = all(isinstance(r, ReplayRound) and not r.script for r in self.rounds)
        if not done or self.log.last != self.log.decided:
            return
        reports = [self.views[rack].report for rack in log.seats]
        if all(r and r.leaving and list(r.versions) == log.versions for r in reports):
            number = log.roster_number + 1
            self.proposer.append(Roster(number, (), (), log.witness, "the script is over"))
