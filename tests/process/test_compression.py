"""Lossy codecs between real processes: what is on the wire is what the formula says, every rack
holds the same bits, and what a round leaves out is kept when a rack dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mend.codec import CLOSING, CODECS
from mend.fragment.plan import build_plan
from mend.fragment.shards import replicated
from mend.types import Owned
from tests.process import train
from tests.process.conftest import Jobs
from tests.process.racks import Job, Result, until
from tests.process.replayed import model_bits, replayed
from tests.process.train import bits

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2,
    "failslow_action": "detect",  # a probe is no offer, and on a busy machine racks are slow
}  # fmt: skip
WIRE_PCT = 1.0
STEPS = 1_000_000


def parts() -> list[Owned]:
    """The broad model's fragments, in a rack of one rank."""
    plan = build_plan(train.build("broad", 0), CONFIG["fragments"])
    return [replicated(layout, 1, 0).owned for layout in plan]


def payload_sizes(codec: str) -> list[int]:
    """Of all codecs that know the size from the number of elements."""
    return [CODECS[codec]().payload_bytes(owned.numel) for owned in parts()]


def run_and_count(job: Job, config: dict[str, Any], wanted: float) -> tuple[Result, dict[str, Any]]:
    """Rack 0, which has pulled so many bytes when the others' last offers are still to come."""
    told = job.gate("pulled")
    ends = {rack: {"at": {"end": [["gate", told]]}} for rack in range(1, job.racks)}
    ends[0] = {"at": {"end": [["pulled", told]]}}
    first, *others = job.run(ends, steps=39, model="broad", config=config, learning_rate=1e-6)
    for other in others:
        assert other.digest == first.digest
        assert other.weights == first.weights
    assert wanted <= int(Path(told).read_text()) <= (1 + WIRE_PCT / 100) * wanted
    return first, first.status


@pytest.mark.parametrize(
    "codec",
    [
        "int4",
        "topk",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("bfloat16", "int8", "e3m0")),
    ],
)
def test_the_bytes_on_the_socket_are_those_of_the_formula(jobs: Jobs, codec: str) -> None:
    """Rack 0 pulls nothing but the other's offers, as everybody starts at its weights. At step 39
    fragment 0 has had five rounds, fragment 1 four, and none is in flight. One codec of blocks and
    a sparse one say what travels beside offers; the length of an offer is asked of every codec in
    tests/conformance/test_codecs.py."""
    config = {**CONFIG, "codec": codec, "lockstep": True}
    job, sizes = jobs(), payload_sizes(codec)
    first, status = run_and_count(job, config, 5 * sizes[0] + 4 * sizes[1])
    assert status["codec"] == codec
    encoded, captured = first.kinds("encoded"), first.kinds("captured")
    assert [each["seq"] for each in encoded] == [each["seq"] for each in captured]
    closing = [CLOSING.payload_bytes(each.numel) for each in parts()] if codec == "topk" else sizes
    made = [e["bytes"] for e in encoded]
    assert made == [(closing if "closing" in e else sizes)[e["fragment"]] for e in captured]
    assert status["payload_bytes"] == sum(made)
    assert status["payload_bytes_fp32"] == sum(e["fp32_bytes"] for e in encoded)
    assert all(0 < e["residual"] < 1 for e in encoded if e["bytes"] in sizes)
    assert (0 < status["residual_share"] < 1) == (codec != "topk")
    assert job.logs().count("raised the loss by 11 %") == (2 if codec == "topk" else 0), "each once"


@pytest.mark.slow
def test_four_racks_receive_one_payload_and_a_half_in_a_round(jobs: Jobs) -> None:
    """Like the test above, with no word on how to exchange: 2 (R - 1) / R payloads, not R - 1."""
    racks, (zero, one) = 4, (4 * owned.numel for owned in parts())
    wanted = 2 * (racks - 1) / racks * (5 * zero + 4 * one)
    first, _ = run_and_count(jobs(racks=racks), {**CONFIG, "lockstep": True}, wanted)
    assert {commit["reason"] for commit in first.commits} == {"lockstep, sharded"}


def low_rank_sizes(rank: int) -> list[tuple[int, int]]:
    """Bytes of an offer against an even and an odd version, by hand: 16 of a header, 4 of a scale
    per matrix, 2 per element of a factor or of a vector."""
    sizes = []
    for owned in parts():
        even = odd = 16
        for shape, span in zip(owned.shapes, owned.spans, strict=True):
            if len(shape) == 2 and min(shape) > rank:
                even, odd = even + 4 + 2 * rank * shape[0], odd + 4 + 2 * rank * shape[1]
            else:
                even, odd = even + 2 * span.numel, odd + 2 * span.numel
        sizes.append((even, odd))
    return sizes


def test_offers_of_low_rank_are_as_long_as_their_side_says(jobs: Jobs) -> None:
    """Like the test above. Fragment 0 has had versions 0 to 4 as bases, fragment 1 0 to 3."""
    config = {**CONFIG, "codec": "powersgd-2", "lockstep": True}
    zero, one = low_rank_sizes(2)
    wanted = 3 * zero[0] + 2 * zero[1] + 2 * one[0] + 2 * one[1]
    first, status = run_and_count(jobs(), config, wanted)
    assert status["codec"] == "powersgd-2"
    encoded = first.kinds("encoded")
    whole = [CLOSING.payload_bytes(owned.numel) for owned in parts()]
    sizes = {(event["fragment"], event["bytes"]) for event in encoded}
    made = {(0, zero[0]), (0, zero[1]), (1, one[0]), (1, one[1])}
    assert sizes == {*made, *enumerate(whole)}
    assert all((0 < e["residual"] < 1) != (e["bytes"] in whole) for e in encoded)


def test_sparse_offers_are_as_long_as_what_changed(jobs: Jobs) -> None:
    config = {**CONFIG, "codec": "sparse", "lockstep": True}
    first, second = jobs().run(steps=24, model="broad", config=config, learning_rate=1e-6)
    assert first.digest == second.digest
    assert first.status["codec"] == "sparse"
    most = sum(payload_sizes("sparse")[e["fragment"]] for e in first.kinds("captured"))
    assert 0 < first.status["payload_bytes"] <= most
    assert first.status["residual_share"] == 0
    assert len(first.commits) >= 4


@pytest.mark.parametrize(
    "codec", ["int8", "topk", pytest.param("powersgd-2", marks=pytest.mark.slow)]
)
def test_three_racks_of_different_speed_hold_the_bits_that_the_reference_finds(
    jobs: Jobs, codec: str
) -> None:
    config = {**CONFIG, "codec": codec, "grace_window_ms": 0, "staleness_max_rounds": 8}
    paces = {rack: {"pace_ms": 3.0 + 4 * rack} for rack in range(3)}
    results = jobs(racks=3).run(steps=50, keep_local=True, config=config, per=paces)
    assert len({result.digest for result in results}) == 1
    assert len(results[0].commits) > 8
    outcome = replayed(results, "plain", config)
    thetas = [model_bits(result, "plain", config) for result in results]
    assert thetas == [[bits(theta) for theta in rack] for rack in outcome.thetas]
    if codec == "int8":
        return
    for result in results:  # the closing offers have brought all that the weights still held
        last = {event["fragment"]: event for event in result.kinds("captured")}
        assert all(event["closing"] for event in last.values())
        assert all(e["steps"] > 0 for e in result.kinds("captured"))
    for rack in outcome.thetas:
        for theta, versions in zip(rack, outcome.anchors, strict=True):
            torch.testing.assert_close(theta, versions[-1].values, rtol=0, atol=1e-5)


def test_the_death_of_a_rack_leaves_the_others_with_equal_bits(jobs: Jobs) -> None:
    """Its last payload may be merged or not; those who live on agree, and go on."""
    job = jobs(racks=3, witness=True)
    config = {**CONFIG, "codec": "int4"}
    for rack in range(3):
        job.start(rack, steps=STEPS, config=config, pace_ms=10)
    job.event(0, "commit", fragment=1)
    job.kill(2)
    job.event(0, "rack-silent", peer=2)

    def digests(rack: int) -> dict[tuple[int, int], list[str]]:
        commits = job.events(rack, kind="commit")
        return {(c["fragment"], c["version"]): c["digests"] for c in commits}

    known = len(digests(0))
    until(lambda: min(len(digests(0)), len(digests(1))) > known + 6, f"they merge\n{job.logs()}")
    first, second = digests(0), digests(1)
    both = first.keys() & second.keys()
    assert len(both) > known
    assert all(first[key] == second[key] for key in both)


def test_racks_train_with_what_their_script_has_registered(jobs: Jobs) -> None:
    """A codec, a merge, and an outer optimizer with two state vectors."""
    job = jobs()
    own = {"codec": "ternary", "outer_optimizer": "fedadam", "outer_lr": 0.01}
    config = {**CONFIG, **own, "merge": "elected"}
    first, second = job.run(script="tests.process.registered", steps=24, config=config)
    assert first.digest == second.digest
    assert first.status["codec"] == "ternary"
    assert first.status["payload_bytes"] % 68 == 0
    assert len(first.commits) >= 4
    momenta = {event["momentum"] for event in job.events(0) if event["kind"] == "commit"}
    period = CONFIG["sync_period_steps"]
    assert momenta == {period / (period + 16)}, "nesterov's would rise with the rounds"


def test_racks_with_different_codecs_are_refused_by_name(jobs: Jobs) -> None:
    job = jobs()
    job.start(0, steps=STEPS, config={**CONFIG, "codec": "int8"})
    job.start(1, steps=STEPS, config={**CONFIG, "codec": "int4"})
    refused = job.event(0, "refused")
    assert refused["rack"] == 1
    assert "codec is int4 there and int8 here" in str(refused["detail"])
