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

pytestmark = pytest.mark.timeout(600)

LONG = ["one", "ddp 2, microbatches 2", "fsdp 2", "tp 2"]
SHORT = [
    *["one again", "threads", "checkpointed", "microbatches 2", "microbatches 4"],
    *[
        "ddp 2",
        "ddp 4",
        "ddp 8",
        "fsdp 4",
        "fsdp 2, microbatches 2",
        "tp 4, microbatches 2",
        "tp 8",
    ],
]
FUSED = ["fused tp 2", "sp 2, whole head", "sp 4, microbatches 2", "sp 8"]
RAGGED = ["padded", "packed"]
APART = ["run: one", "run: microbatches 4", "run: ddp 4"]
REFUSED = {"unfixed ddp 4": "c10d.allreduce_", "torch's tp 2": "linear of a DTensor"}

LIMIT_S = 560
"""For a machine that ten others share: eight ranks wait for each other often."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    """Case -> what it came to, or why it was refused."""
    steps = dict.fromkeys(LONG, 50) | dict.fromkeys(SHORT, 3) | dict.fromkeys(RAGGED, 5)
    steps |= {"fused": 10, "sp 2": 10} | dict.fromkeys(FUSED, 3)
    steps |= dict.fromkeys(APART, 3) | dict.fromkeys(REFUSED, 1)
    done = subprocess.run(
        [
            *[sys.executable, "-m", "tests.process.equal_bits", "3:one", "3:fused"],
            *(f"{count}:{name}" for name, count in steps.items()),
        ],
        cwd=Path(__file__).parents[2],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    short, short_fused, *said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in said] == list(steps)
    return {each["name"]: each["found"] for each in said} | {
        "one, 3 steps": short["found"],
        "fused, 3 steps": short_fused["found"],
    }


def differ(found: dict[str, dict[str, str]], one: str, others: Sequence[str]) -> set[str]:
    assert "weights" in found[one], found[one]
    return {other for other in others if found[other] != found[one]}


def test_fifty_steps_in_one_process_or_over_ranks(found: dict[str, dict[str, str]]) -> None:
    assert differ(found, "one", LONG) == set()


def test_every_other_cut(found: dict[str, dict[str, str]]) -> None:
    """Ranks by DDP, FSDP2 and TP, times microbatches; checkpointing; threads."""
    assert differ(found, "one, 3 steps", SHORT) == set()
    assert found["one"] != found["one, 3 steps"]


def test_tokens_vocabulary_and_fused_layers_cut(found: dict[str, dict[str, str]]) -> None:
    """Sequence parallelism; gate and up as one layer; the loss over shares of the words."""
    assert differ(found, "fused", ["sp 2"]) == set()
    assert differ(found, "fused, 3 steps", FUSED) == set()
    assert found["fused"] != found["one"]


def test_packed_sequences_are_padded_ones(found: dict[str, dict[str, str]]) -> None:
    assert differ(found, "padded", ["packed"]) == set()


def test_without_level_shape_the_bits_part(found: dict[str, dict[str, str]]) -> None:
    assert len({found[name]["weights"] for name in APART}) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_a_sum_in_no_fixed_order_is_refused(found: dict[str, dict[str, str]], name: str) -> None:
    assert REFUSED[name] in found[name]["fault"]
