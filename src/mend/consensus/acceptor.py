"""The acceptor of one member: a replica of the log, and the promises that bind it (Paxos).

It knows neither time nor addresses, so the model checker can explore it exhaustively together with
`proposer`. It combines Raft's log with Paxos's promise (Ongaro and Ousterhout 2014; Lamport 1998),
in memory only: a voter that restarts is another member, without a vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mend.consensus.log import Log
from mend.consensus.records import AcceptorState, Record, Snapshot


@dataclass
class Acceptor:
    """`promised`: it rejects every lower ballot. `accepted`: the ballot in which it accepted its
    whole log."""

    log: Log = field(default_factory=Log)
    promised: int = 0
    accepted: int = 0

    def prepare(self, ballot: int) -> bool:
        """Promise this ballot. False if a higher one is promised already."""
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
        """Append the coordinator's records after `prev`. Returns False for a ballot that is over.

        Records that reach the coordinator's `last` are its whole log and replace everything after
        `prev`. Of records that do not, only the decided ones are taken: accepting part of a log
        could lose a record that was accepted, and counted, in an older ballot. `snapshot`: the
        decided state up to `prev`, if the coordinator no longer has the records that this voter
        lacks.
        """
        if ballot < self.promised:
            return False
        self.promised = ballot
        if snapshot is not None and (snapshot.index, snapshot.chain) == (prev, chain):
            self.log.install(snapshot)
        if not self.log.matches(prev, chain):
            return True  # the vote reports from which record on this voter needs the log
        whole = prev + len(records) == last
        if not whole:
            records = records[: max(0, decided - prev)]
        if not self.log.put(prev, records):
            return False
        reached = prev + len(records)
        if whole and self.accepted < ballot:
            # Only now: within a ballot a log only grows, so a shorter one is an old message.
            self.log.cut(max(reached, self.log.decided))
            self.accepted = ballot
        self.log.decide(min(decided, reached))
        return True

    def learn(self, log: Log) -> None:
        """Copy what is decided in `log`, which voters have shown to a candidate of this process."""
        known = log.after(self.log.decided, log.decided)
        if self.log.put(self.log.decided, known):
            self.log.decide(self.log.decided + len(known))

    def start_over(self) -> None:
        """Forget the log. Allowed only for a member that never had a seat in it: its accepts were
        not counted."""
        self.log, self.accepted = Log(self.log.kept), 0

    def acceptor_state(self, after: int | None = None) -> AcceptorState:
        """The state of this voter, with the records after `after` if a candidate asks for them."""
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
