"""One training, cut in many ways, by real processes: equal weights, optimizer state and losses.

Without level shape the same script comes to other bits in each of them, which is tested as well: a
test that could not tell them apart would prove nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable

import pytest

from tests.process.racks import ROOT, Nursery, environment

pytestmark = pytest.mark.timeout(600)

ONE_PROCESS = ["one again", "threads", "checkpointed", "microbatches 2", "microbatches 4"]
AUTOCAST = [f"autocast, {how}" for how in ("microbatches 4", "ddp 2", "fsdp 2", "tp 2")]
EVERYWHERE = ["microbatches 4", "ddp 2", "checkpointed"]
CUTS = {
    "one process": ("one", ONE_PROCESS),
    "ddp": ("one", ["ddp 2", "ddp 2, microbatches 2", "ddp 4", "ddp 4, as if large", "ddp 8"]),
    "fsdp": ("one", ["fsdp 2", "fsdp 4", "fsdp 2, microbatches 2"]),
    "tp": ("one", ["tp 2", "tp 4", "tp 4, microbatches 2"]),
    "tp 8": ("one", ["tp 8", "tp 8, checkpointed"]), "fused": ("fused", ["fused tp 2"]),
    "sp": ("fused", ["sp 2", "sp 2, whole head", "sp 4", "sp 4, microbatches 2"]),
    "sp 8": ("one", ["sp 8"]), "wide sp 8": ("wide", ["wide sp 8"]),
    "autocast": ("autocast", AUTOCAST), "packed": ("padded", ["packed"]),
    "everywhere": ("everywhere", [f"everywhere, {how}" for how in EVERYWHERE]),
    "everywhere, packed": ("everywhere, padded", ["everywhere, packed"]),
}  # fmt: skip
"""One process, and what must come to the same bits: DDP, FSDP2, tensor and sequence parallelism."""

STEPS, FEW_STEPS = 10, 2
"""Of what is compared with one process, and of what must differ."""

APART = ["run: one", "run: microbatches 4", "run: ddp 4"]
REFUSED = {"unfixed ddp 4": "c10d.allreduce_", "torch's tp 2": "linear of a DTensor"}

LIMIT_S = 560
"""For a machine that ten others share: eight ranks wait for each other often."""

Asked = tuple[int, str]
"""Steps, case."""


def trained(nursery: Nursery, asked: Iterable[Asked]) -> dict[Asked, dict[str, str]]:
    """What each came to, or why it was refused."""
    cases = set(asked)
    words = [f"{steps}:{case}" for steps, case in sorted(cases)]
    done = subprocess.run(
        [nursery.python, "-m", "tests.process.equal_bits", *words],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(each["steps"], each["name"]): each["found"] for each in said}
    assert found.keys() == cases
    return found


@pytest.fixture(scope="module")
def quick(nursery: Nursery) -> dict[Asked, dict[str, str]]:
    """What the tests below compare, by one process that loads torch."""
    plain = {(FEW_STEPS, name) for name in (*APART, *(one for one, _ in CUTS.values()))}
    return trained(nursery, {*plain, (1, "one"), *((1, case) for case in REFUSED)})


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_cut_training_has_the_bits_of_one_process(nursery: Nursery, cut: str) -> None:
    """Ranks, microbatches, checkpointing, threads; tokens, vocabulary and fused layers; packing."""
    one, cuts = CUTS[cut]
    found = trained(nursery, {(STEPS, name) for name in (one, *cuts)})
    assert all("weights" in each for each in found.values()), found
    assert {case for case in cuts if found[STEPS, case] != found[STEPS, one]} == set()


def test_other_steps_and_layers_have_other_bits(
    quick: dict[Asked, dict[str, str]],
) -> None:
    """Or the comparisons would say nothing."""
    cases = [(FEW_STEPS, one) for one in ("one", "fused", "wide", "padded")]
    found = {quick[case]["weights"] for case in [*cases, (1, "one")]}
    assert len(found) == len(cases) + 1


def test_cuts_without_level_shape_have_other_bits(quick: dict[Asked, dict[str, str]]) -> None:
    assert len({quick[FEW_STEPS, case]["weights"] for case in APART}) == 3


def test_sum_in_no_fixed_order_is_refused(quick: dict[Asked, dict[str, str]]) -> None:
    for case, named in REFUSED.items():
        assert named in quick[1, case]["fault"]
