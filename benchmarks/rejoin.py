"""benchmarks.rejoin: what a rack notices if the other one is killed, started again and joins.
Prints one JSON object.

    python -m benchmarks.rejoin --repeats 3
    python -m benchmarks.rejoin --numel 20000000

Two racks and a witness on loopback, default settings but for a short period, training by sleeping
`step-ms` per step. Rack 1 is ended with SIGKILL; when rack 0 has noticed and its training waits for
nothing any more, rack 1 is started again. It copies the newest merged model (`numel` fp32) from
rack 0 and goes on from there.

`measured` is the median of the seconds that rack 0's training lost by it: its time inside mend from
the restart to the first merge with work of the new rack 1, less what as many steps took there while
rack 0 was alone (`usual_ms` each: capturing, applying). `inside_s` is all of it, `waited_ms` the
part that mend itself counts as waiting for others (status().stall_ms_total), `longest_ms` the
longest time inside mend in one step, `longest_usual_ms` that of before. `outage_stall_ms` is what
the death before it made rack 0 wait.
`joins_s` is from the start of the new process to that merge; of it `ready_s` is to the end of
mend_init, and of that `init_s` in mend_init, with the copy: a fork of a process that has imported
torch has made the model before. The limit is one plain copy of the model.
"""

from __future__ import annotations

import argparse

from benchmarks._common import Goal, RackArgs, copies_s, limit, read_options, report, spread
from benchmarks._work import JOB, Seen, every_gap, run_racks, work

GOAL = Goal("< 0.1 s of the survivor's training", 0.1, "s")
MERGES_BEFORE = 4
ALONE = 5
"""Merges of the survivor between the death and the return, for what is usual."""
SURVIVOR, DEAD = 0, 1
OPTIONS = {
    "repeats": (3, "of the job"),
    **JOB,
    "numel": (151_000_000, "fp32 elements: 604 MB; each rack takes some six times that"),
    "fragments": (4, "P"),
    "step_ms": (50.0, "of training"),
}


def main() -> None:
    options = read_options("rejoin", __doc__, OPTIONS)
    found = [_rejoin_one(options) for _ in range(options.repeats)]
    losses = [one["lost_s"] for one in found]
    plain = limit("one plain copy of the model", "s", copies_s(options.numel), 4)
    more = {key: spread([one[key] for one in found], 3) for key in found[0] if key != "lost_s"}
    report("rejoin", GOAL, losses, options, plain, more)


def _rejoin_one(options: argparse.Namespace) -> dict[str, float]:
    with run_racks(_rack, options, with_witness=True) as job:
        job.must(lambda seen: seen.commits >= MERGES_BEFORE, "merges are made")
        killed_s = job.kill(DEAD)
        job.must(lambda seen: DEAD not in seen.live, "rack 0 notices")
        heard = max(seen.commits for seen in job.seen)
        job.must(lambda seen: seen.commits >= heard + ALONE, "rack 0 merges alone")
        commits = max(seen.commits for seen in job.seen)
        restarted_s = job.start(DEAD)
        job.must(lambda seen: has_joined(seen, commits), "rack 0 merges with the new rack 1")
        job.end()
    return outcome(job.seen, killed_s, restarted_s)


def _rack(args: RackArgs) -> None:
    work(args, args.options.step_ms, **every_gap(args.options))


def has_joined(seen: Seen, commits: int) -> bool:
    """Return whether the survivor saw a merge that the new rack has a part in. Its status shows the
    newest merge of the former life until then, so it must be a later one than `commits`."""
    return seen.rack == SURVIVOR and seen.commits > commits and DEAD in seen.merged


def outcome(seen: list[Seen], killed_s: float, restarted_s: float) -> dict[str, float]:
    """Figures of one return, from the observations of the racks."""
    survivor = [one for one in seen if one.rack == SURVIVOR]
    before = [one for one in survivor if one.at_s <= restarted_s]
    start = before[-1]
    killed = [one for one in before if one.at_s <= killed_s][-1]
    alone = [one for one in before if one.at_s > killed_s]
    usual_ms = (start.mend_ms - start.stall_ms - alone[0].mend_ms + alone[0].stall_ms) / max(
        1, start.step - alone[0].step
    )
    after = [one for one in survivor if one.at_s > restarted_s]
    merge = next(one for one in after if has_joined(one, start.commits))
    during = [one for one in after if one.at_s <= merge.at_s]
    joined_rack = [one for one in seen if one.rack == DEAD and one.at_s > restarted_s]
    joiner = min(joined_rack, key=lambda one: one.began_s)
    inside_ms = merge.mend_ms - start.mend_ms
    return {
        "lost_s": (inside_ms - usual_ms * (merge.step - start.step)) / 1e3,
        "inside_s": inside_ms / 1e3,
        "usual_ms": usual_ms,
        "longest_usual_ms": max((one.longest_ms for one in alone[1:]), default=0.0),
        "waited_ms": merge.stall_ms - start.stall_ms,
        "longest_ms": max(one.longest_ms for one in during),
        "joins_s": merge.at_s - restarted_s,
        "ready_s": joiner.began_s - restarted_s,
        "init_s": joiner.init_s,
        "outage_stall_ms": start.stall_ms - killed.stall_ms,
    }


if __name__ == "__main__":
    main()
