"""What the diaries of a storm must say whatever happened. Pure: lines in, findings out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUM_ERROR_MAX = 1e-6
"""mend's ledger is an average over fragments, in floats."""
DETECT_S = 2.0
"""20 heartbeats: the silence behind which a rack is held for dead. Nobody can know it earlier."""
COMMIT_S, TAKE_OVER_S = 1.0, 5.0
"""Bounds of the next commit behind DETECT_S: of a rack that only trained, and of one that may have
coordinated. To each comes what the machine was late with a sleep meanwhile."""
INSIDE_S = 1.1
"""Bound of the time in mend within one step: `stall_max_s` of the storms, and 1 s for a machine on
which all of it runs; and what that was late with a sleep."""


SLEPT_S = 5.0
"""The others wait 6 s for a rack that is silent at the end. One that was stopped for less than this
must end with them."""


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
    era: int = 0
    """How often all racks had died before: what came behind that is another job."""
    paused: tuple[tuple[int, int], ...] = ()
    """When it was stopped from outside: (from, to) in ns of the monotonic clock."""

    def __str__(self) -> str:
        return f"rack {self.rack} life {self.life} rank {self.rank}"

    @property
    def end(self) -> dict[str, Any] | None:
        last = self.lines[-1] if self.lines else {}
        return last if last.get("kind") == "end" else None


@dataclass(frozen=True)
class Death:
    """Of a process without which the others can decide. `survivors`: (rack, life)."""

    kind: str
    at_ns: int
    survivors: tuple[tuple[int, int], ...]
    led: bool
    """It coordinated, as far as the harness knows: another one has to take over first."""

    @property
    def bound_s(self) -> float:
        return TAKE_OVER_S if self.led else COMMIT_S


@dataclass(frozen=True)
class Waited:
    """What one death cost those who were left, in seconds."""

    death: Death
    commit_s: float | None
    """From the time-out to the first step on a newer version; None: there was none."""
    inside_s: float
    """Longest time in mend within one step, from the death to that step."""
    late_s: float
    """What the machine was late with a sleep of 10 ms meanwhile, at most."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; a process may have died while it wrote the last one."""
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]


def last_versions(lines: Sequence[dict[str, Any]]) -> int:
    """Merges of all fragments, by the newest line."""
    return next((sum(line["versions"]) for line in reversed(lines) if "versions" in line), 0)


def judge(lives: Sequence[Life], deaths: Sequence[Death] = ()) -> list[str]:
    """Every broken promise as a sentence; none when all was kept."""
    found = [sentence for life in lives for sentence in _alone(life)]
    for era in sorted({life.era for life in lives}):
        mine = [life for life in lives if life.era == era]
        found += [*_equal_bits(mine), *_twins(mine)]
    found += _one_end([life for life in lives if life.era == max(each.era for each in lives)])
    return [*found, *_resumed(lives), *_merged_again(waits(lives, deaths))]


def waits(lives: Sequence[Life], deaths: Iterable[Death]) -> list[Waited]:
    """What the survivors' diaries say of every death."""
    firsts = {(life.rack, life.life): life for life in lives if life.rank == 0}
    found = []
    for death in deaths:
        noticed_ns = death.at_ns + int(DETECT_S * 1e9)
        lines = [_told_steps(firsts[key]) for key in death.survivors if key in firsts]
        ends = [end for each in lines if (end := _newer_ns(each, noticed_ns)) is not None]
        end_ns = min(ends, default=None)
        during = [
            line for each in lines for line in each
            if death.at_ns < line["at_ns"] <= (end_ns or line["at_ns"])
        ]  # fmt: skip
        found.append(
            Waited(
                death,
                None if end_ns is None else (end_ns - noticed_ns) / 1e9,
                max((line["inside_ms"] for line in during), default=0.0) / 1e3,
                max((line["late_ms"] for line in during), default=0.0) / 1e3,
            )
        )
    return found


def _told_steps(life: Life) -> list[dict[str, Any]]:
    return [line for line in life.lines if line["kind"] == "step"]


def _newer_ns(lines: Sequence[dict[str, Any]], noticed_ns: int) -> int | None:
    """When a rack first trained on more than what it had at that moment."""
    had = last_versions([line for line in lines if line["at_ns"] <= noticed_ns])
    newer = (line for line in lines if line["at_ns"] > noticed_ns and sum(line["versions"]) > had)
    return next((int(line["at_ns"]) for line in newer), None)


def _merged_again(found: Iterable[Waited]) -> Iterator[str]:
    for one in found:
        bound_s = one.death.bound_s + one.late_s
        if one.commit_s is None:
            yield f"behind {one.death.kind} nothing was merged again"
        elif one.commit_s > bound_s:
            yield (
                f"behind {one.death.kind} the next merge came {one.commit_s:.2f} s after the "
                f"time-out, {bound_s:.2f} s is the bound"
            )


def _resumed(lives: Sequence[Life]) -> Iterator[str]:
    """Whoever goes on from a checkpoint begins with its bits."""
    cuts = {
        line["name"]: (line["versions"], line["digest"])
        for life in lives for line in life.lines if line["kind"] == "cut" and not line["error"]
    }  # fmt: skip
    for life in lives:
        begun = life.lines[0] if life.lines else {}
        if (name := begun.get("resumed")) in cuts and (
            (begun["versions"], begun["digest"]) != cuts[name]
        ):
            yield f"{life} resumes {name} with {begun['versions']}, which had {cuts[name][0]}"


# ------------------------------------------------------------------ one life


def _alone(life: Life) -> Iterator[str]:
    yield from _how_it_ended(life)
    yield from _how_it_began(life)
    yield from _never_held_up(life)
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
    elif life.code and not _slept_through(life):
        last = life.lines[-1] if life.lines else {"kind": "nothing"}
        yield f"{life} exits {life.code}, having said {last}"
    elif life.end is None and not life.code:
        yield f"{life} exits 0 and did not come to its end"
    elif life.end is not None and life.end["ledger"][1]:
        yield f"{life} exits 0 with {life.end['ledger'][1]:g} tokens that nobody merged"


def _slept_through(life: Life) -> bool:
    """Whether it was stopped while the others ended, keeps its own weights, and says why. One that
    says `merged` is compared with the others, see `_one_end`."""
    last = life.lines[-1] if life.lines else {}
    slept = any(to - start >= SLEPT_S * 1e9 for start, to in life.paused)
    _, _, why = str(last.get("text", "")).partition(" ended kept-local (")
    honest = "the job ended at versions" in why or "are in no merged weights" in why
    return slept and last.get("name") == "NotMerged" and honest


def _how_it_began(life: Life) -> Iterator[str]:
    """Founders and joiners begin with the merged weights; who resumes has own work beside them."""
    begun = life.lines[0] if life.lines else {}
    copied = begun.get("kind") == "start" and "resumed" not in begun
    if copied and begun.get("model") != begun.get("weights"):
        yield f"{life} begins with other weights than the merged ones"


def _never_held_up(life: Life) -> Iterator[str]:
    if life.killed:
        return
    steps = [line for line in _told_steps(life) if "inside_ms" in line and not _stopped(life, line)]
    late_s = max((line["late_ms"] for line in steps), default=0.0) / 1e3
    longest = max(steps, key=lambda line: float(line["inside_ms"]), default=None)
    if longest is not None and longest["inside_ms"] / 1e3 > INSIDE_S + late_s:
        yield f"{life} was {longest['inside_ms']:.0f} ms in mend at step {longest['step']}"


def _stopped(life: Life, line: dict[str, Any]) -> bool:
    """Whether it was stopped from outside in that step."""
    begun_ns = line["at_ns"] - (line["inside_ms"] + line["late_ms"]) * 1e6 - 1e9
    return any(begun_ns <= to and line["at_ns"] >= start for start, to in life.paused)


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
        if not first["step"] or "resumed" in first:
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
