"""Settings that other jobs leave as they are reach the part that they are for."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest

import mend
from mend.engine.features.micro_benchmark import PROBE_BYTES
from mend.errors import PeerUnreachable
from mend.transport.bulk_client import BulkLane
from mend.transport.security import Secrets
from mend.types import Address, Peer, probe_key
from tests.process import train
from tests.process.conftest import Configure, Jobs
from tests.process.injected import ONE_LIFE
from tests.process.racks import START_GATE, Job, Nursery, run_mend, until
from tests.process.test_giving_up import last_holder_dies, said
from tests.process.test_takeover import CONFIG, first_commits

KEY = bytes(range(32))
"""Of a job with a key, see conftest.py."""


def test_rack_that_is_started_again_without_attestation_begins_no_lineage(jobs: Jobs) -> None:
    """`restart_attests_death=False`: only a person may say that its former life is over."""
    job = jobs()
    gate = job.gate()
    config = {**CONFIG, "restart_attests_death": False}
    options: dict[str, Any] = {"steps": 24, "config": config, "pace_ms": 2}
    job.start(0, **options, at={"12": [["gate", job.gate("never")]]})
    job.start(1, **options, at={"12": [["gate", gate]]})
    first_commits(job, 2)
    job.kill(0)
    job.event(1, "stands")
    job.start(0, env={START_GATE: job.gate("never")}, **options)
    nobody = "rack 1 knows this job, in which a former life of this rack has a seat. It keeps"
    until(
        lambda: any(nobody in str(event["for"]) for event in job.events(0, kind="waiting")),
        lambda: f"rack 0 waits for a person\n{job.stacks()}",
    )
    job.processes[0].kill()
    assert "rack 0 is out; the job goes on with racks 1" in said(job, "0", job.addresses[1])
    job.event(1, "lineage")
    Path(gate).touch()
    job.ended(1, code=0)
    kinds = [event["kind"] for event in job.result(1).kinds("retired", "lineage")]
    assert kinds == ["retired", "lineage"]


async def lane_of(job: Job, address: Address, *, conceal: bool) -> bytes:
    """What a reader with the job's key gets over the lane of rack 0, which serves bytes of its own
    where slow racks are validated."""
    token = hashlib.sha256(b"mend lane " + job.name.encode()).digest()[:16]
    secrets = Secrets((KEY,), Peer(1, 0), conceal=conceal)
    lane, into = BulkLane("127.0.0.1", None, token=token, secrets=secrets), bytearray(PROBE_BYTES)
    with contextlib.closing(lane):
        await lane.fetch([address], probe_key(0), "", memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("conceal", [True, False])
def test_payloads_are_encrypted_unless_the_setting_says_so(
    jobs: Jobs, free_port: int, conceal: bool
) -> None:
    """`encrypt_payloads=False`: who expects them encrypted cannot read them, and the other way."""
    job = jobs(key=True)
    gate, config = job.gate(), {**CONFIG, "encrypt_payloads": conceal}
    ports = {"data_ports": f"{free_port}-{free_port}"}
    job.start(0, steps=24, config=config | ports, at={"12": [["gate", gate]]})
    job.start(1, steps=24, config=config)
    first_commits(job, 2)
    address = Address("127.0.0.1", free_port)
    data = hashlib.shake_128(b"mend probe").digest(PROBE_BYTES)
    assert asyncio.run(lane_of(job, address, conceal=conceal)) == data
    with pytest.raises(PeerUnreachable):
        asyncio.run(lane_of(job, address, conceal=not conceal))
    Path(gate).touch()
    one, other = job.finished()
    assert one.digest == other.digest


def test_holder_that_sends_nothing_is_given_up_after_transfer_stall_s(job: Job) -> None:
    gate, config = job.gate(), {**CONFIG, "transfer_stall_s": 0.5}
    job.start(0, steps=24, config=config)
    job.start(1, steps=24, config=config, at={"1": [["mute", gate]]})
    assert "no verified byte for 0.5 s" in job.event(0, "fetch-failed")["error"]
    Path(gate).touch()
    one, other = job.finished()
    assert one.digest == other.digest


def test_rack_with_tape_mb_max_0_writes_events_and_no_tape(job: Job, nursery: Nursery) -> None:
    job.unjudged = "one rack keeps no tape"
    job.run(steps=12, config=CONFIG, per={1: {"config": {**CONFIG, "tape_max_mb": 0}}})
    assert {path.name for path in job.events_folder.iterdir()} == {
        "events-rack0-rank0.jsonl",
        "events-rack1-rank0.jsonl",
        "tape-rack0-rank0.mend",
    }
    status, told = run_mend(nursery, "replay", job.events_folder)
    assert (status, told.count(": equal: ")) == (0, 1), told


def test_tape_that_reaches_tape_mb_max_loses_its_oldest_part_and_the_rest_replays(
    alone: Configure, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mend.trace.writer.MB", 20_000)  # a tape of this job is small
    model = train.build("plain", 0)
    optimizer = train.optimizer_of(model)
    config = alone(tape_max_mb=2, diagnostics_dir=tmp_path)
    mend.mend_init(model, config, optimizer)

    def first_is_gone() -> bool:
        optimizer.zero_grad()
        train.loss_of(model, 0, 0, 1).backward()
        optimizer.step()
        return not (tmp_path / "tape-rack0-rank0.mend").exists()

    until(first_is_gone, "the oldest file is removed")
    mend.mend_shutdown(model)
    files = list(tmp_path.glob("*.mend"))
    assert len(files) > 1
    assert sum(path.stat().st_size for path in files) < 3 * 20_000  # each begins with a state
    status, told = run_mend(nursery, "replay", tmp_path)
    assert (status, told.count(": equal")) == (0, 1), told


def test_rack_that_listens_everywhere_is_reached_at_the_host_that_it_advertises(
    jobs: Jobs,
) -> None:
    """All of 127/8 is here. Payloads are pulled from there, too."""
    job = jobs(key=True)
    for rack in range(2):
        port, host = job.addresses[rack].rpartition(":")[2], f"127.0.0.{5 + rack}"
        everywhere = {"MEND_SIDEBAND_ADDR": f"tcp://0.0.0.0:{port}", "MEND_ADVERTISE_HOST": host}
        job.start(rack, steps=24, config=CONFIG, env=everywhere)
        hello = job.event(0, "hello", rack=rack)
        assert hello["address"] == f"tcp://{host}:{port}"
    results = job.finished()
    assert results[0].digest == results[1].digest
    assert [m["rack"] for m in results[0].commits[-1]["members"]] != []
    assert not results[0].kinds("pulls-fail", "rack-silent")


def test_job_lost_is_what_mend_init_raises_when_no_life_is_left(jobs: Jobs) -> None:
    """The last rack with the weights dies before the other one has copied them. That one begins
    again by itself, here only once."""
    job = jobs(witness=True)
    options: dict[str, Any] = {"steps": 24, "config": CONFIG, "pace_ms": 2}
    last_holder_dies(job, {ONE_LIFE: "1"}, **options)
    assert job.ended(1) == 1
    kind, text = job.told(1)["error"]
    assert kind == "JobLost"
    assert "rack 0" in text
    job.start(1, **options)
    one, other = job.finished()
    assert one.digest == other.digest
