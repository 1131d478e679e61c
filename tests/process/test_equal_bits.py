"""One training, cut in many ways, by real processes: equal weights, optimizer state and losses.

Without level shape the same script comes to other bits in each of them, which is tested as well: a
test that could not tell them apart would prove nothing.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

import pytest

from tests.process.racks import ROOT, Nursery, environment

pytestmark = pytest.mark.timeout(600)

CUTS = {
    "one": [
        *["one again", "threads", "checkpointed", "microbatches 2", "microbatches 4"],
        *["ddp 2", "ddp 2, microbatches 2", "ddp 4", "ddp 4, as if large", "ddp 8"],
        *["fsdp 2", "fsdp 4", "fsdp 2, microbatches 2"],
        *["tp 2", "tp 4", "tp 4, microbatches 2", "tp 8", "tp 8, checkpointed"],
    ],
    "fused": ["fused tp 2", "sp 2", "sp 2, whole head", "sp 4, microbatches 2", "sp 8"],
}
"""One process -> what must come to the same bits: DDP, FSDP2, tensor and sequence parallelism."""

RAGGED = ["padded", "packed"]
APART = ["run: one", "run: microbatches 4", "run: ddp 4"]
REFUSED = {"unfixed ddp 4": "c10d.allreduce_", "torch's tp 2": "linear of a DTensor"}

LONG = frozenset(
    ["microbatches 4", "ddp 2, microbatches 2", "ddp 4", "ddp 8", "fsdp 2", "tp 2", "sp 2"]
)
LIMIT_S = 560
"""For a machine that ten others share: eight ranks wait for each other often."""


@dataclass(frozen=True)
class Extent:
    """Cases that train for `most` steps, steps of the others, and cases that are left out."""

    long: frozenset[str]
    most: int
    short: int
    ragged: int
    without: frozenset[str] = frozenset()

    def cuts(self, one: str) -> dict[str, int]:
        """Case -> steps."""
        cases = [case for case in CUTS[one] if case not in self.without]
        return {case: self.most if case in self.long else self.short for case in cases}

    def steps(self) -> dict[str, int]:
        found = dict.fromkeys(CUTS, self.most)
        for one in CUTS:
            found |= self.cuts(one)
        found |= dict.fromkeys(RAGGED, self.ragged) | dict.fromkeys(APART, self.short)
        return found | dict.fromkeys(REFUSED, 1)


QUICK = Extent(
    long=LONG,
    most=12,
    short=2,
    ragged=5,
    without=frozenset(
        [
            *["one again", "microbatches 2", "ddp 2", "fsdp 4", "tp 4"],
            *["tp 8", "sp 8", "fused tp 2", "sp 2, whole head"],
        ]
    ),
)
WHOLE = Extent(
    long=LONG
    | {"microbatches 2", "ddp 2", "fsdp 4", "tp 4", "tp 8", "sp 4, microbatches 2", "sp 8"},
    most=50,
    short=3,
    ragged=50,
)


@dataclass(frozen=True)
class Found:
    extent: Extent
    by_case: dict[str, dict[str, str]]
    """Case -> what it came to, or why it was refused."""

    def differing(self, one: str) -> set[str]:
        """Cuts that did not come to what `one` did in as many steps."""
        cuts = self.extent.cuts(one)
        assert set(cuts.values()) == {self.extent.most, self.extent.short}
        short = f"{one}, short"
        assert "weights" in self.by_case[one], self.by_case[one]
        assert self.by_case[one] != self.by_case[short]
        return {
            case
            for case, steps in cuts.items()
            if self.by_case[case] != self.by_case[one if steps == self.extent.most else short]
        }


@pytest.fixture(scope="module", params=[QUICK, pytest.param(WHOLE, marks=pytest.mark.slow)],
                ids=["quick", "whole"])  # fmt: skip
def found(request: pytest.FixtureRequest, nursery: Nursery) -> Found:
    extent: Extent = request.param
    steps = extent.steps()
    short = [f"{extent.short}:{one}" for one in CUTS]
    cases = [*short, *(f"{count}:{name}" for name, count in steps.items())]
    done = subprocess.run(
        [nursery.python, "-m", "tests.process.equal_bits", *cases], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in said] == [*CUTS, *steps]
    names = [*(f"{one}, short" for one in CUTS), *steps]
    return Found(extent, dict(zip(names, (each["found"] for each in said), strict=True)))


def test_ranks_microbatches_checkpointing_and_threads(found: Found) -> None:
    """DDP, FSDP2 and TP over up to 8 ranks."""
    assert found.differing("one") == set()


def test_tokens_vocabulary_and_fused_layers_cut(found: Found) -> None:
    """Sequence parallelism; gate and up as one layer; the loss over shares of the words."""
    assert found.differing("fused") == set()
    assert found.by_case["fused"] != found.by_case["one"]


def test_packed_sequences_are_padded_ones(found: Found) -> None:
    assert "weights" in found.by_case["padded"], found.by_case["padded"]
    assert found.by_case["packed"] == found.by_case["padded"]


def test_without_level_shape_the_bits_part(found: Found) -> None:
    assert len({found.by_case[name]["weights"] for name in APART}) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_a_sum_in_no_fixed_order_is_refused(found: Found, name: str) -> None:
    assert REFUSED[name] in found.by_case[name]["fault"]
