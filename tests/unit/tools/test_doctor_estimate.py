"""Memory for anchors, and whether tau covers an exchange: arithmetic that was checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mend.config import MendConfig
from mend.config.wiring import rounds_in_flight
from mend.errors import ConfigError
from mend.tools.doctor import estimate as est
from mend.tools.doctor.estimate import Memory, Room


def config(**given: Any) -> MendConfig:
    usual = {"fragments": 8, "sync_period_steps": 64, "overlap_steps": 4, "codec": "float32"}
    return MendConfig(**{**usual, **given})


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("1.5B", 1_500_000_000), ("350m", 350_000_000), ("124_000_000", 124_000_000),
        ("124,000,000", 124_000_000), ("2T", 2 * 10**12),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, params: int) -> None:
    assert est.params_of(text) == params


@pytest.mark.parametrize(
    "text",
    ["", "B", "-1", "1e9", "0", "1.5X", "9" * 40, "999T", "nan", "1,5B", "1,500B", "1_5", ",1"],
)
def test_invalid_model_size_is_refused(text: str) -> None:
    """`1,5B`, with the comma of half of the world, was planned as 15B."""
    with pytest.raises(ConfigError, match="--params"):
        est.params_of(text)


def test_memory_is_what_was_measured_on_two_h200s() -> None:
    """1.54 G weights, P = 8, H = 64: 12.3 GB were two versions of the anchor, and 16 to 19 GB the
    whole, for tau = 4 and tau = 14, without outer momentum (docs/internals/benchmarks.md)."""
    short = est.memory_of(config(outer_optimizer_momentum=0.0), 1_540_000_000, 1)
    assert short.anchors == pytest.approx(12.3e9, rel=0.01)
    assert 15e9 < short.total < 16.5e9
    long = est.memory_of(config(overlap_steps=14, outer_optimizer_momentum=0.0), 1_540_000_000, 1)
    assert 18e9 < long.total < 19e9


def test_momentum_doubles_the_anchors_and_ranks_share_them() -> None:
    plain = est.memory_of(config(outer_optimizer_momentum=0.0), 1_000_000, 1)
    assert est.memory_of(config(), 1_000_000, 1).anchors == 2 * plain.anchors
    assert (
        est.memory_of(config(outer_optimizer_momentum=0.0), 1_000_000, 4).total * 4 == plain.total
    )


@pytest.mark.parametrize(
    ("mode", "apply_mode", "bytes_each"),
    [
        *((mode, "carry", 4) for mode in ("bf16", "int8", "int4", "e3m0")),
        *((mode, "carry", 0) for mode in ("float32", "sparse", "topk", "powersgd")),
        *((mode, "overwrite", 4) for mode in ("int4", "topk", "powersgd")),
    ],
)
def test_a_residual_is_as_long_as_what_a_rank_owns_and_each_round_makes_a_new_one(
    mode: str, apply_mode: str, bytes_each: int
) -> None:
    """It was left out: a fifth of the memory of int4 with outer momentum."""
    lossy = config(codec=mode, apply_mode=apply_mode)
    found = est.memory_of(lossy, 1_000_000, 4)
    assert found.residual == 250_000 * bytes_each
    exact = est.memory_of(config(), 1_000_000, 4)
    assert found.anchors == exact.anchors
    in_flight = rounds_in_flight(lossy)
    assert found.rounds == exact.rounds + in_flight * 250_000 // lossy.fragments * bytes_each
    told = est.of_memory(found, Room(None, None), 1).found
    assert ("1 MB residual" in told) == bool(bytes_each)


def test_a_residual_on_the_gpu_takes_no_memory_of_the_host() -> None:
    there = config(codec="int4", encode_on="device")
    assert est.memory_of(there, 1_000_000, 4) == est.memory_of(config(), 1_000_000, 4)


def test_advice_against_too_little_memory_saves_memory() -> None:
    # It advised fewer fragments, whose rounds take more memory.
    two_in_flight = {"fragments": 16}
    need = est.memory_of(config(**two_in_flight), 1_000_000, 1)
    advised = est.of_memory(need, Room(None, 1), 1).change
    for advice, changed in (
        ("larger MEND_FRAGMENTS", {"fragments": 64}),
        ("smaller MEND_OVERLAP_STEPS", {"overlap_steps": 1}),
        ("MEND_OUTER_OPTIMIZER_MOMENTUM=0", {"outer_optimizer_momentum": 0.0}),
    ):
        assert advice in advised
        less = est.memory_of(config(**{**two_in_flight, **changed}), 1_000_000, 1)
        assert less.total < need.total, advice


def test_memory_findings() -> None:
    need = Memory(8_000_000_000, 2_000_000_000)
    ok, note, problem = (
        est.of_memory(need, Room(available, limit), 1)
        for available, limit in ((100 * 10**9, None), (11 * 10**9, None), (9 * 10**9, 9 * 10**9))
    )
    assert (ok.severity, note.severity, problem.severity) == ("ok", "note", "problem")
    assert "10 GB of host memory (8 GB anchors, 2 GB rounds" in ok.found
    assert "MEND_OVERLAP_STEPS" in problem.change
    shared = est.of_memory(need, Room(None, 30 * 10**9), 4)
    assert shared.severity == "problem", "four ranks of this machine need four times as much"


def test_an_exchange_by_hand() -> None:
    """2 racks, 800 M weights in 8 fragments of 100 M: 400 MB over 1 Gbit/s are 3.2 s; one rank
    merges 100 M elements at 3 + 1 ns."""
    found = est.exchange_of(config(), 800_000_000, 1, mbit=1000.0, trip_ms=50.0, merge_ns=3.0)
    assert found.bytes == 400_000_000
    assert found.transfer_ms == pytest.approx(3200)
    assert found.trips_ms == est.ROUND_TRIPS * 50
    assert found.work_ms == pytest.approx(400)
    assert found.total_ms == pytest.approx(3600 + est.ROUND_TRIPS * 50)
    half = config(codec="bfloat16", racks=3, simulated_merge_delay_ms=100.0)
    more = est.exchange_of(half, 800_000_000, 4, mbit=1000.0, trip_ms=50.0, merge_ns=3.0)
    assert more.bytes == 400_000_000, "half the bytes from twice as many"
    assert more.work_ms == pytest.approx(100)
    assert more.delay_ms == 100


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_a_little_merging_is_timed(merge: str) -> None:
    assert est.merge_ns_per_element(merge, 3) > 0


def test_amounts_are_said_in_their_unit() -> None:
    assert est.amount(1.5e9) == "1.5 GB"
    assert est.amount(64e6) == "64 MB"


@pytest.mark.parametrize(
    ("codec", "size"), [("int8", 132 / 128), ("topk", 116 / 4096), ("powersgd-4", 8 / est.SIDE)]
)
def test_an_exchange_costs_what_every_round_sends_and_not_the_closing_one(
    codec: str, size: float
) -> None:
    assert est.item_bytes(codec) == pytest.approx(size, rel=0.01)
