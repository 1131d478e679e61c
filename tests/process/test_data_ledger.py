"""Rows that the log gives out are trained once, whichever rack dies, and go on after a resume.

The test does not ask the ledger: it reads which rows each life of a rack trained in which step from
the scripts, and which steps were merged from the commits on a tape.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mend.consensus.records import Commit
from mend.coordination.events import RecordCommitted
from mend.trace.format import Entry
from mend.trace.reader import read_tape
from tests.process.conftest import Jobs
from tests.process.racks import Job, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "wait_timeout_s": 60,
    "shutdown_timeout_s": 60,
}  # fmt: skip


def begin(job: Job, rack: int, name: str = "", **options: Any) -> Any:
    who = name or f"rack{rack}"
    lines = str(job.folder / f"{who}-rank{{rank}}.rows")
    return job.start(rack, script="tests.process.rows", name=name, lines=lines, **options)


def trained(job: Job, name: str, rank: int = 0) -> dict[int, list[int]]:
    """The rows of each step."""
    text = (job.folder / f"{name}-rank{rank}.rows").read_text()
    return dict(map(json.loads, text.splitlines()))


def records(job: Job, rack: int) -> list[Any]:
    """The records that a rank has read."""
    tape = read_tape(job.events_folder / f"tape-rack{rack}-rank0.mend")
    entries = [entry for entry in tape.entries() if isinstance(entry, Entry)]
    effects = [effect for entry in entries for effect in entry.effects]
    return [effect.record for effect in effects if isinstance(effect, RecordCommitted)]


def merged_steps(found: list[Any], fragments: int = 2) -> dict[Any, int]:
    """Member -> the step up to which its work is in every fragment."""
    steps: dict[Any, dict[int, int]] = {}
    for commit in found:
        for share in commit.members if isinstance(commit, Commit) else ():
            steps.setdefault(share.member, {})[commit.fragment] = share.capture_step
    return {m: min(each.get(p, 0) for p in range(fragments)) for m, each in steps.items()}


def rows_of_merged_work(job: Job, found: list[Any], lives: dict[int, list[str]]) -> Counter[int]:
    """The rows of all steps that are merged. `found`: records; `lives`: by rack, the names of the
    processes, in their order."""
    steps, counted = merged_steps(found), Counter[int]()
    for rack, names in lives.items():
        members = [m for m in steps if m.rack == rack]  # in the order of their first commits
        assert 0 < len(members) <= len(names)  # the last life may have come too late for a merge
        for member, name in zip(members, names, strict=False):
            for step, rows in trained(job, name).items():
                counted.update(rows if step <= steps[member] else [])
    return counted


def started(job: Job, name: str, step: int) -> None:
    """Wait until a rack has made this step."""
    path = job.folder / f"{name}-rank0.rows"

    def there() -> bool:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return any(json.loads(line)[0] >= step for line in lines)

    until(there, lambda: f"{name} makes step {step}\n{job.stacks()}")


def both_merged(job: Job) -> bool:
    """Whether rack 0 has read merges of each rack's work in each fragment."""
    merges = job.events(0, kind="commit")
    found = {(each["fragment"], share["rack"]) for each in merges for share in each["members"]}
    return found >= {(fragment, rack) for fragment in (0, 1) for rack in (0, 1)}


@pytest.mark.parametrize("returns", [True, False], ids=["returns", "stays away"])
def test_each_row_is_merged_once_though_a_rack_is_killed(jobs: Jobs, returns: bool) -> None:
    """One that stays away loses its seat; until then the other one waits at the end of its data."""
    job, epochs = jobs(), 3 if returns else 1
    total = 600 // epochs
    config = CONFIG | ({} if returns else {"seat_timeout_s": 3})
    options: dict[str, Any] = {"rows": total, "epochs": epochs, "config": config, "pace_ms": 2}
    begin(job, 0, **options)
    begin(job, 1, **options, holds={"21": job.gate()})
    started(job, "rack1", 21)
    until(lambda: both_merged(job), lambda: f"work of both is merged\n{job.stacks()}")
    job.kill(1)
    if returns:
        again = begin(job, 1, name="again", **options)
        until(lambda: again.code is not None, lambda: f"it ends\n{job.stacks()}")
        assert again.code == 0, job.logs()
    job.ended(0, code=0)
    data = job.told(0)["status"]["data"]
    assert (data["done"], data["open"], data["left"]) == (total * epochs, 0, 0)
    assert data["done_by_epoch"] == [total] * epochs
    assert data["given_again"] > 0
    lives = {0: ["rack0"], 1: ["rack1", "again"] if returns else ["rack1"]}
    rows = rows_of_merged_work(job, records(job, 0), lives)
    assert rows == Counter(dict.fromkeys(range(total), epochs)), "each row, once per epoch"


@pytest.mark.parametrize("optimizers", ["found", "two"])
def test_rows_of_a_step_that_is_counted_late_are_those_of_this_step(
    jobs: Jobs, optimizers: str
) -> None:
    """The first step of an optimizer that mend finds is counted at the second, which then lacked
    its rows; what the first of two optimizers did last is counted at the end, which failed."""
    job = jobs()
    for rack in range(2):
        begin(job, rack, rows=64, config=CONFIG, optimizers=optimizers)
    job.finish()
    for rack in range(2):
        status = job.told(rack)["status"]
        assert (status["outcome"], status["data"]["done"]) == ("merged", 64)


def test_coordinator_that_fails_at_its_end_leaves_at_once(jobs: Jobs) -> None:
    """Its only step is counted in mend_shutdown, where its rows lack. It stayed for
    shutdown_timeout_s without a word, and the others waited for it."""
    job = jobs(racks=3)
    config = CONFIG | {"shutdown_timeout_s": 600, "seat_timeout_s": 3}
    begin(job, 0, rows=96, config=config, optimizers="found", uncounted=True, stop=0)
    for rack in (1, 2):
        begin(job, rack, rows=96, config=config)
    job.ended(0, code=1)
    assert "without runtime.count_rows" in job.told(0)["error"][1]
    for rack in (1, 2):
        job.ended(rack, code=0)
        status = job.told(rack)["status"]
        assert (status["outcome"], status["data"]["done"]) == ("merged", 96)


def test_rows_that_no_rack_trained_on_are_named_at_the_end(jobs: Jobs) -> None:
    """The loaders drop a batch that is not full, and nobody has a full one left."""
    job, config = jobs(), CONFIG | {"lockstep": True}
    for rack in range(2):
        begin(job, rack, rows=37, batch=5, drop_last=True, config=config)
    job.finish()
    status = job.told(0)["status"]
    left = status["data"]["left"]
    assert (status["outcome"], status["data"]["done"]) == ("merged", 37 - left)
    said = job.event(0, "rows-left")
    assert 0 < left < 10
    assert (said["left"], said["rows"]) == (left, 37)


def test_rows_of_a_rack_that_is_lost_at_the_end_count_as_lacking(jobs: Jobs) -> None:
    """It trained on rows that nobody merged."""
    job, config = jobs(), CONFIG | {"shutdown_timeout_s": 6}
    begin(job, 0, rows=400, config=config, pace_ms=2, stop=30)
    begin(job, 1, rows=400, config=config, pace_ms=2, holds={"21": job.gate()})
    started(job, "rack1", 21)
    until(lambda: both_merged(job), lambda: f"work of both is merged\n{job.stacks()}")
    job.kill(1)
    job.ended(0, code=0)
    status, trains = job.told(0)["status"], [trained(job, f"rack{rack}") for rack in range(2)]
    left, untouched = status["data"]["left"], 400 - sum(len(r) for t in trains for r in t.values())
    assert (status["outcome"], left > untouched > 0) == ("merged", True)
    assert f"the merged weights lack {left} rows of the data ledger, of 400" in job.logs()


@pytest.mark.parametrize("racks", [2, 3])
def test_rack_that_leaves_early_merges_its_work_while_others_wait_for_its_rows(
    jobs: Jobs, racks: int
) -> None:
    """A merge needs the offers of all. It waited until shutdown_timeout_s for offers of racks that
    waited for its rows, and kept its weights."""
    job, total = jobs(racks=racks), 40 * racks
    options: dict[str, Any] = {"rows": total, "config": CONFIG | {"merge_min_racks": racks}}
    gate = job.gate()
    begin(job, 0, **options, holds={"4": gate}, stop=5)
    for rack in range(1, racks):
        begin(job, rack, **options)
    for rack in range(1, racks):
        job.event(rack, "rows-awaited")
    Path(gate).touch()
    job.finish()
    for rack in range(racks):
        status = job.told(rack)["status"]
        assert (status["outcome"], status["ledger"]["open"]) == ("merged", 0)
        assert (status["data"]["done"], status["data"]["left"]) == (total, 0)
        assert job.event(rack, "ended")["outcome"] == "merged"
    lives = {rack: [f"rack{rack}"] for rack in range(racks)}
    rows = rows_of_merged_work(job, records(job, racks - 1), lives)
    assert rows == Counter(range(total))


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_lockstep_each_run_gives_each_rack_the_same_rows(jobs: Jobs, ranks: int) -> None:
    """Of 2 ranks each has its own rows. Batches that are not full are left to the next epoch."""
    config, total, epochs = CONFIG | {"lockstep": True}, 100, 2
    options: dict[str, Any] = {
        "rows": total, "epochs": epochs, "batch": 10, "drop_last": True, "config": config,
    }  # fmt: skip
    runs = []
    for slow in range(2):
        job = jobs(ranks=ranks)
        for rack in range(2):
            begin(job, rack, **options, pace_ms=2.0 * (rack == slow))
        job.finish()
        each = [trained(job, f"rack{rack}", rank) for rack in range(2) for rank in range(ranks)]
        rows = Counter(row for steps in each for taken in steps.values() for row in taken)
        assert rows == Counter(dict.fromkeys(range(total), epochs))
        data = job.told(1)["status"]["data"]
        assert (data["done"], data["given_again"]) == (total * epochs, 0)
        runs.append(each)
    assert runs[0] == runs[1]


def test_in_lockstep_a_rack_that_reads_no_row_is_named_and_not_waited_for_forever(
    jobs: Jobs,
) -> None:
    """It is alive, and heard."""
    job, config = jobs(), CONFIG | {"lockstep": True, "wait_timeout_s": 8}
    begin(job, 0, rows=64, config=config)
    begin(job, 1, rows=64, config=config, holds={"0": job.gate()})
    job.ended(0, code=1)
    kind, text = job.told(0)["error"]
    why = "waiting for rack 1 to read the ledger"
    assert (kind, why in text, "wait_timeout_s=8 s in lockstep" in text) == ("GaveUp", True, True)
    assert why in job.event(0, "rows-awaited")["why"]
    job.kill(1)


def test_wait_for_the_last_rows_of_a_rack_names_it(jobs: Jobs) -> None:
    """Without lockstep. Both go on when it does."""
    job = jobs()
    gate = job.gate()
    begin(job, 0, rows=64, config=CONFIG)
    begin(job, 1, rows=64, config=CONFIG, holds={"2": gate})
    why = str(job.event(0, "rows-awaited")["why"])
    assert "waiting for rack 1 to take the last rows" in why
    Path(gate).touch()
    job.finish()
    data = job.told(0)["status"]["data"]
    assert (data["done"], data["open"], data["left"]) == (64, 0, 0)


def test_resumed_job_trains_the_rows_that_are_left(jobs: Jobs, tmp_path: Path) -> None:
    """What was trained and not merged at the checkpoint is in the weights that it holds."""
    config, total, cuts = CONFIG | {"lockstep": True}, 240, tmp_path / "cuts"
    options: dict[str, Any] = {"rows": total, "config": config}
    cut = jobs()
    for rack in range(2):
        begin(cut, rack, **options, cut=13, cuts=str(cuts))
    cut.finish()
    assert cut.told(0)["cut"]["open"] > 0
    job = jobs()
    for rack in range(2):
        begin(job, rack, **options, resume=str(cuts))
    job.finish()
    before = [trained(cut, f"rack{rack}") for rack in range(2)]
    behind = [trained(job, f"rack{rack}") for rack in range(2)]
    rows = Counter(r for steps in (*before, *behind) for taken in steps.values() for r in taken)
    assert rows == Counter(range(total))
    assert min(behind[0]) == 14
    data = job.told(0)["status"]["data"]
    assert (data["done"], data["open"], data["left"], data["given_again"]) == (total, 0, 0, 0)


def test_misuse_of_the_ledger_is_refused_by_name(jobs: Jobs) -> None:
    other, uncounted = jobs(), jobs()
    for rack in range(2):
        begin(other, rack, rows=64, config=CONFIG, seed=rack)
        begin(uncounted, rack, rows=64, config=CONFIG, uncounted=True)
    other.ended(1, code=1)
    kind, text = other.told(1)["error"]
    assert (kind, "data ledger is 64 rows in the order" in text) == ("PlanMismatch", True)
    for rack in range(2):
        uncounted.ended(rack, code=1)
    kind, text = uncounted.told(0)["error"]
    assert (kind, "runtime.count_rows" in text) == ("UsageError", True)


def test_ranks_of_a_rack_that_take_unequal_rows_are_refused(jobs: Jobs) -> None:
    """The other rack trains all rows, also those that the refused one had."""
    job, total = jobs(ranks=2), 200
    for rack in range(2):
        options = {"seat_timeout_s": 3} | CONFIG
        begin(job, rack, rows=total, config=options, unequal=rack == 1)
    job.ended(1, code=1)
    # The rank that hears of it last may find that the other one has left a collective.
    errors = job.errors(1)
    assert any(k == "UsageError" and "its ranks have taken" in text for k, text in errors), errors
    job.ended(0, code=0)
    data = job.told(0)["status"]["data"]
    assert (data["done"], data["open"], data["left"]) == (total, 0, 0)
