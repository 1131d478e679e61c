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
CUTS = {
    "one process": ("one", ONE_PROCESS),
    "ddp": ("one", ["ddp 2", "ddp 2, microbatches 2", "ddp 4", "ddp 4, as if large", "ddp 8"]),
    "fsdp": ("one", ["fsdp 2", "fsdp 4", "fsdp 2, microbatches 2"]),
    "tp": ("one", ["tp 2", "tp 4", "tp 4, microbatches 2"]),
    "tp 8": ("one", ["tp 8", "tp 8, checkpointed"]),
    "fused": ("fused", ["fused tp 2"]),
    "sp": ("fused", ["sp 2", "sp 2, whole head", "sp 4", "sp 4, microbatches 2"]),
    "sp 8": ("one", ["sp 8"]),
    "wide sp 8": ("wide", ["wide sp 8"]),
    "autocast": ("autocast", AUTOCAST),
    "packed": ("padded", ["packed"]),
}
"""One process, and what must come to the same bits: DDP, FSDP2, tensor and sequence parallelism."""

STEPS, SOME_STEPS, FEW_STEPS = 50, 10, 2

FEWER = {
    case: SOME_STEPS if case in ("microbatches 4", "ddp 4", "fsdp 2", "tp 2", "sp 2") else FEW_STEPS
    for _, cases in CUTS.values()
    for case in cases
}
"""Steps in `make test`: one cut of each kind trains for some more."""

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
def baseline(nursery: Nursery) -> dict[Asked, dict[str, str]]:
    """One process, after every number of steps that a quick test compares with it."""
    quick = {(FEWER[case], one) for one, cases in CUTS.values() for case in cases}
    return trained(nursery, {*quick, *((FEW_STEPS, one) for one, _ in CUTS.values()), (1, "one")})


@pytest.mark.parametrize("fewer", [FEWER, pytest.param({}, marks=pytest.mark.slow)],
                         ids=["quick", "whole"])  # fmt: skip
@pytest.mark.parametrize("cut", CUTS)
def test_however_it_is_cut_the_bits_are_those_of_one_process(
    nursery: Nursery, baseline: dict[Asked, dict[str, str]], cut: str, fewer: dict[str, int]
) -> None:
    """Ranks, microbatches, checkpointing, threads; tokens, vocabulary and fused layers; packing."""
    one, cuts = CUTS[cut]
    steps = {case: fewer.get(case, STEPS) for case in cuts}
    missing = {(n, one) for n in steps.values()} - baseline.keys()
    found = trained(nursery, {*missing, *((n, name) for name, n in steps.items())})
    assert all("weights" in each for each in found.values()), found
    alone = {**baseline, **found}
    assert {case for case, n in steps.items() if found[n, case] != alone[n, one]} == set()


def test_other_steps_and_other_layers_come_to_other_bits(
    baseline: dict[Asked, dict[str, str]],
) -> None:
    """Or the comparisons would say nothing."""
    cases = [(FEW_STEPS, one) for one in ("one", "fused", "wide", "padded")]
    found = {baseline[case]["weights"] for case in [*cases, (1, "one")]}
    assert len(found) == len(cases) + 1


def test_without_level_shape_the_bits_part(nursery: Nursery) -> None:
    found = trained(nursery, [(FEW_STEPS, case) for case in APART])
    assert len({each["weights"] for each in found.values()}) == 3


def test_a_sum_in_no_fixed_order_is_refused(nursery: Nursery) -> None:
    found = trained(nursery, [(1, case) for case in REFUSED])
    for case, named in REFUSED.items():
        assert named in found[1, case]["fault"]
