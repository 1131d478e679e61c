"""The job of a meeting: its settings, its model, and what its events say of the network."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from mend.config import MendConfig
from mend.config.declared import Scope
from mend.config.wiring import policy_of
from mend.consensus.records import Policy
from mend.events.kinds import PayloadPulled
from mend.events.lines import TimedEvent
from mend.tools.doctor.jobs import NAME_CHARS_MAX, OF_A_MEETING, meeting_of
from mend.tools.doctor.meeting import flows_of, meet, payload, probe_config
from mend.tools.doctor.terms import Meeting
from mend.types import MB, MS

OWN = {
    "job_id", "witness_addr", "start_timeout_s", "shutdown_timeout_s", "observe",
    "diagnostics_dir", "tape_max_mb", "async_tp_enabled",
}  # fmt: skip


def config(**given: Any) -> MendConfig:
    peers = ("tcp://a:1", "tcp://b:2", "tcp://c:3")
    return MendConfig(**{"rack": 0, "racks": 3, "sideband_peers": peers, **given})


def test_the_job_has_all_settings_of_the_real_one_but_its_own(tmp_path: Path) -> None:
    real = config(sync_period_steps=64, codec="int8", seat_timeout_s=9.0)
    probe = probe_config(real, 7.0, tmp_path)
    changed = {f.name for f in fields(real) if getattr(real, f.name) != getattr(probe, f.name)}
    assert changed <= OWN
    assert probe.start_timeout_s == 7.0
    assert probe.diagnostics_dir == tmp_path, "nothing goes to the folder of the real job"
    assert real.facts(Scope.PLAN) == probe.facts(Scope.PLAN)
    differ = dict(real.facts(Scope.JOB)).items() ^ dict(probe.facts(Scope.JOB)).items()
    assert {name for name, _ in differ} == {"job_id"}
    assert isinstance(policy_of(real, 3), Policy)
    assert policy_of(real, 3) == policy_of(probe, 3), "what a hello is refused for"


@pytest.mark.parametrize("job", ["run7", "x" * NAME_CHARS_MAX, "y" * (NAME_CHARS_MAX - 6)])
def test_the_job_has_a_name_of_its_own_that_is_a_name(job: str) -> None:
    name = meeting_of(job)
    assert name != job
    assert name.endswith(OF_A_MEETING)
    assert MendConfig(rack=0, job_id=name).job_id == name
    assert meeting_of(job[:-1] + "z") != name, "different jobs have different meetings"


@pytest.mark.parametrize("fragments", [1, 4])
def test_the_model_is_equal_on_all_racks_and_as_large_as_asked(fragments: int) -> None:
    sizes = [p.numel() for p in payload(config(fragments=fragments), 16.0).parameters()]
    assert sizes == [2_000_000, *[1] * (fragments - 1)], "16 MB of fp32 from two other racks"
    assert not any(torch.any(p) for p in payload(config(), 0.0).parameters())


def pulled(rack: int, megabytes: float, begin_ms: float, end_ms: float) -> TimedEvent:
    size, ms = int(megabytes * MB), end_ms - begin_ms
    return TimedEvent(int(end_ms * MS), PayloadPulled(rack, size, ms))


def test_rates_are_those_of_payloads_and_time_counts_once() -> None:
    events = [
        pulled(1, 8, 1000, 1064),
        pulled(1, 4e-6, 1064, 1065),  # the other fragments
        pulled(2, 8, 1032, 1096),
        pulled(0, 8, 0, 5),  # a copy for this rack itself
    ]
    flows = flows_of(events, 0)
    assert flows.mbit == {1: 1000.0, 2: 1000.0}
    assert flows.megabytes == {1: 8.0, 2: 8.0}
    assert flows.inbound_mbit == pytest.approx(16 * 8e3 / 96), "not 2000: they overlapped by half"


def test_slices_of_a_payload_count_together() -> None:
    flows = flows_of([pulled(1, 4, 0, 32), pulled(1, 4, 100, 132)], 0)
    assert flows.megabytes == {1: 8.0}
    assert flows.mbit == {1: 1000.0}


def test_without_a_pull_there_is_no_rate() -> None:
    flows = flows_of([pulled(0, 8, 0, 5)], 0)
    assert (flows.mbit, flows.inbound_mbit) == ({}, 0.0)


# ------------------------------------------------------------------ two racks of one process


def met(ports: list[int], wait_s: float, *given: dict[str, Any]) -> list[Meeting]:
    """What each rack found, by rack."""
    peers = tuple(f"tcp://127.0.0.1:{port}" for port in ports)
    racks = [
        MendConfig(**{"rack": r, "racks": 2, "sideband_peers": peers, **given[r]}) for r in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rack: meet(rack, wait_s, 1.0), racks))


def test_racks_exchange_with_the_codec_and_the_moments_of_the_job(
    free_ports: Callable[[int], list[int]],
) -> None:
    both = {"codec": "int8", "momentum_sync_period_steps": 256}
    own = {"sideband_heartbeat_ms": 150}
    for meeting in met(free_ports(2), 60.0, both, both | own):
        assert (meeting.failure, meeting.outcome) == ("", "")
        (seen,) = meeting.peers
        assert seen.mbit is not None
        assert seen.mbit > 0
        assert seen.megabytes > 0.2
        assert seen.p50_ms is not None
        assert seen.settings.keys() == meeting.settings.keys()
        differing = {n for n in seen.settings if seen.settings[n] != meeting.settings[n]}
        assert differing == {"sideband_heartbeat_ms"}
        assert meeting.inbound_mbit is not None


def test_racks_with_other_settings_are_refused_and_both_values_are_told(
    free_ports: Callable[[int], list[int]],
) -> None:
    first, second = met(free_ports(2), 5.0, {}, {"overlap_steps": 3, "staleness_max_rounds": 3})
    assert second.failure.startswith("PlanMismatch: rack 1 differs from rack 0: overlap_steps is 3")
    assert not second.timed_out
    assert "staleness_max_rounds is 3 there and not here" in second.failure
    assert first.failure.startswith("StartTimeout: ")
    assert first.timed_out
    refused = first.peers[0].refused
    assert (
        "overlap_steps is 3 there and 8 here; staleness_max_rounds is 3 there and 2 here" in refused
    )
