"""Short jobs whose racks fall out of phase: what is merged may not go further than training did.

Rounds that name one rack after the other must average what the racks did at the same time. If they
add it up, two racks go twice as far as each of them alone, and the loss of a short job is worse
than that of a rack alone, while every token is merged.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from mend.consensus.weights import WHOLE, part_of, stretch_of
from mend.types import MS
from mend_lab.sim.scenario import Scenario, calm
from mend_lab.sim.world import World

FURTHER = 1.3
"""Times the longest chain. An absent rack is weighed before it offers, so no bound is exact."""


def hurried(seed: int) -> Scenario:
    """25 steps of a millisecond, two periods; some racks pause for some steps."""
    rng = random.Random(seed)
    racks = rng.choice([2, 2, 3])
    pauses = tuple(
        (rng.randrange(racks), rng.randrange(25), rng.choice([2, 4, 8]) * MS)
        for _ in range(rng.randrange(1, 4))
    )
    return calm(
        seed=seed, racks=racks, steps=25, step_ns=MS, period_steps=12, overlap_steps=3,
        delay_ns=rng.choice([0, MS]), jitter_ns=rng.choice([0, 3 * MS]), pauses=pauses,
        momentum=rng.choice([0.0, 0.9]),
    )  # fmt: skip


def further(world: World) -> float:
    """How many times as far as the longest chain of training the merged movement goes, in steps,
    at any version. In a chain each piece of work began on an anchor that holds the one before it:
    on an offer's base, or after the rack's own offer."""
    period = world.scenario.period_steps
    chains: dict[tuple[int, int], int] = {}
    own: dict[tuple[int, int], tuple[int, int]] = {}
    gone: dict[int, float] = defaultdict(float)
    most = 0.0
    for (fragment, version), commit in sorted(world.checkers.commits.items()):
        named = [(each.tokens, each.steps) for each in commit.members]
        absent = [(each.tokens, each.steps) for each in commit.absent]
        part = part_of(named, absent, token_weighted=True, period_steps=period) / WHOLE
        mean = sum(tokens for tokens, _ in named) / sum(tokens / steps for tokens, steps in named)
        gone[fragment] += part * mean * stretch_of(named, token_weighted=True, period_steps=period)
        longest = chains.get((fragment, version - 1), 0)
        for member in commit.members:
            key = (fragment, member.rack)
            chain, base = own.get(key, (0, 0))
            chain = max(chain, chains.get((fragment, base), 0)) + member.steps
            own[key] = (chain, member.base)
            longest = max(longest, chain)
        chains[fragment, version] = longest
        most = max(most, gone[fragment] / longest)
    return most


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.slow)], ids=str
)
def test_racks_out_of_phase_go_no_further_than_they_trained(seeds: range) -> None:
    found = []
    for seed in seeds:
        world = World(hurried(seed))
        assert world.run().problems == []
        found.append((further(world), seed))
    found.sort()
    assert found[-1][0] <= FURTHER, found[-5:]
    assert found[len(seeds) // 2][0] <= 1.01, "most are averaged well"
