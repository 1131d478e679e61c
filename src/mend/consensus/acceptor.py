"""One member's vote: a replica of the log, and the promises that bind it (an acceptor of Paxos).

Without time and without addresses, so that it can be explored exhaustively together with
`proposer`. Raft's log and Paxos's promise (Ongaro and Ousterhout 2014; Lamport 1998), in memory
only: a voter that restarts is another member, without a vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mend.consensus.log import Log
from mend.consensus.records import AcceptorState, Record, Snapshot


@dataclass
class Acceptor:
    """`promised`: takes nothing of a lower ballot. `accepted`: the ballot of its whole log."""

    log: Log = field(default_factory=Log)
    promised: int = 0
    accepted: int = 0

    def prepare(self, ballot: int) -> bool:
        """Promise; False if something higher is promised already."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def append(
        self,
        ballot: int,
        prev: int,
        chain: str,
        records: Sequence[Record],
        last: int,
        decided: int,
        snapshot: Snapshot | None = None,
    ) -> bool:
        """Take the coordinator's records after `prev`; False for a ballot that is over.

        Records that reach its `last` are its whole log: everything else here goes. Records that do
        not are of use only as far as they are decided; accepting a piece could lose what was
        accepted in an older ballot and counted there. `snapshot`: what is decided up to `prev`,
        where the coordinator has no records any more that this voter could use.
        """
        if ballot < self.promised:
            return False
        self.promised = ballot
        if snapshot is not None and (snapshot.index, snapshot.chain) == (prev, chain):
            self.log.install(snapshot)
        if not self.log.matches(prev, chain):
            return True  # the vote says from which record on this voter needs the log
        whole = prev + len(records) == last
        if not whole:
            records = records[: max(0, decided - prev)]
        if not self.log.put(prev, records):
            return False
        reached = prev + len(records)
        if whole and self.accepted < ballot:
            # Only now: within a ballot a log grows, and what is shorter is an old message.
            self.log.cut(max(reached, self.log.decided))
            self.accepted = ballot
        self.log.decide(min(decided, reached))
        return True

    def learn(self, log: Log) -> None:
        """What is decided in `log`: voters that a candidate of this process asked have shown it."""
        known = log.after(self.log.decided, log.decided)
        if self.log.put(self.log.decided, known):
            self.log.decide(self.log.decided + len(known))

    def start_over(self) -> None:
        """Forget the log. Only for a member that never had a seat in it: its accepts were not
        counted."""
        self.log, self.accepted = Log(self.log.kept), 0

    def acceptor_state(self, after: int | None = None) -> AcceptorState:
        """The state of this voter; for a candidate with the records after `after`."""
        log = self.log
        prev, records = log.last, tuple[Record, ...]()
        if after is not None and log.reaches(after):
            prev, records = after, log.after(after)
        return AcceptorState(
            promised=self.promised,
            accepted=self.accepted,
            last=log.last,
            decided=log.decided,
            prev=prev,
            chain=log.chain(prev),
            records=records,
        )
