"""The script of a replay: what the tapes of a job say its training must do again.

Per rank the acts of its training thread, in order; for all the decided merges, as far as the tapes
have everything that they are made of. Pure: entries of tapes in, a script out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from mend.consensus.log import offers_of
from mend.consensus.records import (
    Commit,
    Drop,
    Epoch,
    Genesis,
    Lineage,
    Mark,
    Mitigation,
    Record,
    Roster,
)
from mend.coordination import events as ev
from mend.errors import TapeError
from mend.trace.format import Entry, Gap, Header
from mend.types import Member

CAPTURED, APPLIED, DISCARDED = "captured", "applied", "discarded"


class Act(msgspec.Struct, frozen=True, array_like=True):
    """One thing a training thread did to one fragment. `number`: seq, or the version applied."""

    kind: str
    step: int
    fragment: int
    number: int
    base: int = 0
    tokens: int = 0
    steps: int = 0
    checksum: str = ""
    """Of the payload that a capture became; empty: not on the tape, or there was none."""
    closing: bool = False

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What all ranks of a rack have in common."""
        return self.kind, self.step, self.fragment, self.number

    def __str__(self) -> str:
        what = "version" if self.kind == APPLIED else "seq"
        return f"{self.kind} fragment {self.fragment} ({what} {self.number}) at step {self.step}"


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """xxh3_64 per tensor of one rank's part of a version."""

    fragment: int
    version: int
    rank: int
    digests: bytes


class Part(msgspec.Struct, frozen=True):
    """Of one rack. `ends`: its script went to its end; else it stops behind its last act."""

    rack: int
    acts: tuple[tuple[Act, ...], ...]
    ends: bool
    config: dict[str, Any]
    threads: str = ""


class ReplayScript(msgspec.Struct, frozen=True):
    """`facts`: what all racks had in common, as (key, value). `omitted`: sentences."""

    job: str
    facts: tuple[tuple[str, str], ...]
    genesis: Genesis
    records: tuple[Record, ...]
    """Commits and Drops, in the order of the log."""
    rounds: int
    """Commits of the whole log; `records` may have less."""
    parts: tuple[Part, ...]
    sums: tuple[Sums, ...]
    versions: dict[str, str]
    omitted: tuple[str, ...]

    def part(self, rack: int) -> Part | None:
        return next((part for part in self.parts if part.rack == rack), None)

    @property
    def commits(self) -> dict[tuple[int, int], tuple[int, Commit]]:
        """(fragment, version) -> number of the round, counted from 1, and its record."""
        commits = [record for record in self.records if isinstance(record, Commit)]
        return {(c.fragment, c.version): (n, c) for n, c in enumerate(commits, start=1)}


_decoder = msgspec.msgpack.Decoder(ReplayScript)


def encode_script(script: ReplayScript) -> bytes:
    return msgspec.msgpack.encode(script)


def decode_script(data: bytes) -> ReplayScript:
    """Raises TapeError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise TapeError(f"this is no script of a replay: {error}") from error


# ------------------------------------------------------------------ from tapes


@dataclass
class Recital:
    """What the tape of one rank tells."""

    header: Header
    whole: bool
    """Closed in order, and nothing of it lost."""
    acts: list[Act] = field(default_factory=list)
    captures: dict[tuple[int, int], int] = field(default_factory=dict)
    """(fragment, seq) -> place in `acts`."""
    records: list[Record] = field(default_factory=list)
    sums: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    """(fragment, version, digest, digests of tensors)."""
    declined: set[tuple[int, int]] = field(default_factory=set)
    left: bool = False
    """Its script called mend_shutdown."""

    @property
    def member(self) -> Member:
        return self.header.parts.member

    @property
    def life(self) -> Life:
        return Life(self.member, self.header.rank)


class Life(NamedTuple):
    member: Member
    rank: int


def recite(header: Header, whole: bool, entries: Iterable[Entry | Gap]) -> Recital:
    """Read the tape of one rank, up to its first gap."""
    found = Recital(header, whole)
    for entry in entries:
        if isinstance(entry, Gap):
            found.whole = False
            break
        if entry.machine != "rank":
            continue
        _listen(entry.event, found)
        if any(answer.name == "RecordCommitted" for answer in entry.answers):
            found.records += [e.record for e in entry.effects if isinstance(e, ev.RecordCommitted)]
    return found


def act_of(event: ev.Event) -> Act | None:
    """What a training thread tells of as done; None: the event is about something else."""
    match event:
        case ev.Captured(p, seq, base, step, tokens, steps, closing):
            return Act(CAPTURED, step, p, seq, base, tokens, steps, closing=closing)
        case ev.Applied(p, version, _, step):
            return Act(APPLIED, step, p, version)
        case ev.Discarded(p, seq, step):
            return Act(DISCARDED, step, p, seq)
    return None


def _listen(event: ev.Event, found: Recital) -> None:
    if (act := act_of(event)) is not None:
        if act.kind == CAPTURED:
            found.captures[act.fragment, act.number] = len(found.acts)
        found.acts.append(act)
    match event:
        case ev.Encoded(p, seq, checksum, declined):
            if declined:
                found.declined.add((p, seq))
            if (place := found.captures.get((p, seq))) is not None:
                act = msgspec.structs.replace(found.acts[place], checksum=checksum)
                found.acts[place] = act
        case ev.Merged(p, version, _, digest, _, tensors) if tensors:
            found.sums.append((p, version, digest, tensors))
        case ev.Leaving():
            found.left = True


def script_of(tapes: Sequence[Recital]) -> ReplayScript:
    """Raises TapeError when the tapes are not those of one job, or a rank's is not there."""
    log = _log_of(tapes)
    genesis, omitted = log[0], list[str]()
    assert isinstance(genesis, Genesis), "the first record of every log"
    lives = {tape.life: tape for tape in tapes}
    founders: dict[int, list[Recital]] = {}
    for seat in genesis.roster:
        for rank in range(len(seat.lanes)):
            if Life(seat.member, rank) not in lives:
                raise TapeError(f"there is no tape of rack {seat.member.rack} rank {rank} here")
            founders.setdefault(seat.member.rack, []).append(lives.pop(Life(seat.member, rank)))
    later = sorted({life.member.rack for life, tape in lives.items() if tape.records})
    omitted += [f"rack {rack} came back or joined later: that life is left out" for rack in later]
    acts = {rack: _in_common(ranks) for rack, ranks in founders.items()}
    kept = _Cut(genesis, log[1:], acts, founders)
    omitted += kept.omitted
    return ReplayScript(
        job=tapes[0].header.job,
        facts=_facts(founders),
        genesis=genesis,
        records=tuple(kept.records),
        rounds=sum(isinstance(record, Commit) for record in log),
        parts=tuple(
            Part(
                rack,
                tuple(tuple(of[: kept.lengths[rack]]) for of in acts[rack]),
                kept.ends(rack),
                founders[rack][0].header.config,
                founders[rack][0].header.versions.get("threads", ""),
            )
            for rack in sorted(founders)
        ),
        sums=_sums(kept.records, founders.values()),
        versions=founders[min(founders)][0].header.versions,
        omitted=tuple(omitted),
    )


def _log_of(tapes: Sequence[Recital]) -> list[Record]:
    """The longest, up to where a new lineage undoes what others still have. Raises TapeError."""
    log = max((tape.records for tape in tapes), key=len, default=[])
    if not log or not isinstance(log[0], Genesis):
        raise TapeError("on these tapes no job has begun")
    for tape in tapes:
        for index, pair in enumerate(zip(log, tape.records, strict=False)):
            if pair[0] == pair[1]:
                continue
            if index and any(isinstance(record, Lineage) for record in (*log, *tape.records)):
                log = [*log[:index], next(r for r in (*log, *tape.records) if type(r) is Lineage)]
                break
            rack = tape.header.rack
            raise TapeError(
                f"the tape of rack {rack} is of another job than the others: record {index + 1} "
                "of its log is not theirs"
            )
    return log


def _facts(founders: Mapping[int, Sequence[Recital]]) -> tuple[tuple[str, str], ...]:
    leader = founders[min(founders)][0].header.parts.leader
    return leader.hello.facts if leader is not None else ()


def _in_common(ranks: Sequence[Recital]) -> list[list[Act]]:
    """The acts of every rank of a rack, as far as all of their tapes go. They act together."""
    count = 0
    for row in zip(*(tape.acts for tape in ranks), strict=False):
        if len({act.key for act in row}) > 1:
            rack = ranks[0].header.rack
            raise TapeError(f"the ranks of rack {rack} did not act together: {row[0]}, {row[1]}")
        count += 1
    return [tape.acts[:count] for tape in ranks]


def _sums(records: Sequence[Record], racks: Iterable[Sequence[Recital]]) -> tuple[Sums, ...]:
    """Those that are of the decided bits."""
    digests = {(r.fragment, r.version): r.digests for r in records if isinstance(r, Commit)}
    found: dict[tuple[int, int, int], bytes] = {}
    for ranks in racks:
        for rank, tape in enumerate(ranks):
            for fragment, version, digest, tensors in tape.sums:
                if digests.get((fragment, version), ())[rank : rank + 1] == (digest,):
                    found.setdefault((fragment, version, rank), tensors)
    return tuple(Sums(*key, found[key]) for key in sorted(found))


class _Cut:
    """The longest beginning of the log, and of every rack's acts, that need nothing beyond each
    other."""

    def __init__(
        self,
        genesis: Genesis,
        log: Sequence[Record],
        acts: Mapping[int, list[list[Act]]],
        founders: Mapping[int, Sequence[Recital]],
    ) -> None:
        self._members = {seat.member for seat in genesis.roster}
        self._first = dict(enumerate(genesis.first()))
        self._acts, self._founders = {rack: of[0] for rack, of in acts.items()}, founders
        self.records: list[Record] = []
        self.lengths = {rack: len(of) for rack, of in self._acts.items()}
        self._log, self._why = log, ""
        before = None
        while before != (before := (len(self.records), dict(self.lengths))):
            self._cut_log()
            self._cut_acts()
        self.omitted = self._told()

    def ends(self, rack: int) -> bool:
        whole = all(tape.whole and tape.left for tape in self._founders[rack])
        return whole and self.lengths[rack] == len(self._acts[rack])

    def _cut_log(self) -> None:
        captured = {
            (rack, act.fragment, act.number)
            for rack, acts in self._acts.items()
            for act in acts[: self.lengths[rack]]
            if act.kind == CAPTURED
        }
        self.records, self._why = [], ""
        for record in self._log:
            if isinstance(record, Epoch | Roster | Mark | Mitigation):
                continue
            if not isinstance(record, Commit | Drop):
                self._why = f"a {type(record).__name__} record came then"
                return
            for offer in offers_of(record):
                rack = offer.member.rack
                if offer.member not in self._members:
                    self._why = f"it names rack {rack} in a later life"
                elif (rack, record.fragment, offer.seq) not in captured:
                    self._why = f"the tape of rack {rack} does not reach what it names"
            if self._why:
                return
            self.records.append(record)

    def _cut_acts(self) -> None:
        commits = [record for record in self.records if isinstance(record, Commit)]
        drops = [record for record in self.records if isinstance(record, Drop)]
        versions = self._first | {commit.fragment: commit.version for commit in commits}
        dropped = {(e.member.rack, drop.fragment, e.seq) for drop in drops for e in drop.dropped}
        for rack, acts in self._acts.items():
            declined = set().union(*(tape.declined for tape in self._founders[rack]))
            for place, act in enumerate(acts[: self.lengths[rack]]):
                beyond = act.kind == APPLIED and act.number > versions[act.fragment]
                key = (act.fragment, act.number)
                ended = key in declined or (rack, *key) in dropped
                if beyond or (act.kind == DISCARDED and not ended):
                    self.lengths[rack] = place
                    break

    def _told(self) -> list[str]:
        kept = sum(isinstance(record, Commit) for record in self.records)
        found = []
        if self._why:
            found.append(f"what came behind round {kept} is left out: {self._why}")
        for rack in sorted(self._acts):
            if not self.ends(rack):
                last = self._acts[rack][: self.lengths[rack]][-1:]
                where = f"step {last[0].step}" if last else "its first step"
                found.append(f"rack {rack} is replayed up to {where}")
        return found
