"""benchmarks.kill: how soon the others merge again if a rack is killed. Prints one JSON object.

    python -m benchmarks.kill --repeats 5

Racks on loopback that train by sleeping `step-ms` per step, a merge every `gap` steps; the last of
them is ended with SIGKILL, in every repeat at another moment between two merges. Three cases take
turns:

two          two racks and a witness, all settings as they are by default
two-evicting the same with seat_timeout_s 2: a rack loses its seat as soon as it counts as dead
three        three racks without a witness, default settings

`measured` is the median, over the repeats of the first case named, of the seconds from the kill to
the survivors' first merge without the dead rack. Its limit is the time-out: nobody can know before
it that a silent rack is dead and not slow. When no such merge comes within `wait-s`, that is the
figure, and `never_merged` counts how often; the true one is larger. `stall_ms` is what all training
of a survivor waited from the kill on, `usual_gap_s` the time between merges before it.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from typing import Any

from benchmarks._common import Goal, RackArgs, limit, read_options, report, spread, with_options
from benchmarks._work import JOB, Seen, every_gap, run_racks, work
from mend.engine.witness import detect_ns
from mend.types import SECOND

HEARTBEAT_MS = 100
DETECT_S = detect_ns(HEARTBEAT_MS) / SECOND
GOAL_S = DETECT_S + 1.0
GOAL_TEXT = f"merging again within {GOAL_S:g} s, 1 s after the time-out, as set by default"
GOAL = Goal(GOAL_TEXT, GOAL_S, "s")
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "two": (2, True, {}),
    "two-evicting": (2, True, {"seat_timeout_s": 2.0}),
    "three": (3, False, {}),
}
"""name -> (racks, with a witness, settings)."""
MERGES_BEFORE = 4
OPTIONS = {
    "repeats": (5, "of every case"),
    "cases": (CASES, "cases to run"),
    **JOB,
    "wait_s": (10.0, "for a merge after the kill"),
}


def main() -> None:
    options = read_options("kill", __doc__, OPTIONS)
    cases = options.cases.split(",")
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for case in cases:
            found[case].append(_kill_one(options, case, (repeat + 0.5) / options.repeats))
    first = found[cases[0]]
    plain = limit("time-out after which a rack counts as dead", "s", [DETECT_S])
    more = {"cases": {case: _summary(ones) for case, ones in found.items()}}
    times = [one["merged_s"] for one in first]
    every = max(times) <= GOAL_S and all(one["merged"] for one in first)
    report("kill", GOAL, times, options, plain, more, also=every)


def _summary(ones: list[dict[str, Any]]) -> dict[str, object]:
    return {
        "merged_s": spread([one["merged_s"] for one in ones]),
        "never_merged": sum(not one["merged"] for one in ones),
        "stall_ms": spread([one["stall_ms"] for one in ones], 1),
        "usual_gap_s": spread([one["usual_s"] for one in ones]),
    }


def _kill_one(options: argparse.Namespace, case: str, phase: float) -> dict[str, Any]:
    """One kill, `phase` (0 to 1) of the way from one merge to the next."""
    count, witnessed, settings = CASES[case]
    dead = count - 1
    with run_racks(_rack, with_options(options, settings=settings), count, witnessed) as job:
        job.must(lambda seen: seen.rack == 0 and seen.commits >= MERGES_BEFORE, "merges are made")
        job.run(phase * options.gap * options.step_ms / 1e3)
        killed_s = job.kill(dead)
        job.until(lambda seen: merged_without(seen, dead, killed_s), options.wait_s)
        job.end()
    return outcome(job.seen, dead, killed_s, options.wait_s)


def _rack(args: RackArgs) -> None:
    options = args.options
    work(args, options.step_ms, **every_gap(options), **options.settings)


def merged_without(seen: Seen, dead: int, killed_s: float) -> bool:
    """Return whether this is a merge after the kill that the dead rack has no part in."""
    return seen.at_s > killed_s and bool(seen.merged) and dead not in seen.merged


def outcome(seen: list[Seen], dead: int, killed_s: float, wait_s: float) -> dict[str, Any]:
    """Figures of one kill, from the observations of the racks."""
    survivors = [one for one in seen if one.rack != dead]
    first = next((one for one in survivors if merged_without(one, dead, killed_s)), None)
    before = [one for one in survivors if one.rack == 0 and one.at_s <= killed_s]
    merges = [one.at_s for was, one in pairwise(before) if one.commits > was.commits]
    stalls = [
        max(one.stall_ms for one in survivors if one.rack == rack)
        - max((one.stall_ms for one in survivors if one.rack == rack and one.at_s <= killed_s),
              default=0.0)
        for rack in {one.rack for one in survivors}
    ]  # fmt: skip
    return {
        "merged": first is not None,
        "merged_s": first.at_s - killed_s if first is not None else wait_s,
        "stall_ms": max(stalls),
        "usual_s": statistics.median(b - a for a, b in pairwise(merges)) if merges[1:] else 0.0,
    }


if __name__ == "__main__":
    main()
