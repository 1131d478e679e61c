"""The merged model is followed from outside a real job, bit by bit, and the job does not notice."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mend.config.keyfile import read_secrets
from mend.following import Version
from mend.following.follower import Follower
from tests.process.conftest import Jobs
from tests.process.racks import LIMIT_S, Job, until

CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": 8,
    "overlap_steps": 2,
    "shutdown_timeout_s": 60,
    "lockstep": True,
    "wait_timeout_s": 60,
}
STEPS = 30


class Following:
    """A follower in a thread: what it has got so far."""

    def __init__(self, *addresses: str, job: Job, **options: Any) -> None:
        keys = read_secrets(job.key_file) if job.key_file is not None else ()
        self.versions: list[Version] = []
        self.error = ""
        told = {"every": 1, "wait_s": LIMIT_S, **options}
        self.follower = Follower(addresses, keys, job.name, "", **told)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for version in self.follower:
                self.versions.append(version)  # the test reads them meanwhile
        except Exception as error:
            self.error = repr(error)

    def __repr__(self) -> str:
        return f"{self.versions} {self.follower.trouble} {self.error}"

    def has(self, versions: list[int]) -> bool:
        assert not self.error
        return any([*each.versions] == versions for each in self.versions)

    def ended(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        assert not self.error


def begin(job: Job, **options: Any) -> None:
    """All racks; between the last step and the shutdown they tell their merged weights and wait."""
    for rack in range(job.racks):
        end = [["merged", job.gate(f"merged{rack}")], ["gate", job.gate()]]
        told = {"steps": STEPS, "pace_ms": 20, "config": CONFIG, "at": {"end": end}, **options}
        job.start(rack, **told)


def merged(job: Job) -> dict[str, Any]:
    path = Path(job.gate("merged0"))
    until(path.exists, "rack 0 tells what it has merged")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def assert_is(version: Version, told: dict[str, Any]) -> None:
    assert version.tensors.keys() == told["weights"].keys()
    for name, tensor in version.tensors.items():
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        assert tensor.reshape(-1).view(bits).tolist() == told["weights"][name], name


def assert_follows_the_log(versions: list[Version], job: Job) -> None:
    """No version twice, none back, and each is that of the log."""
    numbers = [each.number for each in versions]
    assert numbers == sorted(set(numbers))
    decided = {(e["fragment"], e["version"]) for e in job.events(0, kind="commit")}
    for each in versions:
        assert {(p, v) for p, v in enumerate(each.versions) if v} <= decided


@pytest.mark.parametrize(
    ("ranks", "parallel", "model"),
    [(1, "none", "plain"), (2, "fsdp2", "plain"), (2, "ddp", "plain"), (1, "none", "half")],
)
def test_every_committed_version_has_the_bits_of_the_racks(
    jobs: Jobs, ranks: int, parallel: str, model: str
) -> None:
    job = jobs(ranks=ranks, key=True)
    begin(job, parallel=parallel, model=model, same_data=True)
    following = Following(job.addresses[1], job=job)
    told = merged(job)
    until(lambda: following.has(told["versions"]), lambda: f"{told['versions']} {following}")
    Path(job.gate()).touch()
    for rack in range(2):
        job.ended(rack, code=0)
    following.ended()
    found = next(each for each in following.versions if [*each.versions] == told["versions"])
    assert_is(found, told)
    assert_follows_the_log(following.versions, job)
    assert len(following.versions) > 3
    assert not job.events(0, kind="frame-refused")
