"""The script of a replay of training, made from the tapes of a job.

It has the acts of each rank's training thread, in order, and the decided merges as far as the tapes
contain all their inputs. Pure: entries of tapes in, a script out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, NamedTuple

import msgspec

from mend.consensus.log import offers_of
from mend.consensus.records import (
    Ballot,
    CheckpointRecord,
    Commit,
    Drop,
    Genesis,
    Lineage,
    Mitigation,
    Record,
    Roster,
    Seat,
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
    """Checksum of the payload of a capture; empty: not on the tape, or there was none."""
    closing: bool = False

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The fields that are equal on all ranks of a rack."""
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
    """The acts of one life of a rack. In the replay it is a rack of its own, whose number, its
    *seat*, is its place in the script. `ends`: its training ended in order; otherwise the replay
    stops after its last act."""

    rack: int
    acts: tuple[tuple[Act, ...], ...]
    ends: bool
    config: dict[str, Any]
    threads: str = ""
    life: int = 1
    """Counted from 1, in the order in which the lives of this rack joined."""
    first: tuple[int, ...] = ()
    """Versions that a life that joined the running job began with. Empty: a founder."""
    batches: tuple[tuple[int, int], ...] = ()
    """(step, percent): the share of its micro-batches that the rack takes after that step."""

    @property
    def title(self) -> str:
        return f"rack {self.rack}" if self.life == 1 else f"rack {self.rack} (life {self.life})"


class GivenState(msgspec.Struct, frozen=True, array_like=True):
    """A copy of training state from one life to another at `step`. `donor`, `to`: seats."""

    donor: int
    to: int
    rack: int
    """The donor's rack."""
    step: int
    digests: tuple[str, ...]
    """Per rank."""


class ReplayScript(msgspec.Struct, frozen=True):
    """`facts`: the (key, value) pairs that all racks shared. `omitted`: sentences about lost
    parts."""

    job: str
    facts: tuple[tuple[str, str], ...]
    genesis: Genesis
    records: tuple[Record, ...]
    """Commits and Drops, in the order of the log. Members have the number of their seat."""
    rounds: int
    """Commits of the whole log; `records` may have less."""
    parts: tuple[Part, ...]
    sums: tuple[Sums, ...]
    versions: dict[str, str]
    omitted: tuple[str, ...]
    given: tuple[GivenState, ...] = ()
    mirrors: tuple[GivenState, ...] = ()
    """State of scope rack that one life had after a capture and a later life of its rack loaded."""

    def part(self, seat: int) -> Part | None:
        return self.parts[seat] if 0 <= seat < len(self.parts) else None

    @property
    def commits(self) -> dict[tuple[int, int], tuple[int, Commit]]:
        """(fragment, version) -> number of the round, counted from 1, and its record."""
        commits = [record for record in self.records if isinstance(record, Commit)]
        return {(c.fragment, c.version): (n, c) for n, c in enumerate(commits, start=1)}


_decoder = msgspec.msgpack.Decoder(ReplayScript)


def encode_script(script: ReplayScript) -> bytes:
    return msgspec.msgpack.encode(script)


def decode_script(data: bytes) -> ReplayScript:
    """Decode a script. Raises TapeError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise TapeError(f"this is not a script of a replay: {error}") from error


# ------------------------------------------------------------------ from tapes


class Taken(NamedTuple):
    """The training state of `donor` after `step`, for a rack that joins."""

    donor: Member
    step: int
    digest: str


@dataclass
class Recital:
    """The contents of one rank's tape."""

    header: Header
    whole: bool
    """The tape was closed in order and has no gap."""
    acts: list[Act] = field(default_factory=list)
    captures: dict[tuple[int, int], int] = field(default_factory=dict)
    """(fragment, seq) -> place in `acts`."""
    records: dict[int, Record] = field(default_factory=dict)
    """Place in the log, counted from 0 -> record, without those that a snapshot replaced."""
    decided: int = 0
    """Records of the log up to the newest one."""
    sums: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    """(fragment, version, digest, digests of tensors)."""
    declined: set[tuple[int, int]] = field(default_factory=set)
    gave: set[tuple[Member, int, str]] = field(default_factory=set)
    """(rack that joined, step, digest) of each state that this rank gave as a donor."""
    pulled: Taken | None = None
    """The last state that came from a donor."""
    copied: Taken | None = None
    """The state that this rank has continued from; None: it has copied none."""
    mirrored: Taken | None = None
    """The state of scope rack that it has loaded from a former life of its rack."""
    batches: list[tuple[int, int]] = field(default_factory=list)
    """(step, percent): the share of its micro-batches that it takes after that step."""
    left: bool = False
    """Its script called mend_shutdown."""

    @property
    def member(self) -> Member:
        return self.header.parts.member


def recite(header: Header, whole: bool, entries: Iterable[Entry | Gap]) -> Recital:
    """Read the tape of one rank, up to its first gap."""
    recital = Recital(header, whole)
    for entry in entries:
        if isinstance(entry, Gap):
            recital.whole = False
            break
        if entry.machine != "rank":
            continue
        _listen(entry.event, recital)
        if any(answer.name in ("RecordCommitted", "Restored") for answer in entry.answers):
            for effect in entry.effects:
                _note_decided(effect, recital)
    return recital


def _note_decided(effect: ev.Effect, recital: Recital) -> None:
    match effect:
        case ev.Restored(snapshot):
            recital.decided = snapshot.index
        case ev.RecordCommitted(record):
            recital.records[recital.decided] = record
            recital.decided += 1


def act_of(event: ev.Event) -> Act | None:
    """The act that a training thread reports with this event; None: the event reports none."""
    match event:
        case ev.Captured(p, seq, base, step, tokens, steps, closing):
            return Act(CAPTURED, step, p, seq, base, tokens, steps, closing=closing)
        case ev.Applied(p, version, _, step):
            return Act(APPLIED, step, p, version)
        case ev.Discarded(p, seq, step):
            return Act(DISCARDED, step, p, seq)
    return None


def _listen(event: ev.Event, recital: Recital) -> None:
    if (act := act_of(event)) is not None:
        if act.kind == CAPTURED:
            recital.captures[act.fragment, act.number] = len(recital.acts)
        recital.acts.append(act)
    match event:
        case ev.Encoded(p, seq, checksum, declined):
            if declined:
                recital.declined.add((p, seq))
            if (place := recital.captures.get((p, seq))) is not None:
                act = msgspec.structs.replace(recital.acts[place], checksum=checksum)
                recital.acts[place] = act
        case ev.Merged(p, version, _, digest, _, tensors) if tensors:
            recital.sums.append((p, version, digest, tensors))
        case ev.Leaving(now):
            # A script that ends says so first; one that was evicted leaves at once, in a step.
            recital.left = recital.left or not now
        case ev.BatchSet(step, batch_pct):
            recital.batches.append((step, batch_pct))
        case _:
            _listen_to_copies(event, recital)


def _listen_to_copies(event: ev.Event, recital: Recital) -> None:
    match event:
        case ev.StateTaken(to, step, _, digest, "") if digest:
            recital.gave.add((to, step, digest))
        case ev.StateCopied(donor, step, digest, ""):
            recital.pulled = Taken(donor, step, digest)
        case ev.StepReached(step, 0) if recital.pulled is not None and step == recital.pulled.step:
            # `Trainer` reports it once it has loaded the state.
            recital.copied = recital.copied or recital.pulled
        case ev.RackStateLoaded(owner, step, digest):
            recital.mirrored = Taken(owner, step, digest)


@dataclass(frozen=True)
class Life:
    """One life of a rack: the tapes of its ranks, in order."""

    seat: Seat
    number: int
    founder: bool
    ranks: list[Recital]
    acts: list[list[Act]]
    """Per rank, up to the end of the shortest tape."""

    @property
    def member(self) -> Member:
        return self.seat.member

    @property
    def title(self) -> str:
        rack = f"rack {self.member.rack}"
        return rack if self.number == 1 else f"{rack} (life {self.number})"

    @property
    def copied(self) -> Taken | None:
        return self.ranks[0].copied

    @property
    def mirrored(self) -> Taken | None:
        return self.ranks[0].mirrored

    def first(self, genesis: Genesis) -> tuple[int, ...]:
        """The versions that this life began with."""
        begun = {act.fragment: act.number for act in self.acts[0] if act.step == 0}
        return tuple(begun.get(p, version) for p, version in enumerate(genesis.first()))

    def acts_up_to(self, step: int) -> int:
        return sum(act.step <= step for act in self.acts[0])

    def gave(self, to: Member, step: int, digests: Sequence[str]) -> bool:
        return all(
            (to, step, digest) in tape.gave
            for tape, digest in zip(self.ranks, digests, strict=True)
        )


def script_of(tapes: Sequence[Recital]) -> ReplayScript:
    """Make the script. Raises TapeError for tapes of several jobs, or without one of a founder."""
    log = _log_of(tapes)
    genesis, omitted = log[0], list[str]()
    if not isinstance(genesis, Genesis):
        raise TapeError(f"the log of these tapes begins with a {type(genesis).__name__}")
    lives = _lives_of(tapes, genesis, log, omitted)
    kept = _Cut(genesis, log[1:], lives)
    omitted += kept.omitted
    cast = sorted(kept.lives, key=lambda life: (life.member.rack, life.number))
    seats = {life.member: seat for seat, life in enumerate(cast)}
    founders = [life for life in cast if life.founder]
    return ReplayScript(
        job=tapes[0].header.job,
        facts=_facts(founders[0]),
        genesis=genesis,
        records=tuple(_seated(kept.records, log, seats)),
        rounds=sum(isinstance(record, Commit) for record in log),
        parts=tuple(
            Part(
                life.member.rack,
                tuple(tuple(of[: kept.lengths[life.member]]) for of in life.acts),
                kept.ends(life),
                life.ranks[0].header.config,
                life.ranks[0].header.versions.get("threads", ""),
                life.number,
                () if life.founder else life.first(genesis),
                tuple(life.ranks[0].batches),
            )
            for life in cast
        ),
        sums=_sums(kept.records, [life.ranks for life in cast]),
        versions=founders[0].ranks[0].header.versions,
        omitted=tuple(omitted),
        given=tuple(_given(cast, seats, lambda tape: tape.copied)),
        mirrors=tuple(_given(cast, seats, lambda tape: tape.mirrored)),
    )


def _given(
    cast: Sequence[Life], seats: Mapping[Member, int], of: Callable[[Recital], Taken | None]
) -> Iterator[GivenState]:
    """The states that lives have copied."""
    for seat, life in enumerate(cast):
        if (taken := of(life.ranks[0])) is not None:
            digests = tuple(copied.digest for tape in life.ranks if (copied := of(tape)))
            donor = taken.donor
            yield GivenState(seats[donor], seat, donor.rack, taken.step, digests)


def _log_of(tapes: Sequence[Recital]) -> list[Record]:
    """The longest log, up to a new lineage that undoes records of another. Raises TapeError."""
    log = max((_unbroken(tape) for tape in tapes), key=len, default=[])
    if not log or not isinstance(log[0], Genesis):
        raise TapeError("on these tapes no job has begun")
    for tape in tapes:
        for index, record in tape.records.items():
            if index >= len(log) or log[index] == record:
                continue
            theirs = tape.records.values()
            if index and any(isinstance(record, Lineage) for record in (*log, *theirs)):
                log = [*log[:index], next(r for r in (*log, *theirs) if type(r) is Lineage)]
                break
            rack = tape.header.rack
            raise TapeError(
                f"the tape of rack {rack} is of another job than the others: record {index + 1} "
                "of its log is not theirs"
            )
    return log


def _unbroken(tape: Recital) -> list[Record]:
    """Return the records from the first one on, up to a gap."""
    return [tape.records[i] for i in takewhile(tape.records.__contains__, count())]


def _lives_of(
    tapes: Sequence[Recital], genesis: Genesis, log: Sequence[Record], omitted: list[str]
) -> list[Life]:
    """The founders, and of those that joined later the ones that can be replayed. Raises
    TapeError."""
    by_rank = {(tape.member, tape.header.rank): tape for tape in tapes}
    founders = {seat.member for seat in genesis.roster}
    lowest, numbers, lives = min(founders).rack, dict[int, int](), list[Life]()
    for seat in _seats_in(log):
        member, rack = seat.member, seat.member.rack
        numbers[rack] = number = numbers.get(rack, 0) + 1
        ranks = [by_rank.get((member, rank)) for rank in range(len(seat.lanes))]
        here = [tape for tape in ranks if tape is not None]
        founder = member in founders
        if founder and len(here) < len(ranks):
            raise TapeError(f"there is no tape of rack {rack} rank {ranks.index(None)} here")
        acts = _in_common(here) if len(here) == len(ranks) else []
        life = Life(seat, number, founder, here, acts)
        why = "" if founder else _why_not(life, lowest)
        if why:
            omitted.append(f"{life.title} joined later and is left out: {why}")
        elif founder or acts[0] or any(tape.gave for tape in here):
            lives.append(life)
    return lives


def _seats_in(log: Sequence[Record]) -> list[Seat]:
    """Return the seat of every member once, in the order in which they joined."""
    seats_of: dict[Member, Seat] = {}
    for record in log:
        if isinstance(record, Genesis | Roster):
            seats = record.roster if isinstance(record, Genesis) else record.members
            for seat in seats:
                seats_of.setdefault(seat.member, seat)
    return list(seats_of.values())


def _why_not(life: Life, lowest: int) -> str:
    """Say why a life that joined later cannot be replayed; empty: it can."""
    if not life.acts:
        return "not all of its tapes are here"
    parts = life.ranks[0].header.parts
    if parts.leader is not None and parts.leader.hello.resume is not None:
        return "it resumed a checkpoint"
    if life.member.rack < lowest:
        return f"rack {lowest}, the lowest that founded the job, has the first version"
    return ""


def _seated(
    records: Sequence[Record], log: Sequence[Record], seats: Mapping[Member, int]
) -> Iterator[Record]:
    """The first Commits and Drops of the log, as many as are kept, with seats in place of racks."""
    current, left = dict[int, int](), len(records)

    def seated(member: Member) -> Member:
        return Member(seats[member], member.incarnation)

    for record in log:
        if isinstance(record, Genesis | Roster):
            members = record.roster if isinstance(record, Genesis) else record.members
            current |= {s.member.rack: seats[s.member] for s in members if s.member in seats}
        if not left or not isinstance(record, Commit | Drop):
            continue
        left -= 1
        replace = msgspec.structs.replace
        dropped = tuple(replace(each, member=seated(each.member)) for each in record.dropped)
        if isinstance(record, Drop):
            yield replace(record, dropped=dropped)
            continue
        named = tuple(replace(each, member=seated(each.member)) for each in record.members)
        absent = tuple(replace(each, rack=current.get(each.rack, 0)) for each in record.absent)
        yield replace(record, members=named, dropped=dropped, absent=absent)


def _facts(life: Life) -> tuple[tuple[str, str], ...]:
    leader = life.ranks[0].header.parts.leader
    return leader.hello.facts if leader is not None else ()


def _in_common(ranks: Sequence[Recital]) -> list[list[Act]]:
    """The acts of the ranks of a rack, which act together, up to the end of the shortest tape."""
    length = 0
    for row in zip(*(tape.acts for tape in ranks), strict=False):
        if len({act.key for act in row}) > 1:
            rack = ranks[0].header.rack
            raise TapeError(f"the ranks of rack {rack} did not act together: {row[0]}, {row[1]}")
        length += 1
    return [tape.acts[:length] for tape in ranks]


def _sums(records: Sequence[Record], racks: Iterable[Sequence[Recital]]) -> tuple[Sums, ...]:
    """The sums that belong to decided versions."""
    digests = {(r.fragment, r.version): r.digests for r in records if isinstance(r, Commit)}
    digests_of: dict[tuple[int, int, int], bytes] = {}
    for ranks in racks:
        for rank, tape in enumerate(ranks):
            for fragment, version, digest, tensors in tape.sums:
                if digests.get((fragment, version), ())[rank : rank + 1] == (digest,):
                    digests_of.setdefault((fragment, version, rank), tensors)
    return tuple(Sums(*key, digests_of[key]) for key in sorted(digests_of))


class _Cut:
    """The longest prefixes of the log and of every life's acts that depend only on each other."""

    def __init__(self, genesis: Genesis, log: Sequence[Record], lives: Sequence[Life]) -> None:
        self._genesis, self._log, self._why = genesis, log, ""
        self.lives = list(lives)
        self.records: list[Record] = []
        self.lengths = {life.member: len(life.acts[0]) for life in lives}
        self.omitted: list[str] = []
        before = None
        while before != (before := (len(self.records), len(self.lives), dict(self.lengths))):
            self._cut_log()
            self._cut_acts()
            self._cut_lives()
        self.omitted += self._omissions()

    def ends(self, life: Life) -> bool:
        whole = all(tape.whole and tape.left for tape in life.ranks)
        return whole and self.lengths[life.member] == len(life.acts[0])

    def _cut_log(self) -> None:
        titles = {life.member: life.title for life in self.lives}
        captured = {
            (life.member, act.fragment, act.number)
            for life in self.lives
            for act in life.acts[0][: self.lengths[life.member]]
            if act.kind == CAPTURED
        }
        self.records, self._why = [], ""
        for record in self._log:
            if isinstance(record, Ballot | Roster | CheckpointRecord | Mitigation):
                continue
            if not isinstance(record, Commit | Drop):
                self._why = f"a {type(record).__name__} record came then"
                return
            for offer in offers_of(record):
                member = offer.member
                if member not in titles:
                    self._why = f"it names rack {member.rack} in a life that is left out"
                elif (member, record.fragment, offer.seq) not in captured:
                    self._why = f"the tape of {titles[member]} does not reach what it names"
            if self._why:
                return
            self.records.append(record)

    @property
    def _versions(self) -> dict[int, int]:
        commits = [record for record in self.records if isinstance(record, Commit)]
        first = dict(enumerate(self._genesis.first()))
        return first | {commit.fragment: commit.version for commit in commits}

    def _cut_acts(self) -> None:
        drops = [record for record in self.records if isinstance(record, Drop)]
        versions = self._versions
        dropped = {(e.member, drop.fragment, e.seq) for drop in drops for e in drop.dropped}
        for life in self.lives:
            declined = set().union(*(tape.declined for tape in life.ranks))
            for place, act in enumerate(life.acts[0][: self.lengths[life.member]]):
                beyond = act.kind == APPLIED and act.number > versions[act.fragment]
                key = (act.fragment, act.number)
                ended = key in declined or (life.member, *key) in dropped
                if beyond or (act.kind == DISCARDED and not ended):
                    self.lengths[life.member] = place
                    break

    def _cut_lives(self) -> None:
        """Remove a life that cannot begin."""
        for life in self.lives:
            why = "" if life.founder else self._why_it_cannot_begin(life)
            if why:
                self.lives.remove(life)
                del self.lengths[life.member]
                self.omitted.append(f"{life.title} joined later and is left out: {why}")
                return  # the others are looked at again

    def _why_it_cannot_begin(self, life: Life) -> str:
        versions = self._versions
        if any(v > versions[p] for p, v in enumerate(life.first(self._genesis))):
            return "it began with a version that is not replayed"
        return self._why_without_copy(life) or self._why_without_mirror(life)

    def _why_without_copy(self, life: Life) -> str:
        if (copied := life.copied) is None:
            return ""
        donor = next((each for each in self.lives if each.member == copied.donor), None)
        digests = [tape.copied.digest for tape in life.ranks if tape.copied]
        if len(digests) < len(life.ranks):
            return "its ranks did not begin alike"
        if donor is None or not donor.gave(life.member, copied.step, digests):
            return f"no tape has the state that rack {copied.donor.rack} gave it"
        if self.lengths[donor.member] < donor.acts_up_to(copied.step):
            return f"{donor.title} is not replayed up to step {copied.step}, which it went on from"
        return ""

    def _why_without_mirror(self, life: Life) -> str:
        if (mirror := life.mirrored) is None:
            return ""
        if any(tape.mirrored is None for tape in life.ranks):
            return "its ranks did not begin alike"
        owner = next((each for each in self.lives if each.member == mirror.donor), None)
        if owner is None:
            return "the life is left out that it has its own state from"
        acts = owner.acts[0][: self.lengths[owner.member]]
        if not any(act.kind == CAPTURED and act.step == mirror.step for act in acts):
            return f"{owner.title} is not replayed up to step {mirror.step}, which it went on from"
        return ""

    def _omissions(self) -> list[str]:
        kept = sum(isinstance(record, Commit) for record in self.records)
        sentences = []
        if self._why:
            sentences.append(f"everything after round {kept} is left out: {self._why}")
        for life in sorted(self.lives, key=lambda life: (life.member.rack, life.number)):
            if not self.ends(life):
                last = life.acts[0][: self.lengths[life.member]][-1:]
                where = f"step {last[0].step}" if last else "its first step"
                sentences.append(f"{life.title} is replayed up to {where}")
        return sentences
