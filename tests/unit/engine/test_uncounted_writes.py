"""Who moved the weights: signs, and how long one of them is no reason to speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mend import MendConfig, session
from mend.engine.hooks.uncounted_writes import CANARIES_MAX, SIGNS_MAX, UncountedWrites
from tests.noted import pair


class Watched:
    """A model, what moves it, and what was warned of."""

    def __init__(self, parameters: int = 3) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(parameters)])
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.writes = UncountedWrites(
            self.model, list(self.model), lambda event: self.told.append(pair(event))
        )

    def write(self) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter.add_(1)

    def uncounted(self) -> str:
        return self.writes.uncounted([])

    def step(self) -> None:
        self.write()
        self.writes.stepped()


def test_writes_that_go_on_without_a_step_are_told_once() -> None:
    watched = Watched()
    watched.step()
    for _ in range(2 * SIGNS_MAX):
        watched.write()
        watched.writes.look()
    ((kind, fields),) = watched.told
    assert (kind, fields["step"]) == ("uncounted", 1)


def test_a_write_now_and_then_between_steps_is_no_sign() -> None:
    """An average that is swapped in for each evaluation, weights that are clamped."""
    watched = Watched()
    for _ in range(4 * SIGNS_MAX):
        watched.step()
        watched.write()
        watched.writes.look()
    assert watched.told == []


def test_a_long_evaluation_is_no_sign() -> None:
    watched = Watched()
    watched.step()
    watched.write()
    for _ in range(4 * SIGNS_MAX):
        watched.writes.look()
    assert watched.told == []


def test_as_many_writes_as_a_step_makes_are_training_fewer_are_not() -> None:
    watched = Watched()
    for _ in range(3):
        watched.write()  # behind the optimizer, or in front of it
        watched.step()
    assert watched.uncounted() == ""
    watched.write()
    assert watched.uncounted() == "", "half of what a step writes"
    watched.write()
    assert "were written 6 times after step 3" in watched.uncounted()


def test_writes_by_mend_are_not_reported_as_uncounted() -> None:
    watched = Watched()
    watched.step()
    for own in (watched.writes.writing, watched.writes.aside):
        with own():
            for _ in range(2 * SIGNS_MAX):
                watched.write()
                watched.writes.look()
        watched.writes.look()
        assert watched.uncounted() == ""
    assert watched.told == []
    for _ in range(SIGNS_MAX):
        watched.write()
        watched.writes.look()
    assert len(watched.told) == 1, "what others write behind it is one"


def test_writes_while_a_rack_leaves_are_not_reported_as_uncounted(tmp_path: Path) -> None:
    """Results are applied then, and no step is counted: a rack that waited for a slower one was
    told to call runtime.step()."""
    watched, model = Watched(), nn.Linear(2, 2)
    config = MendConfig(rack=0, racks=1, exchange=False, diagnostics_dir=tmp_path)
    with session(model, config, torch.optim.SGD(model.parameters(), lr=0.1)) as runtime:
        steps = runtime._steps
        steps.writes = watched.writes
        watched.step()
        assert steps.finish() is None
        for _ in range(2 * SIGNS_MAX):
            watched.write()
            watched.writes.look()
    assert watched.told == []


def test_few_parameters_are_looked_at_at_each_step_and_they_are_spread() -> None:
    watched = Watched(100)
    watched.step()
    assert watched.writes._per_step == CANARIES_MAX
    last = list(watched.model)[-20:]
    for _ in range(CANARIES_MAX):
        with torch.no_grad():
            for parameter in last:
                parameter.add_(1)
    assert "were written 8 times" in watched.uncounted()
