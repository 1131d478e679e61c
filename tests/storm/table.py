"""What storms have measured, as a page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mend.types import VERSION
from tests.storm.judge import Life, Waited, waits
from tests.storm.storm import CONFIG, Storm


@dataclass
class Tally:
    """Of all seeds of a run."""

    seeds: int = 0
    found: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    waited: list[Waited] = field(default_factory=list)
    calm_ms: list[float] = field(default_factory=list)
    """In mend, per step of racks that nobody killed."""
    cuts_ms: list[float] = field(default_factory=list)
    """Of the rack that came last to a checkpoint: what waits for no other rack."""
    unequal: int = 0
    lost: float = 0.0
    died: float = 0.0

    def take(self, storm: Storm, found: list[str]) -> None:
        self.seeds += 1
        self.found += found
        self.unequal += sum(" has another " in sentence for sentence in found)
        self.shapes[storm.shown] += 1
        self.faults.update(fault.kind for fault in storm.done)
        self.waited += waits(storm.judged, storm.deaths)
        firsts = [life for life in storm.judged if life.rank == 0]
        for life in firsts:
            last = next((line for line in reversed(life.lines) if "ledger" in line), None)
            if last is not None:
                open_ = last["tokens"] - last["ledger"][0]
                self.died += open_ if life.killed else 0.0
                self.lost += 0.0 if life.killed else open_
            if not life.killed and not life.paused:
                self.calm_ms += [line["inside_ms"] for line in life.lines if "inside_ms" in line]
        self.cuts_ms += _last_comers(firsts)

    def page(self, command: str) -> str:
        return "\n".join(self._lines(command)) + "\n"

    def _lines(self, command: str) -> Iterator[str]:
        yield "# Storms"
        yield ""
        faults = sum(self.faults.values())
        yield f"`{command}`, mend {VERSION}: {self.seeds} seeds, {faults} faults,"
        yield f"{len(self.found)} findings. Read from the diaries of the training scripts alone."
        yield ""
        yield "| what | measured | goal |"
        yield "|---|---|---|"
        yield f"| tokens lost by racks that ended by themselves | {self.lost:g} | 0 |"
        yield f"| tokens that died with their process, unmerged | {self.died:g} | |"
        yield f"| equal versions with unequal bits | {self.unequal} | 0 |"
        yield from _row("in mend, per step", [ms / 1e3 for ms in self.calm_ms], "")
        yield from _row(
            "in a checkpoint, the rack that comes last", [c / 1e3 for c in self.cuts_ms]
        )
        yield ""
        yield "Behind a death, in s: the next commit after the time-out of 2 s; the longest that a"
        yield "training thread was in mend within one step; the longest that a sleep of 10 ms was"
        yield "late meanwhile, which is the machine's part in the other two. An outage may hold up"
        yield f"training for `stall_max_s`, once: {CONFIG['stall_max_s']} s in these jobs."
        yield ""
        yield "| death | count | next commit, median | most | in mend, median | most | late, most |"
        yield "|---|---|---|---|---|---|---|"
        for led in (False, True):
            for kind in sorted({one.death.kind for one in self.waited if one.death.led == led}):
                yield _death(kind, led, self.waited)
        yield ""
        yield "Faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(self.faults.items())) + "."
        yield ""
        yield (
            "Jobs: " + "; ".join(f"{shape} ({n})" for shape, n in sorted(self.shapes.items())) + "."
        )
        for sentence in self.found:
            yield f"- {sentence}"


def _row(what: str, values_s: Sequence[float], goal: str = "0.1 s") -> Iterator[str]:
    if values_s:
        ordered = sorted(values_s)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        told = (
            f"median {statistics.median(ordered):.4f} s, 99 % {p99:.3f} s, most {ordered[-1]:.3f} s"
        )
        yield f"| {what} | {told} | {goal} |"


def _death(kind: str, led: bool, waited: Sequence[Waited]) -> str:
    ones = [one for one in waited if one.death.kind == kind and one.death.led == led]
    commits = [one.commit_s for one in ones if one.commit_s is not None] or [float("nan")]
    inside = [one.inside_s for one in ones]
    name = f"{kind}, perhaps of who coordinated" if led else kind
    columns = [statistics.median(commits), max(commits), statistics.median(inside), max(inside)]
    columns.append(max(one.late_s for one in ones))
    return f"| {name} | {len(ones)} | " + " | ".join(f"{value:.3f}" for value in columns) + " |"


def _last_comers(firsts: Sequence[Life]) -> list[float]:
    took: dict[tuple[int, str], list[float]] = {}
    for life in firsts:
        for line in life.lines:
            if line["kind"] == "cut" and not line["error"]:
                took.setdefault((life.era, line["name"]), []).append(line["ms"])
    return [min(each) for each in took.values()]
