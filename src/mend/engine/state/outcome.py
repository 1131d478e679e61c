"""How a rank left its job: a value, a line of the log, and a file for the launcher."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mend.errors import NotMerged
from mend.events.base import Emit
from mend.events.kinds import RankEnded, RankEndedUnmerged
from mend.status.status import Status
from mend.types import Peer

WORDS = {
    "running": "the job is not over",
    "merged": "all its work is merged; it left with every rack that was heard, on equal bits",
    "left-early": "all work is merged, and the other racks train on",
    "evicted": "all work is merged; it was slow, and is to be started again",
    "seat-lost": "the others went on without this rack, which is to be started again; what it had "
    "not merged is lost",
    "local": "this rack trained for itself (exchange=False)",
    "abandoned": "the script called abort(): the model keeps its own weights",
    "left-alone": "all work is merged, but nobody confirmed the end: other racks may differ",
    "kept-local": "the model keeps its own weights, which are not those that the others merged",
    "uncounted": "the model keeps its own weights, which moved without counted steps",
    "not-exchanged": "the model keeps its own weights, some of which no other rack gets",
    "diverged": "the model keeps its own weights, which contain NaN or Inf or moved "
    "absurdly far; the others continue",
    "failed": "the model keeps its own weights, as mend could not end in order",
    "aborted": "the rack left before mend_shutdown was over: the model keeps its own weights",
}
"""The values of `status().outcome`."""

GOOD = frozenset({"running", "merged", "left-early", "evicted", "local", "abandoned"})
"""All work is merged, or the script asked for this end."""

KEPT = frozenset({"left-alone", "kept-local", "uncounted", "not-exchanged"})
"""The rack ended in order; unmerged work is only in its weights."""

WITHOUT_NOTICE = "its process ended without notice"
"""Detail of the file that a rank writes at its begin."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`word` is one of WORDS, `detail` the reason."""

    word: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.word not in WORDS:  # it may be from a file
            raise ValueError(f"{self.word!r} is not an outcome")

    @property
    def good(self) -> bool:
        """Whether nothing is lost, except what the script gave up itself."""
        return self.word in GOOD

    def __str__(self) -> str:
        more = f": {self.detail}" if self.detail else ""
        return f"{self.word} ({WORDS[self.word]}{more})"


def late_steps(rack: int, steps: int, period_steps: int) -> str:
    """A warning, if more than a period of the steps in the last offer of a rack were made on an old
    version; else empty. `steps`: how many were. What the others merged meanwhile is in the model
    already, and nobody trains on the sum; after an earlier offer, later training corrects it."""
    if steps <= period_steps:
        return ""
    return (
        f"the last offer of rack {rack} added {steps} steps that it had made on an old version, "
        "while the others merged theirs: the model may be worse than that of one rack"
    )


class RankEnd(msgspec.Struct, frozen=True):
    """The file of a rank's end, for `mend launch`. Tokens are averaged over fragments."""

    rack: int
    rank: int
    outcome: str
    detail: str = ""
    step: int = 0
    tokens: int = 0
    tokens_merged: float = 0.0

    @property
    def good(self) -> bool:
        return Outcome(self.outcome).good

    def __str__(self) -> str:
        outcome = f"{Outcome(self.outcome, self.detail)}"
        if self.detail == WITHOUT_NOTICE:
            return outcome
        return f"{outcome}; {self.tokens_merged:.0f} of {self.tokens} tokens are merged"


def refuse_clean_exit(error: BaseException, status: Status) -> None:
    """Raise NotMerged in place of a SystemExit that reports success, if work of this rank is not
    merged: nobody would notice the loss otherwise. `status`: the last one."""
    clean = isinstance(error, SystemExit) and error.code in (None, 0)
    shares = status.racks_configured > 1 and bool(status.anchor_digest)
    if clean and shares and status.ledger.open > 0 and status.outcome != "abandoned":
        raise NotMerged(
            f"rack {status.rack} left its session by sys.exit({', '.join(map(str, error.args))}) "
            f"with {status.ledger.open:.10g} of {status.tokens} tokens not merged. Leave the loop "
            "with break or return, so that the session ends and merges them; or end with another "
            "status, or call runtime.abort() first, to give them up"
        ) from error


def file_of(folder: Path, rack: int, rank: int) -> Path:
    """The path of this rank's file."""
    return folder / f"rack{rack}-rank{rank}.json"


def write_ended(folder: Path | None, ended: RankEnd) -> None:
    """Write the file. The launcher made the folder; without one there is no launcher."""
    if folder is None:
        return
    path = file_of(folder, ended.rack, ended.rank)
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(msgspec.json.encode(ended))
        os.replace(draft, path)
    except OSError as error:
        sys.stderr.write(f"mend: {path} cannot be written: {error}\n")


def tell_begin(me: Peer, folder: Path | None) -> None:
    """Write the file that stays if the process ends without another one (os._exit, SIGKILL). It
    replaces the file of a former life of the rack."""
    write_ended(folder, RankEnd(me.rack, me.rank, "aborted", WITHOUT_NOTICE))


def read_ended(folder: Path) -> list[RankEnd]:
    """The ends of all ranks, by rack and rank; damaged files are left out. A rack ends together: a
    rank that was killed before it could write is left out if another rank of its rack did."""
    ends = []
    for path in folder.glob("*.json"):
        try:
            ended = msgspec.json.decode(path.read_bytes(), type=RankEnd)
            Outcome(ended.outcome)
        except (OSError, msgspec.DecodeError, ValueError):
            continue
        ends.append(ended)
    wrote = {end.rack for end in ends if end.detail != WITHOUT_NOTICE}
    last = [end for end in ends if end.detail != WITHOUT_NOTICE or end.rack not in wrote]
    return sorted(last, key=lambda end: (end.rack, end.rank))


def report_end(ended: RankEnd, folder: Path | None, note: Emit) -> None:
    """Note how this rank ended, write its file, and print a bad end again as the process's last
    line. A rank that left early before its first step only removes its file: its error was raised.
    """
    if ended.outcome in ("aborted", "abandoned") and not ended.step:
        if folder is not None:
            file_of(folder, ended.rack, ended.rank).unlink(missing_ok=True)
        return
    write_ended(folder, ended)
    made = RankEnded if ended.good else RankEndedUnmerged
    note(made(*(getattr(ended, name) for name in ended.__struct_fields__[2:])))
    if not ended.good or ended.outcome == "evicted":
        line = f"mend: rack {ended.rack} rank {ended.rank} ended {ended}"
        _last_lines.add(Peer(ended.rack, ended.rank), line)


class _LastLines:
    """One line per rank of this process, printed when the process ends. A rank whose model lives as
    long as the process may end even later; its line is then printed at once."""

    def __init__(self) -> None:
        self._lines: dict[Peer, str] = {}
        self._over = False
        atexit.register(self._write)
        os.register_at_fork(after_in_child=self._lines.clear)  # they are the parent's

    def add(self, me: Peer, line: str) -> None:
        self._lines[me] = line
        if self._over:
            self._write()

    def _write(self) -> None:
        self._over = True
        for line in self._lines.values():
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"{line}\n")
        self._lines.clear()


_last_lines = _LastLines()
