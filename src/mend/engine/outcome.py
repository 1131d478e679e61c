"""How a rank left its job: as a value, as a line of the log, as a file for the launcher."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mend.types import Peer

if TYPE_CHECKING:
    from mend.engine.trainer import Trainer

WORDS = {
    "running": "the job is not over",
    "merged": "all work is merged, and the racks left together with the same bits",
    "left-early": "all work is merged, and the other racks train on",
    "evicted": "all work is merged; it was slow, and is to be started again",
    "local": "this rack trained for itself (exchange=False)",
    "abandoned": "the script called abort(): the model keeps its own weights",
    "left-alone": "all work is merged, but nobody confirmed the end: other racks may differ",
    "kept-local": "the model keeps its own weights, which hold work that nobody merged",
    "uncounted": "the model keeps its own weights, which moved without counted steps",
    "not-exchanged": "the model keeps its own weights, some of which no other rack gets",
    "diverged": "the model keeps its own weights, which are no numbers; the others go on without",
    "failed": "the model keeps its own weights, as mend could not end in order",
    "aborted": "the rack left without mend_shutdown: the model keeps its own weights",
}
"""What `status().outcome` may be."""

GOOD = frozenset({"running", "merged", "left-early", "evicted", "local", "abandoned"})
"""All work is merged, or the script asked for what became of it."""

KEPT = frozenset({"left-alone", "kept-local", "uncounted", "not-exchanged"})
"""The rack ended in order, and what nobody merged is in its weights only."""


WITHOUT_A_WORD = "its process ended without a word"
"""Detail of what a rank tells at its beginning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`word` is one of WORDS, `detail` the reason."""

    word: str
    detail: str = ""

    def __post_init__(self) -> None:
        assert self.word in WORDS, f"{self.word!r} is no outcome"

    @property
    def good(self) -> bool:
        """Whether nothing is lost that the script did not give up itself."""
        return self.word in GOOD

    def __str__(self) -> str:
        more = f": {self.detail}" if self.detail else ""
        return f"{self.word} ({WORDS[self.word]}{more})"


class Ended(msgspec.Struct, frozen=True):
    """What a rank tells `mend launch` when it ends. Tokens are averaged over fragments."""

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
        told = Outcome(self.outcome, self.detail)
        if self.detail == WITHOUT_A_WORD:
            return f"{told}"
        return f"{told}; {self.tokens_merged:.0f} of {self.tokens} tokens are merged"


def file_of(folder: Path, rack: int, rank: int) -> Path:
    """Where this rank tells."""
    return folder / f"rack{rack}-rank{rank}.json"


def write_ended(folder: Path | None, ended: Ended) -> None:
    """Leave it for the launcher, who made the folder. A launcher that is gone needs nothing."""
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
    """What the launcher reads of a process that tells nothing any more: os._exit, SIGKILL. It takes
    the place of what a former life of the rack has told."""
    write_ended(folder, Ended(me.rack, me.rank, "aborted", WITHOUT_A_WORD))


def read_ended(folder: Path) -> list[Ended]:
    """What the ranks of all racks told, by rack and rank; a file that is none is left out. A rack
    ends together: what one of its ranks tells is not undone by another that was killed before it
    could."""
    found = []
    for path in folder.glob("*.json"):
        try:
            ended = msgspec.json.decode(path.read_bytes(), type=Ended)
            Outcome(ended.outcome)
        except (OSError, msgspec.DecodeError, AssertionError):
            continue
        found.append(ended)
    told = {each.rack for each in found if each.detail != WITHOUT_A_WORD}
    last = [each for each in found if each.detail != WITHOUT_A_WORD or each.rack not in told]
    return sorted(last, key=lambda each: (each.rack, each.rank))


def tell_end(
    me: Peer,
    trainer: Trainer,
    folder: Path | None,
    note: Callable[[str, dict[str, object]], None],
) -> None:
    """Note how this rank ended, tell the launcher, and repeat a bad end as the process's last line.

    A rank that never took a step has nothing to tell: what stopped it was raised.
    """
    outcome = trainer.outcome if trainer.outcome.word != "running" else Outcome("aborted")
    if outcome.word in ("aborted", "abandoned") and not trainer.step:
        if folder is not None:
            file_of(folder, me.rack, me.rank).unlink(missing_ok=True)
        return
    merged = trainer.ledger.merged / (len(trainer.weights) or 1)
    ended = Ended(
        me.rack, me.rank, outcome.word, outcome.detail, trainer.step, trainer.tokens, merged
    )
    fields: dict[str, object] = {name: getattr(ended, name) for name in ended.__struct_fields__[2:]}
    write_ended(folder, ended)
    note("ended" if ended.good else "ended-unmerged", fields)
    if not ended.good or ended.outcome == "evicted":
        _last_lines.add(me, f"mend: rack {me.rack} rank {me.rank} ended {ended}")


class _LastLines:
    """One line per rank of this process, written when the process ends. A rank that ends so late
    that this is over, because its model lived as long as the process, is written at once."""

    def __init__(self) -> None:
        self._lines: dict[Peer, str] = {}
        self._over = False
        atexit.register(self._write)
        os.register_at_fork(after_in_child=self._lines.clear)  # they are of the other process

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
