"""How far the merged model moves, where every step of every rack moves each weight by one: the mean
of racks that trained side by side is no longer than the longest chain of steps, each of which was
made on a model that has the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mend.types import MS, SECOND
from mend_lab.sim import World
from tests.noted import pairs

STEPS, PERIOD = 200, 16
LONGER_MAX = 1.05
"""Parts of a round are worked out from what the coordinator knows when it closes."""


class Straight(World):
    """Outer steps of lr 1 without momentum: the mean of the racks."""

    def _updates(self, rack: int) -> list[list[Tensor]]:
        scenario = self.scenario
        ones = [torch.ones(scenario.shape(p)) for p in range(scenario.fragments)]
        return [ones] * 64

    def moved(self, fragment: int) -> float:
        """How far the merged model has moved at the end, which is the same for all weights."""
        trainer = next(iter(self.trainings.values())).trainer
        begun = self._model(0, 0)[1][fragment].anchor.values
        way_N = trainer.fragment_states[fragment].anchor.values - begun
        assert float(way_N.max() - way_N.min()) < 0.01
        return float(way_N.mean())

    def noted(self, wanted: str, fragment: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(rack, fields) of these notes."""
        for peer, training in self.trainings.items():
            for kind, fields in pairs(training.process.notes):
                if kind == wanted and fields["fragment"] == fragment:
                    yield peer.rack, fields

    def longest_chain(self, fragment: int) -> int:
        """Steps in the longest chain, from the log and from when each rack applied what."""
        commits = {each["version"]: each for _, each in self.noted("commit", fragment)}
        applied = [(r, f["step"], f["version"]) for r, f in self.noted("applied", fragment)]
        length = {0: 0}
        for version in range(1, len(commits) + 1):
            ways = [length[version - 1]]
            for member in commits[version]["members"]:
                captured = member["capture_step"]
                ways.append(captured)
                ways += [
                    length[had] + captured - step
                    for rack, step, had in applied
                    if rack == member["rack"] and had < version and step <= captured
                ]
            length[version] = max(ways)
        return length[len(commits)]


@pytest.mark.parametrize("racks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("jitter_ms", [0, 100, 600])
def test_the_merged_way_is_no_longer_than_the_longest_chain_of_steps(
    racks: int, jitter_ms: int
) -> None:
    """A rack whose next offer was of 192 steps weighed as its last one, of 8, or as its tail. What
    others merged without it then counted for most of a round, and its own for its whole part: 234
    for two racks that had moved 200 each."""
    for seed, slower in ((1, 0), (2, 1)):
        times_ns = tuple(10 * MS + slower * rack * MS for rack in range(racks))
        world = Straight(
            seed=seed, racks=racks, steps=STEPS, step_ns=times_ns, period_steps=PERIOD,
            overlap_steps=4, jitter_ns=jitter_ms * MS, shutdown_ns=60 * SECOND,
        )  # fmt: skip
        report = world.run()
        assert report.problems == []
        for fragment in range(world.scenario.fragments):
            moved, chain = world.moved(fragment), world.longest_chain(fragment)
            assert moved <= LONGER_MAX * chain, (seed, slower, fragment)
            assert moved > 0.9 * STEPS, (seed, slower, fragment)
            if not jitter_ms and not slower:
                assert (moved, chain) == (pytest.approx(STEPS), STEPS)
