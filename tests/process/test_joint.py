"""A job's merged weights do not depend on how its racks are cut: level shape inside of the racks,
lockstep between them. Nor do they where a rack is killed: a job in lockstep goes on from a
checkpoint, one without lockstep has the rack join again.

Digests are sha256 of merged weights. On GPUs: see tests/process/test_joint_on_gpus.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, until

STEPS = 9
CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 2, "sync_period_steps": 4, "overlap_steps": 1,
    "wait_timeout_s": 90,
}  # fmt: skip
"""Fragment 0 is captured after steps 2, 6, 10, fragment 1 after 4, 8, 12; applied a step later."""

TOGETHER: dict[str, Any] = {
    "lockstep": False, "grace_window_ms": 90_000.0, "stall_max_s": 90.0, "shutdown_timeout_s": 90,
}  # fmt: skip
"""Without lockstep: racks that meet at every step are in every round that begins with both."""

HELD, ALONE, END = 6, (6, 7), 11
"""Rack 1 is killed before step 6, rack 0 makes two steps alone, and rack 1 goes on with step 8."""

Racks = list[dict[str, Any]]
Traces = dict[str, list[Any]]
"""What no cut may change, by its name, of each rack."""

CUTS: dict[str, tuple[int, Racks]] = {
    "microbatches 4 and 1": (1, [{"microbatches": 4}, {}]),
    "TP 2, microbatches 1 and 4": (2, [{"cut": "tp"}, {"cut": "tp", "microbatches": 4}]),
    "DP 2, microbatches 2 and 1": (2, [{"cut": "dp", "microbatches": 2}, {"cut": "dp"}]),
}
"""Ranks, and how each of two racks is cut over them: layers of all racks alike, as mend asks."""


def uncut(racks: Racks) -> Racks:
    return [{**each, "microbatches": 1} for each in racks]


class Joint:
    """Jobs of this training. `more`: options of all racks."""

    def __init__(
        self, jobs: Jobs, codec: str, env: dict[str, str] | None = None, **more: Any
    ) -> None:
        self.jobs, self.env = jobs, env or {}
        self.config = {**CONFIG, "codec": codec, **more.pop("config", {})}
        self.more = {"steps": STEPS, **more}

    def start(self, job: Job, rack: int, **own: Any) -> Any:
        config = {**self.config, **own.pop("config", {})}
        options = {**self.more, "config": config, **own}
        return job.start(rack, script="tests.process.jointly", env=self.env, **options)

    def train(self, ranks: int, racks: Racks, sizes: tuple[int, ...] = ()) -> tuple[Job, Traces]:
        job = self.jobs(ranks=ranks, sizes=sizes)
        for rack, own in enumerate(racks):
            self.start(job, rack, **own)
        job.finish()
        return job, self.traces(job)

    def restart(self, ranks: int, racks: Racks, folder: Path) -> tuple[Job, Traces]:
        """In lockstep: rack 1 is killed behind a checkpoint of step 4, with an open offer of
        fragment 1, and all are started again."""
        job = self.jobs(ranks=ranks)
        for rack, own in enumerate(racks):
            held = {"stays": HELD if rack else 0, "meets": str(job.folder)}
            self.start(job, rack, checkpoints={"4": str(folder)}, **held, **own)
        await_held(job)
        job.kill(1, 0)
        for rack, own in enumerate(racks):
            self.start(job, rack, resume=str(folder), **own)
        job.finish()
        assert [job.told(rack)["begun"] for rack in (0, 1)] == [4, 4]
        return job, self.traces(job)

    def rejoin(self, ranks: int, racks: Racks) -> tuple[Job, Traces]:
        """Without lockstep: rack 1 is killed and joins again."""
        job = self.jobs(ranks=ranks)
        options = {"config": TOGETHER, "meets": str(job.folder), "alone": ALONE, "steps": END}
        for rack, own in enumerate(racks):
            self.start(job, rack, stays=HELD if rack else 0, **options, **own)
        await_held(job)
        job.kill(1)
        self.start(job, 1, **options, **racks[1])
        job.finish()
        assert job.told(1)["begun"] == ALONE[1], "it goes on behind the donor's newest step"
        assert [copied["step"] for copied in job.events(1, kind="state-copied")] == [ALONE[1]]
        traces = self.traces(job)
        one, other = (job.told(rack)["handed on"] for rack in (0, 1))
        assert one == other, f"rack 1 goes on with another state: {one}, {other}\n{tails(job)}"
        alone = [merge for merge in traces["merges"] if len(merge) == 3]
        assert [merge[:2] for merge in alone] == [(0, 2)], traces["merges"]
        return job, traces

    def traces(self, job: Job) -> Traces:
        """Of rank 0 of each rack; all ranks hold the same bits."""
        told = [[job.told(rack, rank) for rank in range(job.sizes[rack])] for rack in (0, 1)]
        for ranks in told:
            assert len({each["status"]["anchor_digest"] for each in ranks}) == 1
        one, other = (ranks[0] for ranks in told)
        assert one["merged"] == other["merged"], f"{one['merged']}, {other['merged']}\n{tails(job)}"
        assert one["losses"] != other["losses"], "each rack has data of its own"
        merges = {
            (each["fragment"], each["version"], *map(share, each["members"]))
            for each in job.result(0).commits  # a rack that was started again writes some again
        }
        assert len(merges) > 3
        return {
            "merges": sorted(merges),
            "merged weights": [one["merged"], other["merged"]],
            "weights, optimizer, steps": [one["trainer"], other["trainer"]],
            "losses": [one["losses"], other["losses"]],
        }


def share(member: dict[str, Any]) -> tuple[int, int, int]:
    """What of a rack is in a merge."""
    return member["rack"], member["capture_step"], member["steps"]


def await_held(job: Job) -> None:
    """Rack 1 makes no further step."""
    held = [job.folder / f"held-1-{rank}" for rank in range(job.ranks)]
    until(
        lambda: all(each.exists() for each in held) or job.processes[0].code is not None,
        lambda: f"rack 1 is held\n{job.stacks()}",
    )
    assert all(each.exists() for each in held), job.logs()


def tails(*jobs: Job) -> str:
    return "\n".join(f"=== {job.folder.name}\n{job.logs(2000)}" for job in jobs)


def all_same(made: Callable[[int, Racks], tuple[Job, Traces]]) -> None:
    """`made`: a method of Joint."""
    first, *rest = CUTS.items()
    expected = made(*first[1])
    for name, cut in rest:
        same(name, expected, made(*cut))


def same(name: str, one: tuple[Job, Traces], other: tuple[Job, Traces]) -> None:
    """`name`: the cut of `other`."""
    print(f"{name}: {other[1]['merged weights']}")
    for what, expected in one[1].items():
        found = other[1][what]
        assert found == expected, (
            f"{name}: other {what}\nexpected {expected}\nfound    {found}\n"
            f"expected digests {one[1]['merged weights']}\n"
            f"found digests    {other[1]['merged weights']}\n{tails(one[0], other[0])}"
        )


@pytest.mark.timeout(600)
def test_racks_end_with_equal_bits_however_they_are_cut(jobs: Jobs) -> None:
    joint = Joint(jobs, "float32")
    expected = joint.train(1, [{}, {}])
    for name, (ranks, racks) in CUTS.items():
        same(name, expected, joint.train(ranks, racks))


@pytest.mark.timeout(600)
def test_rack_that_is_killed_and_joins_leaves_equal_bits_however_racks_are_cut(jobs: Jobs) -> None:
    all_same(Joint(jobs, "float32").rejoin)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cut", ["TP 2, microbatches 1 and 4"])
def test_killed_lockstep_job_goes_on_to_the_bits_of_one_that_was_not(
    jobs: Jobs, tmp_path: Path, cut: str
) -> None:
    joint = Joint(jobs, "float32")
    job, whole = joint.train(1, [{}, {}])
    whole["losses"] = [losses[4:] for losses in whole["losses"]]
    again = joint.restart(*CUTS[cut], tmp_path / "cut")
    same(cut, (job, whole), again)


@pytest.mark.timeout(600)
def test_racks_of_one_and_two_ranks_end_with_the_bits_of_racks_of_one(jobs: Jobs) -> None:
    joint = Joint(jobs, "float32", config={"token_weighted_merge": False})
    expected = joint.train(1, [{}, {}])
    found = joint.train(1, [{}, {"cut": "dp", "microbatches": 2}], sizes=(1, 2))
    same("one and two ranks", expected, found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("story", ["train", "rejoin"])
def test_with_int4_microbatches_change_no_bits(jobs: Jobs, story: str) -> None:
    """Each rank rounds in blocks of its own part, so the number of ranks does change them."""
    made = getattr(Joint(jobs, "int4"), story)
    for name, (ranks, racks) in CUTS.items():
        same(name, made(ranks, uncut(racks)), made(ranks, racks))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("level", "equal"), [("everywhere", True), ("run", False)])
def test_racks_end_with_equal_bits_at_level_everywhere_alone(
    level: str, equal: bool, jobs: Jobs
) -> None:
    joint = Joint(jobs, "float32", level=level)
    _, whole = joint.train(1, [{}, {}])
    _, cut = joint.train(1, [{"microbatches": 4}, {}])
    assert (cut == whole) is equal
