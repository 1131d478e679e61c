"""benchmarks.kill: a rack is killed; when do the others merge again? Prints one JSON object.

    python -m benchmarks.kill --repeats 5

Racks on loopback that train by sleeping `step-ms` per step, a merge every `gap` steps; the last of
them is ended with SIGKILL, in every repeat at another moment between two merges. Three cases take
turns:

two          two racks and a witness, all settings as they are by default
two-evicting the same with evict_s 2: a silent rack loses its seat as soon as it is held for dead
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

from benchmarks._common import RackArgs, Racks, arguments, limit, report, spread
from benchmarks._work import Job, Seen, work
from mend.engine.witness import detect_ns
from mend.types import SECOND

HEARTBEAT_MS = 100
DETECT_S = detect_ns(HEARTBEAT_MS) / SECOND
GOAL_S = DETECT_S + 1.0
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "two": (2, True, {}),
    "two-evicting": (2, True, {"evict_s": 2.0}),
    "three": (3, False, {}),
}
"""name -> (racks, with a witness, settings)."""
MERGES_BEFORE = 4


def main() -> None:
    options = _options()
    cases = options.cases.split(",")
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for case in cases:
            found[case].append(_killed(options, case, (repeat + 0.5) / options.repeats))
    first = found[cases[0]]
    report(
        "kill",
        goal=f"merging again within {GOAL_S:g} s, 1 s behind the time-out, as set by default",
        values=[one["merged_s"] for one in first],
        passed=all(one["merged_s"] <= GOAL_S and one["merged"] for one in first),
        options=options,
        unit="s",
        beside=limit("time-out behind which a rack is held for dead", "s", [DETECT_S]),
        more={"cases": {case: _told(ones) for case, ones in found.items()}},
    )


def _options() -> argparse.Namespace:
    parser = arguments("kill", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of every case (default 5)")
    parser.add_argument("--cases", default=",".join(CASES), help="(default: all of them)")
    parser.add_argument("--numel", type=int, default=1 << 16, help="fp32 elements (default 65536)")
    parser.add_argument("--fragments", type=int, default=2, help="P (default 2)")
    parser.add_argument("--gap", type=int, default=8, help="steps between merges (default 8)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of training (default 25)")
    parser.add_argument(
        "--wait-s", type=float, default=10.0, help="for a merge behind the kill (default 10)"
    )
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"--cases: {sorted(unknown)[0]!r} is none of {', '.join(CASES)}")
    return options


def _told(ones: list[dict[str, Any]]) -> dict[str, object]:
    return {
        "merged_s": spread([one["merged_s"] for one in ones]),
        "never_merged": sum(not one["merged"] for one in ones),
        "stall_ms": spread([one["stall_ms"] for one in ones], 1),
        "usual_gap_s": spread([one["usual_s"] for one in ones]),
    }


def _killed(options: argparse.Namespace, case: str, phase: float) -> dict[str, Any]:
    """One kill, `phase` (0 to 1) of the way from one merge to the next."""
    count, witnessed, settings = CASES[case]
    one = argparse.Namespace(**{**vars(options), "settings": settings})
    job = Job(Racks(_rack, one, count, witnessed))
    try:
        for rack in range(count):
            job.start(rack)
        job.must(lambda seen: seen.rack == 0 and seen.commits >= MERGES_BEFORE, "merges are made")
        job.until(lambda _: False, phase * options.gap * options.step_ms / 1e3)
        dead = count - 1
        killed_s = job.kill(dead)
        job.until(lambda seen: merged_without(seen, dead, killed_s), options.wait_s)
        job.end()
    finally:
        job.racks.close()
    return outcome(job.seen, dead, killed_s, options.wait_s)


def _rack(args: RackArgs) -> None:
    gap = args.options.gap
    period = gap * args.options.fragments
    settings = {"sync_period_steps": period, "overlap_steps": gap // 2, **args.options.settings}
    work(args, args.options.step_ms, **settings)


def merged_without(seen: Seen, dead: int, killed_s: float) -> bool:
    """Whether this is a merge behind the kill that the dead rack has no part in."""
    return seen.at_s > killed_s and bool(seen.merged) and dead not in seen.merged


def outcome(seen: list[Seen], dead: int, killed_s: float, wait_s: float) -> dict[str, Any]:
    """What one kill came to, from what the racks saw."""
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
