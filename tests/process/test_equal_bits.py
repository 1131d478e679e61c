"""One training, cut in many ways, by real processes: equal weights, optimizer state and losses.

Without level shape the same script comes to other bits in each of them, which is tested as well: a
test that could not tell them apart would prove nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.process.racks import environment

pytestmark = pytest.mark.timeout(400)

LONG = ["one", "microbatches 4", "ddp 4", "fsdp 2"]
SHORT = [
    *["one", "one again", "threads", "checkpointed", "microbatches 2", "ddp 2", "ddp 8", "fsdp 4"],
    *["ddp 2, microbatches 2", "fsdp 2, microbatches 2"],
    *["tp 2", "tp 4, microbatches 2", "tp 8"],
]
LIMIT_S = 380
"""Alone on two cores it takes a tenth of that."""


def trained(steps: int, cases: Sequence[str]) -> dict[str, dict[str, str]]:
    """Case -> what it came to."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.process.equal_bits", str(steps), *cases],
        cwd=Path(__file__).parents[2],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in said] == list(cases)
    return {each["name"]: each["found"] for each in said}


def all_equal(found: dict[str, dict[str, str]]) -> None:
    first = next(iter(found.values()))
    assert "fault" not in first, first
    assert {name: each for name, each in found.items() if each != first} == {}


def test_fifty_steps_in_one_process_or_over_ranks_and_microbatches() -> None:
    all_equal(trained(50, LONG))


def test_every_other_cut() -> None:
    """Ranks by DDP, FSDP2 and TP, times microbatches; checkpointing; threads."""
    all_equal(trained(6, SHORT))


def test_packed_sequences_are_padded_ones() -> None:
    all_equal(trained(12, ["padded", "packed"]))


def test_without_level_shape_the_bits_part() -> None:
    found = trained(6, ["run: one", "run: microbatches 4", "run: ddp 4"])
    assert len({each["weights"] for each in found.values()}) == 3, found


def test_a_sum_over_ranks_in_no_fixed_order_is_refused() -> None:
    found = trained(1, ["unfixed ddp 4", "torch's tp 2"])
    assert "c10d.allreduce_" in found["unfixed ddp 4"]["fault"]
    assert "linear of a DTensor" in found["torch's tp 2"]["fault"]
