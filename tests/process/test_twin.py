"""A rack that dies and comes back goes on with the state of another rack: the same optimizer, the
same schedule, to the bit, at one step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.conftest import Jobs
from tests.process.racks import Job, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "grace_window_ms": 5.0,
    "stall_max_s": 0.05, "shutdown_timeout_s": 60,
}  # fmt: skip
LEARNING_RATE = 0.01


class Story:
    """Rack 1 is killed, and started again while rack 0 trains on."""

    def __init__(self, jobs: Jobs, ranks: int = 1, **options: Any) -> None:
        self.job: Job = jobs(ranks=ranks, witness=True)
        self.ranks, self.lives = ranks, 0
        self.options = {
            "script": "tests.process.twin", "stop": self.job.gate("stop"), "config": CONFIG,
            **options,
        }  # fmt: skip
        self.job.start(0, **self.options)
        self.job.start(1, **self.options)
        self.job.event(1, "applied", fragment=1)
        self.job.processes[1].kill()

    def back(self, **options: Any) -> str:
        """Start rack 1 again, in other ways than it was; returns the name of that life."""
        self.lives += 1
        name = f"life{self.lives}"
        self.returned = self.job.start(1, name=name, **{**self.options, **options})
        return name

    def refused(self, **options: Any) -> list[str]:
        """What that life ends with."""
        name = self.back(**options)
        until(lambda: self.returned.code is not None, f"it is refused\n{self.job.logs()}")
        assert self.returned.code == 1, self.job.logs()
        found: list[str] = self.job.told(1, name=name)["error"]
        return found

    def end(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Let all stop; what the ranks of rack 0 and of the newest life of rack 1 have written."""
        Path(self.job.gate("stop")).touch()
        self.job.ended(0, code=0)
        until(lambda: self.returned.code is not None, "the one that came back ends")
        assert self.returned.code == 0, self.job.logs()
        ranks, name = range(self.ranks), f"life{self.lives}"
        return (
            [self.job.told(0, rank) for rank in ranks],
            [self.job.told(1, rank, name=name) for rank in ranks],
        )


def is_twin(donors: list[dict[str, Any]], twins: list[dict[str, Any]]) -> None:
    """What each rank begins with is what the same rank of the donor had at that step."""
    for donor, twin in zip(donors, twins, strict=True):
        step, state, rate, batches = twin["begun"]
        assert step > 0
        assert donor["states"][str(step)] == state
        assert rate < LEARNING_RATE, "the schedule has gone on"
        assert batches == 0, "a place in the data is of the rack, and was lost with it"
        rest = "; rack state fresh: mirror_rack_state is off"
        assert twin["status"]["joined_state"] == f"copied from rack 0 at step {step}{rest}"
        assert min(map(int, twin["states"])) == step
        assert twin["weights"] == donor["weights"]


KINDS: list[Any] = [
    pytest.param("adamw", 2, "ddp", "cpu", id="adamw, ddp"),
    pytest.param("adamw", 2, "fsdp2", "cpu", id="adamw, fsdp2"),
    pytest.param("sgd", 1, "ddp", "cpu", id="sgd"),
    pytest.param("muon", 1, "ddp", "cpu", id="muon and adamw"),
    pytest.param("adamw", 2, "fsdp2", "cuda", id="adamw, fsdp2, cuda", marks=pytest.mark.gpu),
    pytest.param("muon", 1, "ddp", "cuda", id="muon, cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("optimizer", "ranks", "parallel", "device"), KINDS)
def test_a_rack_that_comes_back_is_a_twin(
    jobs: Jobs, optimizer: str, ranks: int, parallel: str, device: str
) -> None:
    """With schedulers and a scaler. It was made with another learning rate, and has the donor's
    once it trains: one that keeps its own would diverge without a word."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    how = {"optimizer": optimizer, "parallel": parallel, "device": device}
    story = Story(jobs, ranks, **how)
    story.back(learning_rate=0.5)
    copied, job = story.job.event(1, "state-copied"), story.job
    equal = job.event(1, "made-equal")
    assert any(each.startswith("group 0 lr: 0.5 -> 0.00") for each in equal["changed"]), equal
    given = job.event(0, "state-given", step=copied["step"])
    assert (given["to"], given["bytes"]) == (1, copied["bytes"])
    if ranks > 1:  # of DDP the first rank alone keeps a copy, as the others have the same
        given_there = partial(job.events, 0, 1, kind="state-given")
        until(lambda: bool(given_there()), f"rank 1 of rack 0 records it\n{job.logs()}")
        other = given_there()[-1]
        assert bool(other["bytes"]) == (parallel == "fsdp2"), other
    fresh = job.event(1, "state-fresh", name="place", scope="rack")
    assert fresh["reason"] == "mirror_rack_state is off"
    is_twin(*story.end())


def test_rack_that_would_train_otherwise_is_refused_by_name(jobs: Jobs) -> None:
    """Another optimizer; a scheduler that begins anew. Without the copy it is said."""
    story = Story(jobs)
    kind, said = story.refused(optimizer="sgd")
    assert kind == "StateRefused"
    assert "optimizer is a torch.optim.adamw.AdamW at the donor and a torch.optim.sgd.SGD" in said
    kind, said = story.refused(registers=False)
    assert kind == "UsageError"
    assert "a learning-rate scheduler drives optimizer, and it is not registered" in said
    story.back(config=CONFIG | {"join_copies_state": False})
    fresh = story.job.event(1, "state-fresh", name="optimizer")
    assert fresh["reason"] == "join_copies_state is off"
    donors, twins = story.end()
    account = "fresh: join_copies_state is off; rack state fresh: mirror_rack_state is off"
    assert twins[0]["status"]["joined_state"] == account
    assert twins[0]["begun"][0] == 0
    assert twins[0]["weights"] == donors[0]["weights"]


def test_a_state_that_cannot_travel_is_named(jobs: Jobs) -> None:
    story = Story(jobs, optimizer="callback", schedules=False)
    story.back()
    reason = story.job.event(1, "state-fresh", name="optimizer")["reason"]
    assert reason.startswith(
        "rack 0 cannot give it: state['optimizers']['optimizer']['state']['state'][0]['hook'] is a "
        "builtins.builtin_function_or_method, which cannot travel"
    )
    _, twins = story.end()
    rest = "; rack state fresh: mirror_rack_state is off"
    assert twins[0]["status"]["joined_state"] == f"fresh: {reason}{rest}"


def test_a_checkpoint_keeps_what_is_registered(jobs: Jobs, tmp_path: Path) -> None:
    """Of both scopes."""
    folder, stop = tmp_path / "cuts" / "one", tmp_path / "stop"
    options: dict[str, Any] = {
        "script": "tests.process.twin", "config": CONFIG, "optimizer": "muon", "stop": str(stop),
    }  # fmt: skip
    at = {"10": [["touch", str(stop)]]}
    first, again = jobs(), jobs()
    first.run(**options, checkpoints={"9": str(folder)}, at=at)
    stop.unlink()
    again.run(**options, resume=str(folder), at={"15": [["touch", str(stop)]]})
    for rack in (0, 1):
        step, state, _, batches = again.told(rack)["begun"]
        assert (step, batches) == (9, 9)
        assert state == first.told(rack)["states"]["9"]
        loaded = {event["name"] for event in again.result(rack).kinds("state-loaded")}
        assert loaded == {"scheduler 0", "scheduler 1", "scaler", "place"}
