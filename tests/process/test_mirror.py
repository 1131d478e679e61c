"""A rack that is killed and comes back goes on at its own place in the data, as another rack has
kept it of the newest round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, until
from tests.process.test_twin import CONFIG
from tests.process.twin import Place, digest


class Story:
    """All racks train; some are killed and started again."""

    def __init__(self, jobs: Jobs, racks: int, ranks: int = 1) -> None:
        self.job: Job = jobs(racks, ranks=ranks, witness=True)
        self.options: dict[str, Any] = {
            "script": "tests.process.twin", "stop": self.job.gate("stop"),
            "config": CONFIG | {"mirror_rack_state": True},
        }  # fmt: skip
        self.lives: dict[str, Any] = {}
        for rack in range(racks):
            self.lives[f"rack{rack}"] = self.job.start(rack, **self.options)

    def back(self, rack: int, name: str) -> None:
        self.lives[name] = self.job.start(rack, name=name, **self.options)

    def keeps_behind(self, step: int) -> None:
        """Until every rank of rack 0 keeps a later mirror of rack 1."""
        for rank in range(self.job.ranks):
            kept = partial(self.job.events, 0, rank, kind="mirror-kept")
            later = partial(_behind, kept, step)
            until(later, f"a mirror behind {step} on rank {rank}\n{self.job.logs()}")

    def end(self) -> None:
        """All that are left."""
        Path(self.job.gate("stop")).touch()
        for name, process in self.lives.items():
            until(lambda process=process: process.code is not None, f"{name} ends")
            assert process.code == 0, self.job.logs()

    def kill(self, *names: str) -> None:
        for name in names:
            self.lives.pop(name).kill()


def _behind(kept: Callable[[], list[dict[str, Any]]], step: int) -> bool:
    return any(event["step"] > step for event in kept())


def place_after(batches: int) -> str:
    found = Place()
    for _ in range(batches):
        found.read()
    return digest(found.state_dict())


def account(told: dict[str, Any]) -> str:
    """Of where the state of scope rack is from."""
    return str(told["status"]["joined_state"]).partition("; ")[2]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rack_that_returns_has_its_place_of_the_newest_merged_capture(
    jobs: Jobs, ranks: int
) -> None:
    """Each rank its own, all of one step. Behind a loaded one it counts on, and is mirrored
    again."""
    story = Story(jobs, 2, ranks)
    job = story.job
    story.keeps_behind(job.event(0, "mirror-kept", peer=1)["step"])
    story.kill("rack1")
    story.back(1, "life1")
    loaded = job.event(1, "mirror-loaded", peer=0)
    joined = job.event(1, "state-copied")["step"]
    kept = job.events(0, ranks - 1, kind="mirror-kept")
    assert loaded["step"] in {event["step"] for event in kept}
    story.keeps_behind(joined)
    story.end()
    for rank in range(ranks):
        told = job.told(1, rank, name="life1")
        assert told["begun"][3] == loaded["step"] > 0
        assert told["place"] == place_after(loaded["step"])
        assert account(told) == f"rack state from the mirror of step {loaded['step']} on rack 0"
    kept = job.events(0, kind="mirror-kept")
    assert job.told(0)["status"]["mirror_bytes"] == sum(e["bytes"] for e in kept[-2:])


@pytest.mark.slow
def test_rack_whose_holder_died_with_it_begins_fresh_and_says_so(jobs: Jobs) -> None:
    """Rack 2 keeps that of rack 1, rack 0 that of rack 2."""
    story = Story(jobs, 3)
    job = story.job
    job.event(2, "mirror-kept", peer=1)
    job.event(0, "mirror-kept", peer=2)
    story.kill("rack1", "rack2")
    story.back(1, "life1")
    story.back(2, "life2")
    loaded = job.event(2, "mirror-loaded", peer=0)
    fresh = job.event(1, "state-fresh", name="place")
    assert fresh["reason"] == "no rack that lives keeps a mirror of it"
    story.end()
    told = job.told(2, name="life2")
    assert told["place"] == place_after(loaded["step"])
    told = job.told(1, name="life1")
    assert told["begun"][3] == 0
    assert account(told) == f"rack state fresh: {fresh['reason']}"
