"""benchmarks.unequal_loss: which weights are right for racks of unequal speed.

Three racks with the speeds 1 : .5 : .25 solve the small problems (benchmarks.small_problems), and
their merged model is compared with that of three racks at the mean speed, so at equal tokens. Rows
are drawn for each rack by itself, and with `apart` the racks also have goals of their own, whose
mean is the goal that the error is measured from: an optimum that no rack has by itself.

tokens    each step by its tokens, and a step as long as the mean token is late: the rule in force
alike     each offer alike (`token_weighted_merge=False`)
rate      each rack by how far it gets per step, times the mean number of steps, so that all racks
          count alike however fast they are (2007.07481 with equal shares of the data)

    python -m benchmarks.unequal_loss
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.quality_table import t_interval
from benchmarks.small_problems import FLOOR, PROBLEMS, UNEQUAL, Cell, problem, speed_of
from benchmarks.small_problems_batch import F32, Racks, Rule, in_force, merged_errors
from mend_lab.reference import Named, Settings

SPEEDS, IN_STEP = UNEQUAL, ".5833/.5833/.5833"
PERIODS = (16, 64)
OPTIMIZERS = ("sgd", "adamw")
APART = 0.3
"""Mean distance of the racks' goals from the common one, by the length of that."""


def _alike(members: Sequence[Named], settings: Settings) -> tuple[list[float], float]:
    return in_force(members, replace(settings, token_weighted=False))


def _rate(members: Sequence[Named], settings: Settings) -> tuple[list[float], float]:
    mean = statistics.fmean(member.steps for member in members)
    return [mean / member.steps / len(members) for member in members], 1.0


RULES: dict[str, Rule] = {"tokens": in_force, "alike": _alike, "rate": _rate}


class Falling(Racks):
    """Their learning rate falls to a tenth, as a cosine of the steps of the fastest."""

    def __init__(self, cell: Cell, seeds: int, steps: int) -> None:
        super().__init__(cell, seeds, steps)
        fastest = max(speed_of(cell, rack) for rack in range(cell.racks))
        self.peak, self.last = self.rate, math.floor(steps * fastest)

    def step(self, racks: Sequence[int]) -> None:
        done = self.made_R.max() / self.last
        self.rate = self.peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        super().step(racks)


def racks_of(cell: Cell, seeds: int, steps: int, apart: float, falling: bool) -> Racks:
    """Racks at their start, with goals of their own if `apart` is not 0."""
    racks = (Falling if falling else Racks)(cell, seeds, steps)
    if not apart:
        return racks
    here = problem(cell.problem)
    shift_RN = torch.randn(cell.racks, len(here.goal_I), generator=torch.Generator().manual_seed(3))
    shift_RN -= shift_RN.mean(0)
    shift_RN *= apart * here.goal_I.norm() / shift_RN.norm(dim=1).mean()
    moved = shift_RN.numpy()
    if cell.problem.startswith("quadratic"):
        root_N = np.sqrt(here.curvature_N.numpy())
        racks.data = (racks.data[0] - (moved * root_N / F32(here.noise))[None, :, None],)
    else:
        x_SRTBI, y_SRTB = racks.data
        racks.data = x_SRTBI, y_SRTB + np.einsum("srtbi,ri->srtb", x_SRTBI, moved).astype(F32)
    return racks


Ratios = dict[str, list[float]]


def ratios(cell: Cell, steps: int, seeds: int, apart: float, falling: bool) -> Ratios:
    """Rule -> by seed, the error relative to that of racks in step. Both have a thousandth of the
    error at the start added."""
    here = problem(cell.problem)
    start = here.error(here.start(0)).item()

    def errors(cell: Cell, rule: Rule) -> list[float]:
        racks = racks_of(cell, seeds, steps, apart, falling)
        found = merged_errors(cell, steps, seeds, rule=rule, racks=racks)
        return [error + FLOOR * start for error in found]

    base = errors(cell._replace(timing=IN_STEP), in_force)
    return {
        name: [error / own for error, own in zip(errors(cell, rule), base, strict=True)]
        for name, rule in RULES.items()
    }


def mean(cells: Sequence[Sequence[float]]) -> str:
    """The geometric mean over the cells as percent, with a 95 % interval over the seeds."""
    by_seed = [statistics.fmean(map(math.log, each)) for each in zip(*cells, strict=True)]
    interval = t_interval(by_seed)
    bounds = (interval.mean, interval.low, interval.high)
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * math.expm1(each) for each in bounds))


def table(found: dict[Cell, Ratios]) -> str:
    """Percent above racks in step: each rule, and the rule in force above each offer alike."""
    lines = ["| cells | tokens | alike | rate | tokens above alike |", "|---|---|---|---|---|"]
    groups: dict[str, list[Ratios]] = {"all": list(found.values())}
    for cell, each in found.items():
        groups.setdefault(f"{cell.optimizer}, H {cell.period}", []).append(each)
    for name, group in groups.items():
        said = [mean([each[rule] for each in group]) for rule in RULES]
        against = [
            [a / b for a, b in zip(each["tokens"], each["alike"], strict=True)] for each in group
        ]
        lines.append(f"| {name} | {' | '.join([*said, mean(against)])} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for apart, falling in itertools.product((0.0, APART), (False, True)):
        product = itertools.product(PROBLEMS, OPTIMIZERS, PERIODS)
        cells = [Cell(name, optimizer, period, 3, SPEEDS) for name, optimizer, period in product]
        if apart:  # a logistic error has a floor of its own
            cells = [cell for cell in cells if cell.problem != "logistic"]
        found = {cell: ratios(cell, options.steps, options.seeds, apart, falling) for cell in cells}
        rate = "falling" if falling else "constant"
        print(f"\ngoals {apart} apart, {rate} learning rate\n\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
