"""What the diaries of a storm must say whatever happened. Pure: lines in, findings out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUM_ERROR_MAX = 1e-6
"""mend's ledger is an average over fragments, in floats."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One rank from its start to its end. `life` counts the starts of its rack, from 0."""

    rack: int
    life: int
    rank: int = 0
    lines: Sequence[dict[str, Any]] = field(default_factory=tuple)
    code: int | None = 0
    """None: it had to be ended by the harness, long after it should have left."""
    killed: bool = False
    undoable: bool = False
    """It died where those who are left may begin a new lineage without its last commits."""

    def __str__(self) -> str:
        return f"rack {self.rack} life {self.life} rank {self.rank}"

    @property
    def end(self) -> dict[str, Any] | None:
        last = self.lines[-1] if self.lines else {}
        return last if last.get("kind") == "end" else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; a process may have died while it wrote the last one."""
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]


def judge(lives: Sequence[Life]) -> list[str]:
    """Every broken promise as a sentence; none when all was kept."""
    found = [sentence for life in lives for sentence in _alone(life)]
    return [*found, *_equal_bits(lives), *_one_end(lives), *_twins(lives)]


# ------------------------------------------------------------------ one life


def _alone(life: Life) -> Iterator[str]:
    yield from _how_it_ended(life)
    before: dict[str, Any] | None = None
    for line in life.lines:
        if line["kind"] == "error":
            continue
        yield from _counted(life, line)
        if before is not None:
            pairs = zip(before["versions"], line["versions"], strict=True)
            if any(new < old for old, new in pairs):
                yield f"{life}: versions {before['versions']} became {line['versions']}"
        before = line


def _how_it_ended(life: Life) -> Iterator[str]:
    if life.killed:
        return
    if life.code is None:
        yield f"{life} did not end by itself"
    elif life.code:
        last = life.lines[-1] if life.lines else {"kind": "nothing"}
        yield f"{life} exits {life.code}, having said {last}"
    elif life.end is None:
        yield f"{life} exits 0 and did not come to its end"
    elif life.end["ledger"][1]:
        yield f"{life} exits 0 with {life.end['ledger'][1]:g} tokens that nobody merged"


def _counted(life: Life, line: dict[str, Any]) -> Iterator[str]:
    """What the script has trained is what mend knows of, and all of that is somewhere."""
    where = f"{life} at step {line['step']}"
    if line["told_step"] != line["step"]:
        yield f"{where}: mend counts {line['told_step']} steps"
    if line["told_tokens"] != line["tokens"]:
        yield f"{where}: {line['tokens']} tokens trained, mend counts {line['told_tokens']}"
    merged, open_, discarded = line["ledger"]
    if abs(merged + open_ + discarded - line["tokens"]) > SUM_ERROR_MAX:
        sums = f"{merged:g} merged + {open_:g} open + {discarded:g} discarded"
        yield f"{where}: {sums} are not the {line['tokens']} tokens trained"
    if min(merged, open_, discarded) < 0:
        yield f"{where}: a part of the ledger {line['ledger']} is negative"


# ------------------------------------------------------------------ all lives together


def _equal_bits(lives: Sequence[Life]) -> Iterator[str]:
    """Equal versions are equal bits: by mend's digest, and by the weights the script has seen."""
    first: dict[tuple[str, tuple[int, ...]], tuple[str, Life]] = {}
    for life in sorted(lives, key=lambda life: life.undoable):
        wrong = []
        for place, line in enumerate(life.lines):
            for what in ("digest", "weights"):
                if what not in line or _kept_its_own(line):
                    continue
                key = (what, tuple(line["versions"]))
                bits, whose = first.setdefault(key, (line[what], life))
                if bits != line[what]:
                    told = f"{life} has another {what} at {line['versions']} than {whose}"
                    wrong.append((place, told))
        # What was undone is the end of a life: all that it said from some point on.
        if life.undoable and wrong and _is_a_tail(life, wrong[0][0], first):
            continue
        yield from (told for _, told in wrong[:1])


def _kept_its_own(line: dict[str, Any]) -> bool:
    """At the end a model with unmerged work is no merged one."""
    return line["kind"] == "error" or (line["kind"] == "end" and bool(line["ledger"][1]))


def _is_a_tail(life: Life, place: int, first: dict[tuple[str, tuple[int, ...]], Any]) -> bool:
    """From here on, nothing that this life said is what another one said."""
    told = [line for line in life.lines[place:] if line["kind"] != "error"]
    later = (("digest", tuple(line["versions"]), line["digest"]) for line in told)
    return not any(
        first[kind, versions][0] == digest and first[kind, versions][1] is not life
        for kind, versions, digest in later
    )


def _one_end(lives: Sequence[Life]) -> Iterator[str]:
    """Whoever exits 0 and says that all is merged holds what the others hold that say so."""
    first: tuple[dict[str, Any], Life] | None = None
    for life in lives:
        end = life.end
        if life.code or life.killed or end is None or end["ledger"][1]:
            continue
        first = first or (end, life)
        for what in ("versions", "digest", "weights"):
            if end[what] != first[0][what]:
                said = f"{what} {end[what]} and not {first[0][what]} of {first[1]}"
                yield f"{life} says that all is merged, with {said}"
                break


# ------------------------------------------------------------------ those that joined


def _twins(lives: Sequence[Life]) -> Iterator[str]:
    """Who begins behind the first step has the optimizer's state that another rack had then."""
    for life in lives:
        first = life.lines[0] if life.lines else {"step": 0}
        if not first["step"]:
            continue
        donors = {
            line["state"]
            for other in lives
            if other.rack != life.rack and other.rank == life.rank
            for line in other.lines
            if line["kind"] == "step" and line["step"] == first["step"]
        }
        if first["state"] not in donors:
            yield f"{life} begins behind step {first['step']} with a state that no rack had then"
