"""One training, cut in many ways, by real processes: equal weights, optimizer state and losses.

Without level shape the same script comes to other bits in each of them, which is tested as well: a
test that could not tell them apart would prove nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.process.racks import ROOT, Nursery, environment

pytestmark = pytest.mark.timeout(600)

LONG = ["one", "ddp 2, microbatches 2", "fsdp 2", "tp 2"]
SHORT = [
    *["one again", "threads", "checkpointed", "microbatches 2", "microbatches 4"],
    *["ddp 2", "ddp 4", "ddp 8", "fsdp 4", "fsdp 2, microbatches 2"],
    *["tp 4, microbatches 2", "tp 8"],
]
FUSED = ["fused tp 2", "sp 2, whole head", "sp 4, microbatches 2", "sp 8"]
RAGGED = ["padded", "packed"]
APART = ["run: one", "run: microbatches 4", "run: ddp 4"]
REFUSED = {"unfixed ddp 4": "c10d.allreduce_", "torch's tp 2": "linear of a DTensor"}

LIMIT_S = 560
"""For a machine that ten others share: eight ranks wait for each other often."""


@dataclass(frozen=True)
class Extent:
    """Steps of the cases that train on for long, of the others, and cases that are left out."""

    long: int
    short: int
    without: frozenset[str] = frozenset()

    def of(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.without]

    def steps(self) -> dict[str, int]:
        found = dict.fromkeys(LONG, self.long) | dict.fromkeys(SHORT, self.short)
        found |= dict.fromkeys(RAGGED, 5) | {"fused": self.long, "sp 2": self.long}
        found |= dict.fromkeys([*FUSED, *APART], self.short) | dict.fromkeys(REFUSED, 1)
        return {name: count for name, count in found.items() if name not in self.without}


QUICK = Extent(
    long=50,
    short=2,
    without=frozenset(
        ["one again", "microbatches 2", "ddp 2", "fsdp 4", "sp 8", "fused tp 2", "sp 2, whole head"]
    ),
)
WHOLE = Extent(long=50, short=3)


@dataclass(frozen=True)
class Found:
    extent: Extent
    by_case: dict[str, dict[str, str]]
    """Case -> what it came to, or why it was refused."""

    def differing(self, one: str, others: Iterable[str]) -> set[str]:
        assert "weights" in self.by_case[one], self.by_case[one]
        compared = self.extent.of(others)
        return {other for other in compared if self.by_case[other] != self.by_case[one]}


@pytest.fixture(scope="module", params=[QUICK, pytest.param(WHOLE, marks=pytest.mark.slow)],
                ids=["quick", "whole"])  # fmt: skip
def found(request: pytest.FixtureRequest, nursery: Nursery) -> Found:
    extent: Extent = request.param
    steps, few = extent.steps(), extent.short
    cases = [f"{few}:one", f"{few}:fused", *(f"{count}:{name}" for name, count in steps.items())]
    done = subprocess.run(
        [nursery.python, "-m", "tests.process.equal_bits", *cases], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    short, short_fused, *said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in said] == list(steps)
    by_case = {each["name"]: each["found"] for each in said}
    return Found(
        extent, by_case | {"one, short": short["found"], "fused, short": short_fused["found"]}
    )


def test_many_steps_in_one_process_or_over_ranks(found: Found) -> None:
    assert found.differing("one", LONG) == set()


def test_every_other_cut(found: Found) -> None:
    """Ranks by DDP, FSDP2 and TP, times microbatches; checkpointing; threads."""
    assert found.differing("one, short", SHORT) == set()
    assert found.by_case["one"] != found.by_case["one, short"]


def test_tokens_vocabulary_and_fused_layers_cut(found: Found) -> None:
    """Sequence parallelism; gate and up as one layer; the loss over shares of the words."""
    assert found.differing("fused", ["sp 2"]) == set()
    assert found.differing("fused, short", FUSED) == set()
    assert found.by_case["fused"] != found.by_case["one"]


def test_packed_sequences_are_padded_ones(found: Found) -> None:
    assert found.differing("padded", ["packed"]) == set()


def test_without_level_shape_the_bits_part(found: Found) -> None:
    assert len({found.by_case[name]["weights"] for name in APART}) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_a_sum_in_no_fixed_order_is_refused(found: Found, name: str) -> None:
    assert REFUSED[name] in found.by_case[name]["fault"]
