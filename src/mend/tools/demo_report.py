"""Compares the runs of the demo by the result and event files that their ranks wrote."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mend.errors import MendError
from mend.events.kinds import RoundCommitted
from mend.events.lines import decode_line

ALONE, BLOCKING, OVERLAPPED, FREE = "alone", "blocking", "overlapped", "free"
RUNS = (ALONE, BLOCKING, OVERLAPPED, FREE)
MERGED = RUNS[1:]

Ranks = dict[tuple[int, int], dict[str, Any]]
"""(rack, rank) -> its result file."""
Commits = dict[tuple[int, int], tuple[Any, ...]]
"""(fragment, version) -> (members, digests), without what may differ between two runs."""


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, whether the files bear it out, and the figures."""

    claim: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Row:
    """One run in the table. Waiting is of the training thread, bytes are of all ranks."""

    run: str
    tokens_per_s: float
    wall_s: float
    stall_ms_per_round: float
    stall_share: float
    """Part of the training time in which the training thread waited."""
    rounds: int
    held_out: float
    """Merged model; for `alone` the mean over the racks."""
    own: dict[int, float]
    """Held-out loss of each rack, for `alone`."""
    bytes_sent: int
    digests: dict[int, str]
    tokens_merged_share: float


def load_results(folder: Path) -> Ranks:
    """Read all result files of a run. Raises FileNotFoundError when there is none."""
    results = {}
    for path in sorted(folder.glob("result-rack*-rank*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        results[(result["rack"], result["rank"])] = result
    if not results:
        raise FileNotFoundError(f"no result in {folder}; see its log for the reason")
    return results


def load_commits(path: Path) -> Commits:
    """The decided rounds in an event file: who was merged with which tokens, to which digests.

    Incarnations, times and reasons are left out: they tell runs apart, not models. Sorted by
    (fragment, version): rounds of two fragments may be decided in either order, and touch
    different parameters.
    """
    commits: Commits = {}
    for line in path.read_bytes().splitlines():
        event = decode_line(line).event
        if not isinstance(event, RoundCommitted):
            continue
        members = tuple((m.rack, m.seq, m.base, m.tokens, m.steps) for m in event.members)
        round_ = (event.fragment, event.version)
        if round_ in commits:
            raise MendError(f"{path} decides round {round_} twice: delete the folder, run it again")
        commits[round_] = (members, event.digests)
    return dict(sorted(commits.items()))


def row(run: str, ranks: Ranks) -> Row:
    """The figures of one run."""
    leaders = {rack: result for (rack, rank), result in ranks.items() if rank == 0}
    merged = run != ALONE
    statuses = [result["status"] for result in ranks.values()] if merged else []
    rounds = max((status["rounds_committed"] for status in statuses), default=0)
    in_loop = max(1, leaders[0]["rounds_in_loop"]) if merged else 1
    wall_s = max(result["wall_s"] for result in ranks.values())
    stall_ms = max(sum(result["stall_ms"]) for result in ranks.values())
    losses = [result["merged_loss" if merged else "own_loss"] for result in leaders.values()]
    shares = [status["tokens_merged_share"] for status in statuses]
    return Row(
        run=run,
        tokens_per_s=sum(result["tokens"] / result["wall_s"] for result in ranks.values()),
        wall_s=wall_s,
        stall_ms_per_round=stall_ms / in_loop,
        stall_share=stall_ms / 1000 / wall_s,
        rounds=rounds,
        held_out=statistics.fmean(losses),
        own={} if merged else {rack: one["own_loss"] for rack, one in sorted(leaders.items())},
        bytes_sent=sum(status["bytes_sent"] for status in statuses),
        digests={rack: result["digest"] for rack, result in sorted(leaders.items())}
        if merged
        else {},
        tokens_merged_share=min(shares, default=0.0),
    )


# ------------------------------------------------------------------ the answers


def same_commits(blocking: dict[int, Commits], overlapped: dict[int, Commits]) -> Check:
    """Both runs merged the same work in the same rounds to the same bits, as each rack saw it."""
    claim = "blocking and overlapped decide the same rounds, with the same digests"
    if not blocking or blocking.keys() != overlapped.keys():
        return Check(
            claim, False, f"event files of racks {sorted(blocking)} and {sorted(overlapped)}"
        )
    for rack in sorted(blocking):
        one, other = blocking[rack], overlapped[rack]
        if not one:
            return Check(claim, False, f"rack {rack} recorded no commit")
        for round_ in sorted(one.keys() | other.keys()):
            if one.get(round_) != other.get(round_):
                fragment, version = round_
                return Check(
                    claim, False, f"rack {rack}: fragment {fragment} version {version} differs"
                )
    return Check(
        claim,
        True,
        f"{len(blocking[min(blocking)])} rounds, seen alike by racks {sorted(blocking)}",
    )


def same_losses(blocking: Ranks, overlapped: Ranks) -> Check:
    """Every rank saw the same loss at every step, to the last bit."""
    claim = "blocking and overlapped have bit-equal losses at every step"
    if blocking.keys() != overlapped.keys():
        return Check(claim, False, f"results of {sorted(blocking)} and {sorted(overlapped)}")
    for rack, rank in sorted(blocking):
        one, other = blocking[rack, rank]["losses"], overlapped[rack, rank]["losses"]
        if len(one) != len(other) or not one:
            return Check(
                claim, False, f"rack {rack} rank {rank}: {len(one)} and {len(other)} steps"
            )
        for step, (a, b) in enumerate(zip(one, other, strict=True), start=1):
            if a != b:
                return Check(claim, False, f"rack {rack} rank {rank} step {step}: {a} and {b}")
    steps = len(next(iter(blocking.values()))["losses"])
    return Check(claim, True, f"{steps} steps on {len(blocking)} ranks")


def same_model(one: Row) -> Check:
    """Check that all racks of a run end with the same merged model."""
    claim = f"{one.run}: both racks hold the same model"
    digests = set(one.digests.values())
    passed = len(digests) == 1 and len(one.digests) > 1 and "" not in digests
    return Check(
        claim,
        passed,
        ", ".join(f"rack {rack} {digest[:12]}" for rack, digest in one.digests.items()),
    )


def better_than_alone(one: Row, alone: Row) -> Check:
    """Merged against the mean rack alone, at equal steps per rack; the better one is named, too."""
    claim = f"{one.run}: the merged model beats one rack alone"
    mean, best = statistics.fmean(alone.own.values()), min(alone.own.values())
    detail = f"{one.held_out:.4f} against {mean:.4f}, the mean of the racks alone; best {best:.4f}"
    return Check(claim, one.held_out < mean, detail)


def compare(folder: Path, *, judge_losses: bool) -> tuple[list[Row], list[Check]]:
    """Rows and answers for the runs in `folder`/alone, /blocking, /overlapped and /free."""
    results = {run: load_results(folder / run) for run in RUNS}
    rows = {run: row(run, results[run]) for run in RUNS}
    checks = [
        same_commits(_commits(folder / BLOCKING), _commits(folder / OVERLAPPED)),
        same_losses(results[BLOCKING], results[OVERLAPPED]),
        *(same_model(rows[run]) for run in MERGED),
    ]
    if judge_losses:
        checks += [better_than_alone(rows[run], rows[ALONE]) for run in MERGED]
    return list(rows.values()), checks


def _commits(folder: Path) -> dict[int, Commits]:
    paths = sorted((folder / "events").glob("events-rack*-rank0.jsonl"))
    found = {path.name.removeprefix("events-rack").split("-")[0]: path for path in paths}
    return {int(rack): load_commits(path) for rack, path in found.items() if int(rack) != 0xFFFF}


def summary(settings: dict[str, Any], rows: list[Row], checks: list[Check]) -> dict[str, Any]:
    """Return the content of summary.json."""
    return {
        "settings": settings,
        "runs": [asdict(one) for one in rows],
        "checks": [asdict(check) for check in checks],
        "passed": all(check.passed for check in checks),
    }
