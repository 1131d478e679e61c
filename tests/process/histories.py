"""The simulator's questions, asked of the tapes of real processes.

The machines of all processes are fed again what their tapes say, in the order of the clock that the
processes of one computer share. So their logs are in memory, as in a simulated run, and
`mend_lab.sim.agreement` reads them. Each effect must be the recorded one: what is asked of these
logs is then asked of those of the processes. What `mend_lab.sim.checkers` reads in the memory of a
training thread is read from its events.

Not on a tape, and so not asked: the values of weights and offers (the ledger of vectors, averages
of moments, NaN in a weight), payloads in memory, and how a job ends, which its test knows. Waits
are on it, and are not asked: the clock of a busy computer decides them.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mend.consensus.records import Commit, Drop, Genesis, Lineage, Record, Snapshot
from mend.consensus.weights import part_of
from mend.coordination import events as ev
from mend.coordination.machines import machines_of
from mend.errors import format_error
from mend.events.kinds import DigestDiffers, JobGivenUp, ProtocolFault
from mend.trace.format import Entry, Gap, answer_of
from mend.trace.reader import RecordedTape, read_tape, tapes_in
from mend.types import Member, Peer
from mend_lab.sim.agreement import Agreement, Problem, Seating, Undo, is_seated
from mend_lab.sim.checkers import ANCHORS_MAX
from mend_lab.sim.process import Process

Version = tuple[int, int]
"""(fragment, version)."""


@dataclass(frozen=True, slots=True)
class Held:
    """An anchor, of which a tape has the digest alone."""

    digest: str


@dataclass
class Holdings:
    """The versions that a rank holds, as its `TensorStore` has them."""

    anchors: dict[Version, Held] = field(default_factory=dict)
    tentative: dict[tuple[int, int, int], Held] = field(default_factory=dict)


@dataclass
class Rank:
    store: Holdings = field(default_factory=Holdings)


@dataclass
class Trainer:
    rank: Rank = field(default_factory=Rank)


@dataclass
class Mark:
    """Up to where the offers of a fragment that were merged count. None: not known."""

    tokens: int = 0
    steps: int | None = None


class Taped:
    """A process as its tape has it; for `Agreement` a `mend_lab.sim.process.Process`."""

    def __init__(self, tape: RecordedTape, outcome: dict[str, Any]) -> None:
        self.tape, self.header = tape, tape.header
        parts = tape.header.parts
        self.me, self.member = parts.me, parts.member
        self.made = machines_of(parts)
        self.machines = self.made.named()
        self.trainer = Trainer() if parts.rank_machine is not None else None
        self.dead = self.stopped = False
        self.torn = not tape.whole
        """The end of its tape is missing, as it was killed: what it did then is not known."""
        self.captured: dict[Version, ev.Captured] = {}
        """(fragment, seq) -> its capture."""
        self.open: dict[int, int] = {}
        """Fragment -> seq of the offer that is open."""
        self.marks: dict[int, Mark] = {}
        self.tokens_at: dict[int, int] = {}
        """Tokens that the rank had trained after a step, by what its offers count."""
        self.versions: dict[int, int] = {}
        """The version that it trains on, by fragment."""
        self.rounds: list[int] | None = None
        """Merged rounds by fragment, from the records that it was shown."""
        self.dropped: dict[Version, Held] = {}
        """Anchors that the loop has dropped. The training thread may have taken one before that and
        say so afterwards; its memory is freed with the last reference to it."""
        self.copies: dict[Version, str] = {}
        self.given: dict[tuple[Member, int], str] = {}
        """(rack that joins, step) -> digest of the training state that it gave."""
        self.taken: list[ev.StateCopied] = []
        self.outcome = outcome
        """How it says that it ended."""
        if parts.rank_machine is not None and self.trainer is not None:
            of = parts.rank_machine
            versions = of.own_versions or (0,) * len(of.own_digests)
            for p, (version, digest) in enumerate(zip(versions, of.own_digests, strict=True)):
                self.trainer.rank.store.anchors[p, version] = Held(digest)

    def __str__(self) -> str:
        return f"{self.tape.path.name}"

    def entries(self) -> Iterator[Entry | Gap]:
        return self.tape.entries()


class TapedAgreement(Agreement):
    """Agreement over processes whose last fraction of a second may be missing: one that was killed
    may have accepted, held and decided more than is on its tape. What the ranks of its rack
    act on is compared once another process has decided it, too."""

    def __init__(self, problem: Problem, undo: Undo) -> None:
        super().__init__(problem, undo)
        self.ahead: dict[int, list[Record]] = {}
        """id(process) -> records that it acted on, behind `read`, which no tape here decides."""

    def check_record(self, process: Process, record: Record) -> None:
        self.check(process)  # it may have decided it in this very event
        last, ahead = self.read.get(id(process)), self.ahead.setdefault(id(process), [])
        is_new = bool(ahead) or (last is not None and last + 1 == len(self.records))
        others = [other for other, _ in self.replicas.values() if other.me.rack == process.me.rack]
        if is_new and any(other.dead for other in others):
            ahead.append(record)
        else:
            super().check_record(process, record)

    def check_snapshot(self, process: Process, snapshot: Snapshot) -> None:
        self.ahead.pop(id(process), None)
        super().check_snapshot(process, snapshot)

    def check(self, process: Process) -> None:
        super().check(process)
        for number, ahead in self.ahead.items():
            while ahead and (index := self.read.get(number, 0) + 1) < len(self.records):
                known, record = self.records[index], ahead.pop(0)
                if known != record:
                    ahead.clear()
                    if not isinstance(known, Lineage):  # it may undo what only the dead decided
                        actor = self.replicas[number][0].me
                        self._problem(f"I1: {actor} acted on {record}, and {known} was decided")
                    break
                self.read[number] = index

    def _lost(self, roster: Seating) -> set[int]:
        return {
            process.me.rack
            for process, _ in self.replicas.values()
            if process.dead and is_seated(process, roster)
        }

    def _votes(self, index: int, roster: Seating) -> set[int]:
        return super()._votes(index, roster) | self._lost(roster)

    def _holders(self, commit: Commit, roster: Seating, *, live: bool = False) -> set[int]:
        holders = super()._holders(commit, roster, live=live)
        return holders if live else holders | self._lost(roster)


class History:
    """The jobs of one name, one after another: a job is over when a rank starts again while none
    of its processes lives.
    `problems`: each begins with the invariant of docs/internals/protocol.md that it breaks."""

    def __init__(self, tapes: Sequence[RecordedTape]) -> None:
        self.problems: list[str] = []
        self.problem = self.problems.append
        self.tapes, self.events = tapes, 0
        self._begin()

    def _begin(self) -> None:
        self.agreement = TapedAgreement(self.problem, self._undo)
        self.processes: list[Taped] = []
        self.bits: dict[tuple[int, int, int], str] = {}
        """(rail, fragment, version) -> digest that a rank trains on."""

    def _undo(self, versions: tuple[int, ...]) -> None:
        self.bits = {key: d for key, d in self.bits.items() if key[2] <= versions[key[1]]}

    def judge(self) -> list[str]:
        """The problems of the whole history."""
        last = {(tape.header.rack, tape.header.rank): tape for tape in self.tapes}
        ends = {id(tape): _outcome_in(tape.path.parent, Peer(*peer)) for peer, tape in last.items()}
        made = [Taped(tape, ends.get(id(tape), {})) for tape in self.tapes]
        for _, number, entry in heapq.merge(*map(_in_order, range(len(made)), made)):
            if not self._take(made[number], entry):
                return self.problems
        self._end()
        return self.problems

    def _end(self) -> None:
        self.agreement.end()
        if not self.agreement.beyond:
            self._check_tapes()
            for process in self.processes:
                self._check_work(process)
                self._check_copies(process)

    def _enter(self, process: Taped) -> None:
        # The end of a torn tape is not the end of its process, so "nobody lives" is not enough:
        # only a later life of a rank begins the next job.
        again = process.me in [other.me for other in self.processes]
        if again and all(other.dead or other.stopped for other in self.processes):
            self._end()
            self._begin()
        self.processes.append(process)
        made = (process.made.leader, process.made.coordinator)
        self.agreement.enter(process, [each for each in made if each is not None])

    def _take(self, process: Taped, entry: Entry | None) -> bool:
        """One event of a process, or its end. False: what follows means nothing any more."""
        if process not in self.processes:
            self._enter(process)
        if entry is None:
            process.dead, process.stopped = process.torn, not process.torn
            if process.dead:
                self.agreement.check_survivors()
            return True
        self.events += 1
        machine = process.machines[entry.machine]
        effects, error = list[ev.Effect](), ""
        try:
            effects = machine.handle(entry.event, entry.now_ns)
        except Exception as raised:  # a bug of a machine is on the tape, too
            error = format_error(raised)
        if tuple(map(answer_of, effects)) != entry.answers or error != entry.error:
            self.problem(
                f"I7: event {entry.number} of {entry.machine} of {process} has other effects now; "
                "mend replay names the field"
            )
            return False
        self._happens(process, entry.event)
        for effect in effects:
            self._follows(process, effect)
        self.agreement.check(process)
        self._check_bounds(process)
        return True

    # -------------------------------------------------------------- events of the training thread

    def _happens(self, process: Taped, event: ev.Event) -> None:
        match event:
            case ev.Captured():
                self._check_capture(process, event)
            case ev.Applied():
                self._check_applied(process, event)
            case ev.Discarded(p, seq):
                self._end_offer(process, p, seq)
            case ev.Merged(p, version, attempt, digest) if digest and process.trainer:
                process.trainer.rank.store.tentative[p, version, attempt] = Held(digest)
            case ev.StateTaken(to, step, _, digest, "") if digest:
                process.given[to, step] = digest
            case ev.StateCopied(error=""):
                process.taken.append(event)
            case ev.Idle(versions):
                process.versions = dict(enumerate(versions))

    def _check_capture(self, process: Taped, event: ev.Captured) -> None:
        """I2: each step counts once, and all fragments count the same tokens for the same steps."""
        p, seq = event.fragment, event.seq
        if p in process.open or (p, seq) in process.captured:
            self.problem(f"I3: {process} captures fragment {p} again, as offer {seq}")
        process.open[p], process.captured[p, seq] = seq, event
        mark = process.marks.setdefault(p, Mark(steps=0 if self._founded(process) else None))
        if mark.steps is None:
            return
        counted, tokens = mark.steps + event.steps, mark.tokens + event.tokens
        late = event.step - counted
        if late not in ((0,) if event.closing else (0, 1)):
            self.problem(
                f"I2: {process}: offer {seq} of fragment {p} of step {event.step} counts "
                f"{event.steps} steps after {mark.steps}"
            )
        if process.tokens_at.setdefault(counted, tokens) != tokens:
            self.problem(
                f"I2: {process}: up to step {counted} fragment {p} counts {tokens} tokens, another "
                f"one {process.tokens_at[counted]}"
            )

    def _founded(self, process: Taped) -> bool:
        """Whether the rank began the job, at its first step."""
        first = self.agreement.records[1] if self.agreement.records[1:] else None
        assert process.header.parts.rank_machine is not None
        fresh = not process.header.parts.rank_machine.own_versions
        seats = first.roster if isinstance(first, Genesis) else ()
        return fresh and process.member in [seat.member for seat in seats]

    def _check_applied(self, process: Taped, event: ev.Applied) -> None:
        """I1: the bits that a rank trains on are those of its rail and of the log."""
        assert process.trainer is not None
        p, version, rail = event.fragment, event.version, process.me.rank
        base, process.versions[p] = process.versions.get(p, 0), version
        held = process.trainer.rank.store.anchors.get((p, version)) or process.dropped.get(
            (p, version)
        )
        if held is not None:
            if self.bits.setdefault((rail, p, version), held.digest) != held.digest:
                self.problem(f"I1: {process} has other bits of fragment {p} version {version}")
            commit = self.agreement.in_force.get((p, version))
            if commit is not None and commit.digests[rail] != held.digest:
                self.problem(
                    f"I1: {process}: fragment {p} version {version} has other bits than the log"
                )
        elif version != base:
            self.problem(f"I1: {process} trains on fragment {p} version {version}, not held here")
        if event.ended:
            self._end_offer(process, p, event.ended)
            if self._is_named(process, p, event.ended):
                self._move_mark(process, process.captured[p, event.ended])

    def _end_offer(self, process: Taped, fragment: int, seq: int) -> None:
        if process.open.pop(fragment, 0) != seq:
            self.problem(
                f"I3: {process} ends offer {seq} of fragment {fragment}, which is not open"
            )

    def _is_named(self, process: Taped, fragment: int, seq: int) -> bool:
        return any(
            share.seq == seq
            for (member, p, _), share in self.agreement.merged.items()
            if (member, p) == (process.member, fragment)
        )

    def _move_mark(self, process: Taped, named: ev.Captured) -> None:
        mark = process.marks[named.fragment]
        discards = process.header.config.get("apply_mode") == "overwrite"
        if discards:  # what was trained since the capture is dropped, at a count not on the tape
            mark.steps = None
        elif mark.steps is not None:
            mark.steps, mark.tokens = mark.steps + named.steps, mark.tokens + named.tokens

    # -------------------------------------------------------------- effects

    def _follows(self, process: Taped, effect: ev.Effect) -> None:
        match effect:
            case ev.RecordCommitted(record, rounds, part):
                self.agreement.check_record(process, record)
                self._check_record(process, record, rounds, part)
            case ev.Restored(snapshot):
                self.agreement.check_snapshot(process, snapshot)
                process.rounds = list(snapshot.rounds)
            case ev.Copy(p, version, digest):
                process.copies[p, version] = digest
            case ev.PublishAnchor(p, version, attempt):
                self._publish(process, p, version, attempt)
            case ev.DropAnchor(p, version, attempt) if process.trainer:
                holdings = process.trainer.rank.store
                if attempt:
                    holdings.tentative.pop((p, version, attempt), None)
                elif (held := holdings.anchors.pop((p, version), None)) is not None:
                    process.dropped[p, version] = held
            case ev.Note(JobGivenUp()):
                self.agreement.forget(process)
            case ev.Note(DigestDiffers() | ProtocolFault() as event):
                self.problem(f"I1: {process}: {event.sentence()}")

    def _publish(self, process: Taped, fragment: int, version: int, attempt: int) -> None:
        assert process.trainer is not None
        holdings, key = process.trainer.rank.store, (fragment, version)
        if attempt:
            held = holdings.tentative.pop((*key, attempt), None)
            if held is None:
                self.problem(f"I1: {process} publishes version {key} that it has not merged")
                return
            holdings.anchors[key] = held
        elif key in process.copies:
            holdings.anchors[key] = Held(process.copies[key])

    def _check_record(self, process: Taped, record: object, rounds: int, part: int) -> None:
        """I1: members ascend, and all ranks count the rounds that the log has merged."""
        policy = self.agreement_policy()
        if isinstance(record, Genesis | Lineage):
            process.rounds = list(record.rounds) or [0] * len(record.digests)
        if not isinstance(record, Commit) or process.rounds is None or policy is None:
            return
        racks = [share.member.rack for share in record.members]
        if racks != sorted(set(racks)) or not racks:
            self.problem(f"I1: members of version {record.version} do not ascend: {racks}")
        p = record.fragment
        if p >= policy.of_weights:
            return
        named, absent = (
            [(each.tokens, each.steps) for each in group]
            for group in (record.members, record.absent)
        )
        period, weighted = policy.period_steps, policy.token_weighted
        merged = part_of(named, absent, token_weighted=weighted, period_steps=period)
        if (rounds, part) != (process.rounds[p], merged):
            self.problem(
                f"I1: {process} counts {part} after {rounds} parts of rounds of fragment {p}, the "
                f"log {merged} after {process.rounds[p]}"
            )
        process.rounds[p] += merged

    def agreement_policy(self) -> Any:
        first = self.agreement.records[1] if self.agreement.records[1:] else None
        return first.policy if isinstance(first, Genesis) else None

    def _check_bounds(self, process: Taped) -> None:
        if process.trainer is None:
            return
        counts = Counter(fragment for fragment, _ in process.trainer.rank.store.anchors)
        if any(count > ANCHORS_MAX for count in counts.values()):
            self.problem(f"I6: {process} keeps {dict(counts)} anchors per fragment")

    # -------------------------------------------------------------- at the end

    def _check_tapes(self) -> None:
        """All members are on tape, or what was decided cannot be asked."""
        there = {(process.member, process.me.rank) for process in self.processes}
        policy = self.agreement_policy()
        for roster in self.agreement.rosters:
            wanted = {(roster.witness, 0)} if roster.witness else set()
            wanted |= {(m, rank) for m in roster.racks.values() for rank in range(policy.ranks)}
            for member, rank in sorted(wanted - there):
                self.problem(f"no tape of rack {member.rack} rank {rank}, which had a seat")
                return

    def _check_work(self, process: Taped) -> None:
        """I2 and I10: the log names what the rank captured, and it ends as it says."""
        if process.trainer is None or process.torn:
            return
        ranks = [other for other in self.processes if other.member == process.member]
        whole = not any(other.torn for other in ranks)
        for (member, p, version), share in self.agreement.merged.items():
            if member != process.member:
                continue
            mine = [other.captured.get((p, share.seq)) for other in ranks]
            made = [each for each in mine if each is not None]
            ours = {(each.base, each.step, each.steps, each.closing) for each in made}
            if ours - {(share.base, share.capture_step, share.steps, share.closing)} or not made:
                self.problem(f"I2: version {version} of fragment {p} names {share}, not {ours}")
            if whole and made and sum(each.tokens for each in made) != share.tokens:
                self.problem(
                    f"I2: version {version} of fragment {p} names {share.tokens} tokens of rack "
                    f"{member.rack}, its ranks captured {[each.tokens for each in made]}"
                )
        self._check_outcome(process)

    def _check_outcome(self, process: Taped) -> None:
        outcome = process.outcome
        if outcome.get("outcome") == "kept-local" and not outcome.get("detail"):
            self.problem(f"I10: {process} keeps its own weights, and does not say why")
        if outcome.get("outcome") != "merged":
            return
        ended = self.agreement.ended_versions()
        versions = [process.versions.get(p) for p in range(len(ended or ()))]
        if ended is None or versions != ended:
            self.problem(f"I10: {process} is merged at {versions}, the job ended at {ended}")
        if process.open:
            self.problem(f"I10: {process} is merged, with open offers of {sorted(process.open)}")
        diverged = [
            drop for drop in self.agreement.records if isinstance(drop, Drop) and drop.diverged
        ]
        if any(ended.member == process.member for drop in diverged for ended in drop.dropped):
            self.problem(f"I8: {process} ends in order, though its rack has diverged")

    def _check_copies(self, process: Taped) -> None:
        """A rack that joins goes on from the very state that its donor had after that step."""
        for copied in process.taken:
            gave = [
                other.given.get((process.member, copied.step))
                for other in self.processes
                if other.member == copied.donor and not other.torn
            ]
            if gave and copied.digest not in gave:
                self.problem(f"twin: {process} copied {copied}, its donor gave {gave}")


def _in_order(number: int, process: Taped) -> Iterator[tuple[tuple[int, int], int, Entry | None]]:
    """The entries of a process by its clock, and None behind the last one."""
    key = (process.header.mono_ns, number)
    for entry in process.entries():
        if isinstance(entry, Gap):
            process.torn = True
            break
        key = (entry.now_ns, number)
        yield key, number, entry
    yield key, number, None


def _outcome_in(folder: Path, me: Peer) -> dict[str, Any]:
    """How the last life of a rank says that it ended; empty: it says nothing."""
    path = folder / f"events-rack{me.rack}-rank{me.rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    ends = [line for line in lines if line.startswith(('{"kind":"ended', '{"kind":"start"'))]
    said: dict[str, Any] = json.loads(ends[-1]) if ends else {}
    return said


def problems_in(folder: Path) -> list[str]:
    """The problems of all jobs whose tapes are in this folder. Without a tape nobody trained."""
    if not any(folder.glob("*.mend")):
        trained = [
            path.name for path in folder.glob("events-*") if '"kind":"captured"' in path.read_text()
        ]
        return [f"no tape beside {trained}"] if trained else []
    tapes = [read_tape(path) for path in tapes_in([folder])]
    tapes.sort(key=lambda tape: tape.header.mono_ns)
    histories = [
        History([tape for tape in tapes if tape.header.job == name])
        for name in dict.fromkeys(tape.header.job for tape in tapes)
    ]
    return [problem for history in histories for problem in history.judge()]
