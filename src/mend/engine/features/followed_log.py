"""Answers followers of the merged model from the decided log. It needs no tensors, so the witness
answers as well."""

from __future__ import annotations

from mend.consensus.log import Log
from mend.consensus.records import Commit, Genesis, Lineage, Record
from mend.status.follow_messages import CommitSeen, Follow, Followed, RackLanes
from mend.types import VERSION


def followed_of(job: str, rack: int, log: Log, follow: Follow) -> Followed:
    """The answer of a process with this log. Loop thread.

    A follower whose place in the log is known gets the commits after it. Any other follower, and
    one that has to start from other versions, gets the versions of all fragments.
    """
    state, lineage, records = log.committed, log.lineage_at(log.decided), tuple[Record, ...]()
    known = state.begun and follow.lineage == lineage and log.reaches(follow.index)
    if known and follow.index < log.decided:
        records = log.portion(follow.index, follow.index, log.decided)
        known = not any(isinstance(each, Genesis | Lineage) for each in records)
    seats = [state.seats[number] for number in sorted(state.seats)]
    return Followed(
        job=job,
        mend=VERSION,
        rack=rack,
        lineage=lineage if state.begun else "",
        knows=log.knows(follow.lineage),
        index=min(follow.index, log.decided) + len(records) if known else log.decided,
        decided=log.decided,
        over=state.over,
        racks=tuple(RackLanes(each.member.rack, each.address, each.lanes) for each in seats),
        step=max((work[0] for work in state.work.values()), default=0),
        commits=tuple(_seen(each) for each in records if isinstance(each, Commit)) if known else (),
        versions=() if known else tuple(state.versions),
        digests=() if known else tuple(state.digests),
    )


def _seen(commit: Commit) -> CommitSeen:
    return CommitSeen(
        commit.fragment,
        commit.version,
        commit.digests,
        max((share.capture_step for share in commit.members), default=0),
        sum(share.tokens for share in commit.members),
    )
