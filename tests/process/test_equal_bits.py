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
    "fused": ["fused tp 2", "sp 2", "sp 2, whole head", "sp 4", "sp 4, microbatches 2", "sp 8"],
    "padded": ["packed"],
}
"""One process -> what must come to the same bits: DDP, FSDP2, tensor and sequence parallelism."""

STEPS, FEW_STEPS = 50, 2

FEW = frozenset(
    [
        *["one again", "threads", "checkpointed", "ddp 2, microbatches 2", "ddp 4, as if large"],
        *["fsdp 2, microbatches 2", "tp 4, microbatches 2", "tp 8, checkpointed"],
        *["fused tp 2", "sp 2, whole head", "sp 4, microbatches 2"],
    ]
)
"""Cases that make FEW_STEPS in `make test`: what they cut is cut for STEPS by others, too."""

APART = ["run: one", "run: microbatches 4", "run: ddp 4"]
REFUSED = {"unfixed ddp 4": "c10d.allreduce_", "torch's tp 2": "linear of a DTensor"}

LIMIT_S = 560
"""For a machine that ten others share: eight ranks wait for each other often."""

Asked = tuple[int, str]
"""Steps, case."""


@dataclass(frozen=True)
class Found:
    few: frozenset[str]
    """Cases of FEW_STEPS."""

    by_case: dict[Asked, dict[str, str]]
    """What each came to, or why it was refused."""

    def steps(self, case: str) -> int:
        return FEW_STEPS if case in self.few else STEPS

    def differing(self, one: str) -> set[str]:
        """Cuts that did not come to what `one` did in as many steps."""
        for steps in (STEPS, FEW_STEPS):
            assert "weights" in self.by_case[steps, one], self.by_case[steps, one]
        assert self.by_case[STEPS, one] != self.by_case[FEW_STEPS, one]
        return {
            case
            for case in CUTS[one]
            for steps in [self.steps(case)]
            if self.by_case[steps, case] != self.by_case[steps, one]
        }


@pytest.fixture(scope="module", params=[FEW, pytest.param(frozenset(), marks=pytest.mark.slow)],
                ids=["quick", "whole"])  # fmt: skip
def found(request: pytest.FixtureRequest, nursery: Nursery) -> Found:
    found = Found(request.param, {})
    cases = [(steps, one) for one in CUTS for steps in (STEPS, FEW_STEPS)]
    cases += [(found.steps(case), case) for cuts in CUTS.values() for case in cuts]
    cases += [(FEW_STEPS, case) for case in APART] + [(1, case) for case in REFUSED]
    done = subprocess.run(
        [nursery.python, "-m", "tests.process.equal_bits",
         *(f"{steps}:{case}" for steps, case in cases)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for each in map(json.loads, done.stdout.splitlines()):
        found.by_case[each["steps"], each["name"]] = each["found"]
    assert found.by_case.keys() == set(cases)
    return found


def test_ranks_microbatches_checkpointing_and_threads(found: Found) -> None:
    """DDP, FSDP2 and TP over up to 8 ranks."""
    assert found.differing("one") == set()


def test_tokens_vocabulary_and_fused_layers_cut(found: Found) -> None:
    """Sequence parallelism; gate and up as one layer; the loss over shares of the words."""
    assert found.differing("fused") == set()
    assert found.by_case[STEPS, "fused"] != found.by_case[STEPS, "one"]


def test_packed_sequences_are_padded_ones(found: Found) -> None:
    assert found.differing("padded") == set()


def test_without_level_shape_the_bits_part(found: Found) -> None:
    assert len({found.by_case[FEW_STEPS, name]["weights"] for name in APART}) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_a_sum_in_no_fixed_order_is_refused(found: Found, name: str) -> None:
    assert REFUSED[name] in found.by_case[1, name]["fault"]
