"""Compares a replayed run with its script, and writes the differences to a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from mend.consensus.records import Commit, Genesis
from mend.coordination.events import Effect, Encoded, Event, Fail, Merged, RecordCommitted
from mend.engine.compute.digest import bytes_of
from mend.errors import MendError, ReplayDiffers
from mend.types import Peer
from mend_lab.replay.coordinator import DIFFERS
from mend_lab.replay.script import CAPTURED, Act, GivenState, ReplayScript

START, MERGE = "start", "merge"
TRAINING = "training"
"""Subject of a difference: the first weights, a merge, a rack's training."""

_SUM_BYTES = 8


class Finding(msgspec.Struct, frozen=True):
    """A line of a rank's file. `kind`: round, differs, done. `place` orders differences: the number
    of the round, then 0 for its inputs and 1 for its result."""

    kind: str
    number: int = 0
    place: tuple[int, int] = (0, 0)
    about: str = ""
    text: str = ""


class ReplayReport:
    """One rank's file of findings. Any thread."""

    def __init__(self, folder: Path, me: Peer) -> None:
        self._path, self._lock = folder / file_name(me), threading.Lock()

    def tell(self, finding: Finding) -> None:
        with self._lock, self._path.open("ab") as file:
            file.write(msgspec.json.encode(finding) + b"\n")


def file_name(peer: Peer) -> str:
    return f"found-rack{peer.rack}-rank{peer.rank}.jsonl"


def findings_in(path: Path) -> list[Finding]:
    """A rank's findings so far, without a line that is being written."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Finding) for line in lines]


class StateFiles:
    """Files with the states that joining lives of a replay begin with; their donors write them."""

    def __init__(self, folder: Path, kind: str = "state") -> None:
        self._folder, self._kind = folder, kind

    def of_mirrors(self) -> StateFiles:
        """The files with the state of scope rack of former lives."""
        return StateFiles(self._folder, "mirror")

    def _path(self, given: GivenState, rank: int) -> Path:
        return self._folder / f"{self._kind}-rack{given.to}-rank{rank}.mend-replay"

    def write(self, given: GivenState, rank: int, data_B: Tensor) -> None:
        path = self._path(given, rank)
        part = path.with_suffix(".part")
        part.write_bytes(bytes_of(data_B))
        part.rename(path)

    def has(self, given: GivenState, rank: int) -> bool:
        return self._path(given, rank).exists()

    def read(self, given: GivenState, rank: int) -> Tensor:
        return torch.frombuffer(bytearray(self._path(given, rank).read_bytes()), dtype=torch.uint8)

    def remove(self) -> None:
        for kind in ("state", "mirror"):
            for path in self._folder.glob(f"{kind}-rack*.mend-replay"):
                path.unlink()


class ReplayComparison:
    """Takes the place of a rank's tape: compares the events and effects of its machines.

    `names`: per fragment, the names of its tensors. `fail` stops this rank.
    """

    def __init__(
        self,
        script: ReplayScript,
        me: Peer,
        names: Sequence[Sequence[str]],
        report: ReplayReport,
        fail: Callable[[MendError], None],
    ) -> None:
        self._script, self._me, self._names = script, me, names
        self._report, self._fail = report, fail
        self._commits, self._differs, self._lock = script.commits, False, threading.Lock()
        self._sums = {(s.fragment, s.version): s.digests for s in script.sums if s.rank == me.rank}
        part = script.part(me.rack)
        acts = part.acts[me.rank] if part is not None else ()
        self._title = part.title if part is not None else f"rack {me.rack}"
        self._captures = {(a.fragment, a.number): a for a in acts if a.kind == CAPTURED}
        self._rounds = {
            (commit.fragment, share.seq): number
            for number, commit in self._commits.values()
            for share in commit.members
            if share.member.rack == me.rack
        }

    def put(
        self, machine: str, now_ns: int, event: Event, effects: Sequence[Effect], error: str = ""
    ) -> None:
        """See `mend.trace.writer.Tape`. Loop thread."""
        match event:
            case Encoded(fragment, seq, checksum):
                self._encoded(fragment, seq, checksum)
            case Merged(fragment, version, _, digest, "", tensors):
                self._merged(fragment, version, digest, tensors)
        for effect in effects:
            match effect:
                case RecordCommitted(Genesis() as genesis):
                    self._begun(genesis)
                case RecordCommitted(Commit(fragment=fragment, version=version)):
                    number, _ = self._commits[fragment, version]
                    self._report.tell(Finding("round", number))
                case Fail(kind, detail) if kind == DIFFERS:
                    self.differs(detail, MERGE, (self._script.rounds + 1, 0))

    def differs(self, text: str, about: str, place: tuple[int, int]) -> None:
        """Report the first difference and stop this rank; later ones follow from it. Any thread."""
        with self._lock:
            if self._differs:
                return
            self._differs = True
        self._report.tell(Finding("differs", 0, place, about, text))
        self._fail(ReplayDiffers(text))

    def _begun(self, genesis: Genesis) -> None:
        for fragment, then in enumerate(self._script.genesis.digests):
            now = genesis.digests[fragment]
            if now != then:
                rank = next(k for k in range(len(then)) if now[k : k + 1] != then[k : k + 1])
                text = (
                    f"version 0 of fragment {fragment}, rank {rank}: the weights that training "
                    f"begins with have digest {then[rank][:16]} on the tape, {now[rank][:16]} now"
                )
                self.differs(text, START, (0, 0))
                return

    def _encoded(self, fragment: int, seq: int, checksum: str) -> None:
        act = self._captures.get((fragment, seq))
        if act is None or not act.checksum or act.checksum == checksum:
            return
        text = (
            f"{self._title} rank {self._me.rank}, step {act.step}, fragment {fragment}: "
            f"what was captured has checksum {act.checksum[:16]} on the tape, "
            f"{checksum[:16] or 'none'} now; training itself diverged, before any merge of it"
        )
        self.differs(text, TRAINING, self.place_of(act))

    def place_of(self, act: Act) -> tuple[int, int]:
        """The place of a capture: before the round that it went into."""
        return self._rounds.get((act.fragment, act.number), self._script.rounds + 1), 0

    def _merged(self, fragment: int, version: int, digest: str, tensors: bytes) -> None:
        number, commit = self._commits[fragment, version]
        then = commit.digests[self._me.rank]
        if digest == then:
            return
        text = (
            f"round {number} (fragment {fragment}, version {version}), {self._title} rank "
            f"{self._me.rank}: the result has digest {then[:16]} on the tape, {digest[:16]} now; "
            f"{self._which(fragment, version, tensors)}"
        )
        self.differs(text, MERGE, (number, 1))

    def _which(self, fragment: int, version: int, tensors: bytes) -> str:
        then = self._sums.get((fragment, version), b"")
        names = self._names[fragment]
        if len(then) != len(tensors) or len(then) != _SUM_BYTES * len(names):
            return "the tape does not say which tensor"
        different = [
            name
            for i, name in enumerate(names)
            if then[_SUM_BYTES * i : _SUM_BYTES * (i + 1)]
            != tensors[_SUM_BYTES * i : _SUM_BYTES * (i + 1)]
        ]
        if not different:
            return "every tensor of it is equal, its digest or the outer optimizer's state is not"
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        return f"tensor {different[0]}{more} of {len(names)}"
