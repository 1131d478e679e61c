"""Racks that do not belong together say so before the first step, each with the reason."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mend.coordination.wire import VERSION
from mend.types import WITNESS
from tests.process.conftest import Jobs
from tests.process.racks import START_GATE, Forked, Job, until

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}


@dataclass
class Gated:
    """Racks of a job that cannot begin. Their start times out once each has said all that it waits
    for: how long that takes decides nothing."""

    job: Job
    said: dict[int, list[str]] = field(default_factory=dict)

    def start(
        self, rack: int, *words: str, env: dict[str, str] | None = None, **options: Any
    ) -> None:
        """`words`: of what it waits for at last."""
        self.said[rack] = list(words)
        gated = {**(env or {}), START_GATE: self.job.gate("start")}
        self.job.start(rack, env=gated, config={**CONFIG, **options})

    def ended(self) -> None:
        for rack, words in self.said.items():
            until(
                lambda rack=rack, words=words: self._has_said(rack, words),
                lambda rack=rack, words=words: f"rack {rack} says {words}\n{self.job.stacks()}",
            )
        Path(self.job.gate("start")).touch()
        for rack, words in self.said.items():
            assert self.job.ended(rack) == 1
            refused(self.job, rack, "StartTimeout", *words)

    def _has_said(self, rack: int, words: list[str]) -> bool:
        waits = [str(event["for"]) for event in self.job.events(rack, kind="waiting")]
        return any(all(word in wait for word in words) for wait in waits)


UNSEEN = {"MEND_SIDEBAND_ADDR": "tcp://127.0.0.1:0", "MEND_DIAGNOSTICS_DIR": ""}
"""Of a second process of a rack: another address, and no files, which are those of the first."""


def second(job: Job, name: str, env: dict[str, str] | None = None, **options: Any) -> Forked:
    """A second process of rack 1."""
    told = {"config": CONFIG, **options}
    started = job.start(1, name=name, env={**UNSEEN, **(env or {})}, **told)
    assert isinstance(started, Forked)
    return started


def refused(job: Job, rack: int, error: str, *words: str, name: str = "") -> str:
    """Wait for the end of a rack that must not start; returns what it said."""
    result = job.result(rack, name=name)
    assert result.error[0] == error, result.error
    for word in words:
        assert word in result.error[1]
    assert result.losses == [], "no step was made"
    assert result.threads == [], "no thread is left"
    return result.error[1]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"model": "unbiased"}, "param 2.bias is absent there and not here"),
        ({"model": "bfloat16"}, "param 0.weight is 10x6 bfloat16 0 there and not here"),
        ({"config": {**CONFIG, "outer_lr": 0.5}}, "outer_lr is 0.5 there and not here"),
        ({"config": {**CONFIG, "overlap_steps": 1}}, ": overlap_steps is 1 there and not here"),
        (
            {"config": {**CONFIG, "stall_max_s": 0.3}},
            "stall_max_s is 0.3 there and not here. Make it alike on all racks",
        ),
        (
            {"config": {**CONFIG, "failslow_action": "act"}},
            "failslow_action is act there and not here. Make it alike on all racks",
        ),
        ({"script": "tests.process.stranger"}, "mend version is 99.0 there and"),
        (
            {"script": "tests.process.stranger", "env": {"OTHER_TORCH": "1"}},
            "torch version is 99.0 there and",
        ),
    ],
    ids=["shape", "type", "setting", "overlap", "limit", "action", "version", "torch"],
)
def test_a_rack_that_differs_hears_the_first_difference(
    job: Job, other: dict[str, Any], difference: str
) -> None:
    job.start(0, config=CONFIG)
    job.start(1, **{"config": CONFIG, **other})
    assert job.ended(1) == 1
    refused(job, 1, "PlanMismatch", "rack 1 differs from rack 0", difference)


def test_buffers_that_differ_at_the_start_are_named(job: Job) -> None:
    """Each rack computed with another mask, and nothing said so: buffers are not exchanged."""
    for rack, result in enumerate(job.run(config=CONFIG, model="masked", steps=4)):
        found = result.kinds("buffers-differ")
        assert [(e["buffer"], e["more"], e["racks"]) for e in found] == [("0.mask", 0, [1])][rack:]


@pytest.mark.parametrize("witness", [False, True])
def test_racks_that_speak_two_wire_formats_both_say_so(jobs: Jobs, witness: bool) -> None:
    """Each counted the other's frames, and waited until the start timed out."""
    job = jobs(witness=witness)
    job.start(0, config=CONFIG)
    job.start(1, config=CONFIG, script="tests.process.stranger", env={"OTHER_WIRE": "1"})
    remedy = "run the same mend on all racks"
    for rack in range(2):
        assert job.ended(rack) == 1
    ours = f"rack 1 speaks wire version 99, this is version {VERSION}"
    refused(job, 0, "Refused", ours, remedy)
    refused(job, 1, "Refused", f"speaks wire version {VERSION}, this is version 99", remedy)
    if witness:
        assert job.witness_event("refused", rack=1)["cause"] == "version"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "another live process says it is rack 1"),
        (
            {"script": "tests.process.stranger", "env": {"OTHER_WIRE": "1"}},
            f"rack 0 speaks wire version {VERSION}",
        ),
    ],
    ids=["alike", "another wire format"],
)
def test_a_second_process_of_a_rack_does_not_move_a_running_job(
    job: Job, options: dict[str, Any], why: str
) -> None:
    """The first one stays, and trains to its end."""
    config = {**CONFIG, "sideband_heartbeat_ms": 20}
    for rack in range(2):
        job.start(rack, config=config, at={"2": [["gate", job.gate()]]})
    job.event(0, "genesis")
    assert second(job, "late", config=config, **options).wait() == 1
    refused(job, 1, "Refused", why, name="late")
    Path(job.gate()).touch()
    job.finish(0, 1)


def test_a_rack_that_waits_for_a_refused_one_hears_why(job: Job) -> None:
    job.start(1, config={**CONFIG, "fragments": 1})
    job.start(0, config=CONFIG)
    assert job.ended(1) == 1
    why = "fragments is 1 there and not here"

    def told() -> list[str]:
        waits = (str(event["for"]) for event in job.events(0, kind="waiting"))
        return [wait for wait in waits if "rack 1 was refused" in wait and why in wait]

    until(lambda: bool(told()), lambda: f"rack 0 hears why\n{job.stacks()}")
    assert "no hello from rack 1" in told()[0]
    job.processes[0].kill()


def test_a_live_rack_of_the_same_number_keeps_its_place_before_the_start(jobs: Jobs) -> None:
    job = jobs(witness=True)
    job.start(1, config=CONFIG)
    job.witness_event("hello", rack=1)
    assert second(job, "double").wait() == 1
    refused(job, 1, "Refused", "another live process says it is rack 1", name="double")
    job.start(0, config=CONFIG)
    job.finish(0, 1)


def test_another_job_on_the_same_port_is_not_heard(job: Job) -> None:
    """Its racks are not let in; this job runs, and has counted the frames."""
    gate = job.gate()
    job.start(0, config=CONFIG, at={"3": [["gate", gate]]})
    job.event(0, "hello", rack=0)  # it listens
    env = {"MEND_JOB_ID": "another", START_GATE: job.gate("start")}
    stranger = second(job, "stranger", env)
    job.event(0, "other-job")
    Path(job.gate("start")).touch()
    assert stranger.wait() == 1
    refused(
        job, 1, "StartTimeout", "no answer from the coordinator", job.addresses[0], name="stranger"
    )
    job.start(1, config=CONFIG)
    Path(gate).touch()
    job.finish(0, 1)
    assert job.result(0).status["frames_refused"] > 0
    assert job.result(1).status["frames_refused"] == 0
    (said,) = job.result(0).kinds("other-job")
    assert "job 'another', this is job 'test-0'" in said["effect"]


def test_a_rack_that_does_not_come_is_named(job: Job) -> None:
    gated = Gated(job)
    gated.start(0, "no hello from rack 1", "job_id")
    gated.ended()


def test_start_ends_at_its_time_out(job: Job) -> None:
    job.start(0, config={**CONFIG, "start_timeout_s": 1})
    assert job.ended(0) == 1
    refused(job, 0, "StartTimeout", "after ")


def test_a_witness_that_is_not_there_is_named(job: Job) -> None:
    address = "tcp://127.0.0.1:9"
    silent = "nothing was heard from the witness, rack 1"
    gated = Gated(job)
    env = {"MEND_WITNESS_ADDR": address}
    gated.start(0, f"the witness at {address}", "is it running", silent, env=env)
    gated.ended()


def test_racks_that_wait_for_the_same_silent_one_name_each_other(job: Job) -> None:
    """As racks do that are started again when their job is over and its coordinator is gone."""
    gated = Gated(job)
    heard = "nothing was heard from the witness; heard from rack"
    for rack in range(2):
        env = {"MEND_WITNESS_ADDR": "tcp://127.0.0.1:9"}
        gated.start(rack, "is the job over", f"{heard} {1 - rack}", env=env)
    gated.ended()


def test_a_taken_port_is_named_with_the_remedy(job: Job, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        address, holder = f"tcp://127.0.0.1:{free_port}", f"Held by process {os.getpid()} ("
        job.start(0, config=CONFIG, env={"MEND_SIDEBAND_ADDR": address})
        assert job.ended(0) == 1
        refused(job, 0, "AddressInUse", address, "Stop the process that holds it", holder)


def test_taken_data_ports_are_named_with_the_remedy(
    job: Job, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        job.start(0, config={**CONFIG, "data_ports": f"{port}-{port}"})
        assert job.ended(0) == 1
        refused(
            job, 0, "AddressInUse", str(port), "wider range", f"Held by process {os.getpid()} ("
        )


@pytest.mark.parametrize("witness", [False, True])
def test_process_of_another_job_is_named_on_both_sides(jobs: Jobs, witness: bool) -> None:
    """Racks with a job_id in their code waited for a witness of another job: it alone knew why, in
    a line per hello, and the racks blamed firewalls and keys."""
    job = jobs(witness=witness)
    gated, theirs = Gated(job), repr(job.name)
    who = "the witness" if witness else "rack 0"
    of_them = f"{who} is of job {theirs}, this is job 'mine'; set one job_id"
    if witness:
        gated.start(0, of_them, job_id="mine")
    else:
        gated.start(0, f"rack 1 is of job 'mine', this is job {theirs}")
    gated.start(1, of_them, job_id="mine")
    gated.ended()
    assert job.result(1).error[1].startswith(of_them), "the known cause comes before the guesses"
    if witness:
        told = [event["from_rack"] for event in job.events(0, kind="other-job")]
        assert told == [WITNESS], "once"
        assert job.witness_event("refused", rack=1)["cause"] == "job"
