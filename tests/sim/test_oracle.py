"""Simulated jobs, done again by the reference: an independent program must find the same bits.

The reference is given what was decided (commits) and what the racks did (captures, applies,
discards); it does the training and all arithmetic itself. Every version that the log decided is
compared by the digest in its record, what the racks end with bit for bit.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from mend.consensus.weights import WHOLE
from mend.engine.compute.digest import digest_of
from mend.types import Peer, owned_span
from mend_lab import reference
from mend_lab.sim import Scenario, World, draw
from mend_lab.sim.scenario import OFFERS_BEFORE, python_of, rounds_before
from mend_lab.sim.world import plain_fragments
from tests.noted import pairs
from tests.reference_commits import commit_of
from tests.sim.extent import by_length


def fits(scenario: Scenario) -> bool:
    """No crash, as a dead rack leaves no facts; no NaN, whose bits nobody promises; no moments, of
    which `sim.moment_checks` computes every merge again; and a checkpoint to begin with only where
    it has no bases of low rank, which the reference makes from version 0 on."""
    dies = any(fault.kind in ("crash", "restart") for fault in scenario.faults)
    bases = scenario.first and scenario.payload.startswith("powersgd")
    dies = dies or scenario.evicts
    return not (scenario.non_finite or dies or bases or scenario.moments)


CHOSEN = [seed for seed in range(24) if fits(draw(seed))]
RARE = {861: "dropped", 54: "discarded", 62: "discarded"}
"""What becomes of an offer in few runs only: a commit drops it, its rack forgets it."""

RESUMED = 794
"""Goes on from a checkpoint, with a momentum that rises with the rounds, those of before it too."""

PARTIAL = 19

TURNED = 89
"""Racks of two ranks, whose offers point against the momentum: by one rank alone they would not."""


def settings_of(scenario: Scenario) -> reference.Settings:
    return reference.Settings(
        fragments=[[p] for p in range(scenario.fragments)],  # one tensor each
        period=scenario.period_steps,
        overlap=scenario.overlap_steps,
        apply_mode=scenario.apply_mode,
        outer_lr=0.7 if scenario.momentum else 1.0,
        momentum=scenario.momentum,
        ramp=scenario.ramp,
        payload=scenario.payload,
        ranks=scenario.ranks,
        radial=[p for p, (plain,) in enumerate(plain_fragments(scenario)) if not plain]
        if scenario.merge == "rda"
        else (),
    )


def rack_of(world: World, rack: int, first: list[Tensor]) -> reference.Rack:
    """The same updates and tokens as in the simulation, from version 0."""
    parameters = [each.clone() for each in first]
    updates = world._updates(rack)
    training = world.trainings[Peer(rack, 0)]

    def train(step: int) -> int:
        for parameter, change in zip(parameters, world._update(rack, step, updates), strict=True):
            parameter.add_(change)
        return training._tokens(step) * world.scenario.ranks

    return reference.Rack(parameters, train)


def facts_of(world: World, peer: Peer) -> reference.Facts:
    training = world.trainings[peer]
    made: dict[str, Any] = {
        "captured": lambda f: reference.Captured(
            f["step"], f["fragment"], f["seq"], f.get("closing", False)
        ),
        "applied": lambda f: reference.Applied(f["step"], f["fragment"], f["version"]),
        "discarded": lambda f: reference.Discarded(f["step"], f["fragment"], f["seq"]),
    }
    notes = training.process.notes
    events = [made[kind](fields) for kind, fields in pairs(notes) if kind in made]
    return reference.Facts(training.trainer.step, events)


def fates(world: World) -> set[object]:
    notes = [note for t in world.trainings.values() for note in t.process.notes]
    return {fields["fate"] if kind == "applied" else kind for kind, fields in pairs(notes)}


def commits_of(world: World) -> list[reference.Commit]:
    return [commit_of(fields) for fields in logged(world)]


def logged(world: World) -> list[dict[str, Any]]:
    return [commit.fields() for commit in world.checkers.commits.values()]


def bases_in(
    outcome: reference.Outcome, fragment: int, version: int, staleness_max_rounds: int, rank: int
) -> torch.Tensor:
    """Of the versions that a merge into the next one may name, as an anchor holds them."""
    slots, found = (staleness_max_rounds + 2) // 2 * 2, [torch.empty(0)]
    for slot in range(slots if outcome.low_rank else 0):
        newest = version - (version - slot) % slots
        bases = outcome.low_rank[fragment].bases[newest if newest >= 0 else -(newest % 2)]
        mine = [bases[key] for key in sorted(bases) if key[0] == rank]
        found += [torch.from_numpy(basis).float().reshape(-1) for basis in mine]
    return torch.cat(found)


def digest_in(
    outcome: reference.Outcome, fragment: int, version: int, scenario: Scenario, rank: int
) -> str:
    """Of one rank's part of an anchor of the reference."""
    anchor, ranks = outcome.anchors[fragment][version], scenario.ranks
    bases = bases_in(outcome, fragment, version, scenario.staleness_max_rounds, rank)
    start, stop = owned_span(anchor.values.numel(), ranks, rank)
    parts = [x[start:stop] for x in (anchor.values, anchor.state) if x is not None]
    data, rounds = torch.cat([*parts, bases]), int(anchor.rounds * WHOLE)
    return digest_of(data, stop - start, version, rounds, bases.numel())


def test_pinned_seed_has_partial_rounds_and_changing_momentum() -> None:
    assert PARTIAL in CHOSEN
    world = World(PARTIAL)
    assert world.scenario.momentum
    assert world.scenario.ramp
    world.run()
    parts = [fields["part"] for fields in logged(world)]
    assert 0 < min(parts) < max(parts) < 1
    assert len({fields["momentum"] for fields in logged(world)}) > 1


def test_pinned_seed_merges_cut_racks_without_momentum() -> None:
    world = World(TURNED)
    assert world.scenario.ranks > 1
    assert world.scenario.momentum
    assert fits(world.scenario)
    world.run()
    commits = logged(world)
    last = {each["fragment"]: each["version"] for each in commits}
    assert any(
        each["momentum"] == 0 < each["rounds"]
        and len(each["members"]) > 1
        and each["version"] < last[each["fragment"]]
        for each in commits
    )


def test_pinned_seed_resumes_from_a_checkpoint_with_momentum() -> None:
    scenario = draw(RESUMED)
    assert fits(scenario)
    assert scenario.first
    assert scenario.momentum
    assert scenario.ramp


@pytest.mark.parametrize("seed", [*by_length(CHOSEN), *RARE, RESUMED, TURNED])
def test_the_reference_finds_the_same_bits(seed: int) -> None:
    world = World(seed)
    scenario, ranks = world.scenario, world.scenario.ranks
    first = [p.detach().clone() for p in world.trainings[Peer(0, 0)].parameters]
    report = world.run()
    assert not report.problems, python_of(scenario)
    assert RARE.get(seed, "named") in fates(world), "it does not happen any more: another seed"
    facts = [facts_of(world, Peer(rack, 0)) for rack in range(scenario.racks)]
    for peer in world.trainings:
        assert facts_of(world, peer) == facts[peer.rack], f"{peer} did not do what rank 0 did"

    racks = [rack_of(world, rack, first) for rack in range(scenario.racks)]
    start = reference.Start()
    if scenario.first:
        rounds = Fraction(rounds_before(scenario.first), WHOLE)
        start = reference.Start(scenario.first, rounds, OFFERS_BEFORE)
    decided = commits_of(world)
    outcome = reference.replay(racks, settings_of(scenario), facts, decided, start)

    for fields in logged(world):
        fragment, version = fields["fragment"], fields["version"]
        found = [digest_in(outcome, fragment, version, scenario, rank) for rank in range(ranks)]
        assert tuple(found) == fields["digests"], f"fragment {fragment} version {version}"
    for peer, training in world.trainings.items():
        for fragment, state in enumerate(training.trainer.fragment_states):
            theirs = outcome.anchors[fragment][state.anchor.version].values
            start, stop = owned_span(theirs.numel(), ranks, peer.rank)
            mine = state.anchor.values.view(torch.int32)
            assert torch.equal(mine, theirs[start:stop].view(torch.int32)), (peer, fragment)
