"""benchmarks.small_problems: small problems on which merging must not hurt.

Racks train on rows of their own, with mend's default outer step, and the model that they merge is
compared with a rack alone that makes all steps. Such racks differ only in the rows that they draw,
so their errors are samples of one distribution: a rack alone has their mean. The least of them
would be the luck of one draw, more so with more racks, and no job can choose it. Differences are
paired by seed. A cell is one problem with one inner optimizer, period, number of racks, timing and
codec:

linear0, linear    least squares of 16 inputs, without and with noise
quadratic1, ...    a noisy quadratic of 32 dimensions and this condition number
logistic           a logistic regression with held-out rows
mlp                64 tanh units that learn the noisy linear function
gpt                a byte GPT of 7,680 weights (benchmarks.small_problems_gpt)

lockstep    every rack is in every round
turns       racks are out of phase: each round merges one rack
slow        the last rack makes a third of the steps
jitter      a result comes up to a quarter of a period later

The racks' steps and rounds are those of the reference (mend_lab.reference), which has the bits of
real racks, for all seeds of a cell at once (benchmarks.small_problems_batch).
`--processes` trains a dozen cells on real racks instead, under `mend launch`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import small_problems_gpt
from benchmarks.quality_table import t_interval
from mend.config import MendConfig
from mend_lab.reference import (
    Applied,
    Captured,
    Commit,
    Event,
    Facts,
    Named,
    Rack,
    Settings,
    replay,
)

FRAGMENTS, ROWS, INPUTS, HIDDEN = 4, 8, 16, 64
RATES = {"linear": (0.03, 0.03), "quadratic": (0.3, 0.03), "logistic": (0.3, 0.03),
         "mlp": (0.03, 0.003), "gpt": (0.3, 0.01)}  # fmt: skip
"""Learning rates of SGD and of AdamW. A rack alone learns with each of them."""
PROBLEMS = ("linear0", "linear", "quadratic1", "quadratic100", "quadratic10000", "logistic", "mlp")
GPT = "gpt"
OPTIMIZERS = ("sgd", "adamw")
PERIODS = (1, 4, 16, 64, 128)
TIMINGS = ("lockstep", "turns", "slow", "jitter")
UNEQUAL = "1/.5/.25"
"""A timing of three racks, by their speeds."""
WORSE, FLOOR = 1.01, 1e-3
"""A merged model may have 1.01 times the error of a rack alone, each with a thousandth of the error
at the start added: far below it, problems without noise compare rounding errors."""
RESULTS = Path(__file__).parent / "results"


class Cell(NamedTuple):
    problem: str
    optimizer: str = "adamw"
    period: int = 16
    racks: int = 2
    timing: str = "lockstep"
    codec: str = "float32"


def speed_of(cell: Cell, rack: int) -> Fraction:
    """Steps per step of the fastest rack. A timing may also list them, as UNEQUAL."""
    if cell.timing in TIMINGS:
        slow = cell.timing == "slow" and rack == cell.racks - 1
        return Fraction(1, 3) if slow else Fraction(1)
    return Fraction(cell.timing.split("/")[rack])


@dataclass(frozen=True)
class Problem:
    """Losses of a vector of N weights; every rack draws rows of its own from a generator."""

    name: str
    goal_I: Tensor
    numel: int
    noise: float
    curvature_N: Tensor

    def start(self, seed: int) -> Tensor:
        """Return fp32 weights of shape (N,)."""
        generator = torch.Generator().manual_seed(seed)
        return 0.25 * torch.randn(self.numel, generator=generator)

    def loss(self, weights_N: Tensor, generator: torch.Generator) -> Tensor:
        if self.name.startswith("quadratic"):
            wind_N = self.noise * self.curvature_N.sqrt()
            wind_N = wind_N * torch.randn(self.numel, generator=generator)
            return self._above(weights_N) + wind_N @ weights_N
        x_BI = torch.randn(ROWS, INPUTS, generator=generator)
        found_B = self.predict(weights_N, x_BI)
        if self.name == "logistic":
            chance_B = torch.sigmoid(2 * x_BI @ self.goal_I)
            y_B = (chance_B > torch.rand(ROWS, generator=generator)).float()
            return torch.nn.functional.binary_cross_entropy_with_logits(found_B, y_B)
        y_B = x_BI @ self.goal_I + self.noise * torch.randn(ROWS, generator=generator)
        return (found_B - y_B).square().mean()

    def predict(self, weights_N: Tensor, x_BI: Tensor) -> Tensor:
        if self.name != "mlp":
            return x_BI @ weights_N
        enter, rest = weights_N.split((INPUTS * HIDDEN, 2 * HIDDEN + 1))
        shift_H, leave_H, last = rest.split((HIDDEN, HIDDEN, 1))
        return torch.tanh(x_BI @ enter.view(INPUTS, HIDDEN) + shift_H) @ leave_H + last

    @torch.no_grad()
    def error(self, weights_N: Tensor) -> Tensor:
        """Of rows without noise that no rack trains on."""
        if self.name.startswith("quadratic"):
            return self._above(weights_N)
        x_BI = torch.randn(2048, INPUTS, generator=torch.Generator().manual_seed(99))
        found_B, truth_B = self.predict(weights_N, x_BI), x_BI @ self.goal_I
        if self.name == "logistic":
            chance_B = torch.sigmoid(2 * truth_B)
            return torch.nn.functional.binary_cross_entropy_with_logits(found_B, chance_B)
        return (found_B - truth_B).square().mean()

    def _above(self, weights_N: Tensor) -> Tensor:
        return 0.5 * (self.curvature_N * (weights_N - self.goal_I).square()).sum()


class Gpt(Problem):
    """The byte GPT; the error is a loss, which has a floor of its own."""

    def start(self, seed: int) -> Tensor:
        return small_problems_gpt.start(seed)

    def loss(self, weights_N: Tensor, generator: torch.Generator) -> Tensor:
        text_BT1 = small_problems_gpt.windows(small_problems_gpt.texts()[0], ROWS, generator)
        return small_problems_gpt.losses(weights_N[None], text_BT1[None])[0]

    def error(self, weights_N: Tensor) -> Tensor:
        return small_problems_gpt.held_out_loss(weights_N)


def problem(name: str) -> Problem:
    if name == GPT:
        none = torch.empty(0)
        return Gpt(name, none, small_problems_gpt.NUMEL, 0.0, none)
    generator = torch.Generator().manual_seed(7)
    size = 32 if name.startswith("quadratic") else INPUTS
    goal = torch.randn(size, generator=generator)
    condition = float(name.removeprefix("quadratic")) if size == 32 else 1.0
    curvature = torch.logspace(0, -math.log10(condition), size)
    numel = HIDDEN * (INPUTS + 2) + 1 if name == "mlp" else size
    noise = {"linear0": 0.0, "linear": 0.5, "mlp": 0.5}.get(name, 0.1)
    return Problem(name, goal, numel, noise, curvature)


class Learner:
    """One rack: weights, an inner optimizer, and rows of its own."""

    def __init__(self, cell: Cell, rack: int, seed: int) -> None:
        self.problem = problem(cell.problem)
        pieces = self.problem.start(seed).tensor_split(FRAGMENTS)
        self.model = nn.ParameterList([piece.clone() for piece in pieces])
        self.generator = torch.Generator().manual_seed(1000 * (seed + 1) + rack)
        family = next(name for name in RATES if cell.problem.startswith(name))
        rate = RATES[family][OPTIMIZERS.index(cell.optimizer)]
        kind = torch.optim.SGD if cell.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=rate)

    @property
    def weights_N(self) -> Tensor:
        return torch.cat(list(self.model))

    def train(self, step: int) -> int:
        self.optimizer.zero_grad()
        self.problem.loss(self.weights_N, self.generator).backward()
        self.optimizer.step()
        return ROWS


# ------------------------------------------------------------------------------------ the schedule


@dataclass
class _Books:
    """What a rack has done with one fragment."""

    seq: int = 0
    merged: int = 0  # steps that commits have named and the rack has applied
    offered: int = 0  # steps when its open offer was captured
    version: int = 0
    last: int = 0  # steps of its last offer: what it counts in rounds without it
    named: int = 0  # version with its last offer
    bases: tuple[int, int] = (0, 0)  # versions applied at its last two captures


class Schedule:
    """Facts and commits of a job in which racks capture, merge and apply at these steps."""

    def __init__(self, cell: Cell, settings: Settings, steps: int) -> None:
        self.cell, self.settings, self.steps = cell, settings, steps
        self.commits: list[Commit] = []
        self.by_version: list[list[Commit]] = [[] for _ in range(FRAGMENTS)]
        self.versions = [0] * FRAGMENTS
        self.books = [[_Books() for _ in range(cell.racks)] for _ in range(FRAGMENTS)]
        self.events: list[list[Event]] = [[] for _ in range(cell.racks)]
        self.due: list[tuple[int, int, int]] = []  # (time, fragment, version)
        self.random = random.Random(5)
        for time in range(1, steps + 1):
            self._apply(time)
            for fragment in range(FRAGMENTS):
                for racks in self._groups(fragment, time):
                    self._capture(fragment, racks, time)
                    self._apply(time)
        self._end()

    @property
    def facts(self) -> list[Facts]:
        made = [self._steps(rack, self.steps) for rack in range(self.cell.racks)]
        return [Facts(steps, each) for steps, each in zip(made, self.events, strict=True)]

    def _steps(self, rack: int, time: int) -> int:
        return math.floor(time * speed_of(self.cell, rack))

    def _groups(self, fragment: int, time: int) -> Iterator[list[int]]:
        racks, period = range(self.cell.racks), self.cell.period
        first = max((fragment + 1) * period // FRAGMENTS, 1)
        if self.cell.timing != "turns":
            if time >= first and (time - first) % period == 0:
                yield [*racks]
            return
        for rack in racks:
            own = first + rack * period // len(racks)
            if time >= own and (time - own) % period == 0:
                yield [rack]

    def _capture(
        self, fragment: int, racks: Sequence[int], time: int, closing: bool = False
    ) -> None:
        books, members = self.books[fragment], []
        for rack in racks:
            own, steps = books[rack], self._steps(rack, time)
            made = steps - own.merged
            if made < 1 or own.offered:
                continue
            own.seq, own.offered, own.last = own.seq + 1, steps, made
            own.bases = own.bases[1], own.version
            self.events[rack].append(Captured(steps, fragment, own.seq, closing))
            members.append(Named(rack, own.seq, own.version, ROWS * made, made))
        if not members:
            return
        absent = self._absent(books, members, closing)
        self.versions[fragment] += 1
        version = self.versions[fragment]
        for member in members:
            books[member.rack].named = version
        commit = Commit(fragment, version, members, (), absent, bool(absent) and not closing)
        self.commits.append(commit)
        self.by_version[fragment].append(commit)
        late = 0
        if self.cell.timing == "jitter":
            late = self.random.randint(0, self.cell.period // 4)
        tau = min(self.settings.tau(version - 1) + late, self.cell.period - 1)
        self.due.append((time + tau, fragment, version))

    @staticmethod
    def _absent(
        books: Sequence[_Books], members: Sequence[Named], closing: bool
    ) -> list[tuple[int, int]]:
        """Tokens and steps of the racks that are not in a round: those that train, or at the end
        those whose last offer came in beside the work of all members."""
        named = {member.rack for member in members}
        mean = sum(member.steps for member in members) // len(members)
        began = max(books[rack].bases[0] for rack in named)
        away = [own for rack, own in enumerate(books) if rack not in named]
        if closing:
            away = [own for own in away if own.named > began]
        return [(ROWS * steps, steps) for steps in (own.last or mean for own in away)]

    def _apply(self, time: int) -> None:
        """A later version that is due takes the ones before it along."""
        ripe = [each for each in self.due if each[0] <= time]
        self.due = [each for each in self.due if each[0] > time]
        for fragment, group in itertools.groupby(sorted(ripe, key=lambda e: e[1:]), lambda e: e[1]):
            self._apply_version(fragment, max(version for _, _, version in group), time)

    def _apply_version(self, fragment: int, version: int, time: int) -> None:
        for rack, own in enumerate(self.books[fragment]):
            steps = self._steps(rack, time)
            if not steps or version <= own.version:
                continue  # it has not begun
            passed = self.by_version[fragment][own.version : version]
            named = {(member.rack, member.seq) for commit in passed for member in commit.members}
            if own.offered and (rack, own.seq) in named:
                own.merged, own.offered = own.offered, 0
            own.version = version
            self.events[rack].append(Applied(steps, fragment, version))

    def _end(self) -> None:
        for fragment, version in enumerate(self.versions):
            if version:
                self._apply_version(fragment, version, self.steps)
            self._capture(fragment, range(self.cell.racks), self.steps, closing=True)


# ----------------------------------------------------------------------------------------- a cell


def settings_of(cell: Cell, momentum: float | None = None) -> Settings:
    """mend's defaults for this period. `momentum`: another one, to compare."""
    config = MendConfig(sync_period_steps=cell.period, racks=cell.racks)
    return Settings(
        fragments=[[each] for each in range(FRAGMENTS)],
        period=cell.period,
        overlap=config.tau,
        overlap_ramp=config.ramp_rounds,
        outer_lr=config.outer_lr,
        momentum=config.outer_momentum if momentum is None else momentum,
        ramp=config.ramp_rounds,
        payload=cell.codec,
    )


def merged_error(cell: Cell, steps: int, seed: int, momentum: float | None = None) -> float:
    """Return the error of the model that the racks have merged at the end."""
    settings = settings_of(cell, momentum)
    learners = [Learner(cell, rack, seed) for rack in range(cell.racks)]
    racks = [Rack(list(each.model), each.train) for each in learners]
    schedule = Schedule(cell, settings, steps)
    outcome = replay(racks, settings, schedule.facts, schedule.commits)
    weights_N = torch.cat([versions[-1].values for versions in outcome.anchors])
    return learners[0].problem.error(weights_N).item()


def alone_error(cell: Cell, steps: int, seed: int) -> list[float]:
    """Return the errors of the racks alone, of those that make all steps."""
    full = [rack for rack in range(cell.racks) if speed_of(cell, rack) == 1]
    learners = [Learner(cell, rack, seed) for rack in full]
    for learner in learners:
        for step in range(1, steps + 1):
            learner.train(step)
    return [each.problem.error(each.weights_N).item() for each in learners]


class Row(NamedTuple):
    """Errors of a cell by seed, and of the model at the start. `alone`: means of the racks;
    `least`: of the best rack."""

    cell: Cell
    merged: list[float]
    alone: list[float]
    least: list[float]
    start: float

    @property
    def ratio(self) -> float:
        """Error of the merged model / error of a rack alone, means over the seeds; both may have a
        thousandth of the error at the start."""
        return self._ratio_to(self.alone)

    def _ratio_to(self, base: list[float]) -> float:
        floor = FLOOR * self.start
        return (statistics.fmean(self.merged) + floor) / (statistics.fmean(base) + floor)

    @property
    def spread(self) -> float:
        """Half of the 95 % interval of the ratio, from the differences by seed; NaN for one
        seed."""
        differences = [
            merged - alone for merged, alone in zip(self.merged, self.alone, strict=True)
        ]
        interval = t_interval(differences)
        return (interval.high - interval.mean) / (statistics.fmean(self.alone) + FLOOR * self.start)

    @property
    def good(self) -> bool:
        return self.ratio <= WORSE

    @property
    def good_beside_the_best(self) -> bool:
        return self._ratio_to(self.least) <= WORSE


def row_of(cell: Cell, merged: list[float], alone: list[list[float]]) -> Row:
    """`alone`: by seed, of each rack that makes all steps."""
    here = problem(cell.problem)
    means, least = [statistics.fmean(each) for each in alone], [min(each) for each in alone]
    return Row(cell, merged, means, least, here.error(here.start(0)).item())


def cells(racks: Sequence[int] = (2, 4, 8), problems: Sequence[str] = PROBLEMS) -> list[Cell]:
    """Return all cells of these problems."""
    product = itertools.product(problems, OPTIMIZERS, PERIODS, racks, TIMINGS, ("float32", "int4"))
    return [Cell(*each) for each in product]


def chosen(count: int) -> list[Cell]:
    """Return a fixed choice of cells with two and four racks, every problem and timing in it."""
    every = cells((2, 4))
    random.Random(1).shuffle(every)
    return sorted(every[:count])


def table(rows: Sequence[Row], steps: int, seeds: int) -> str:
    """Return the page: the cells that are worse, and the mean ratio by period and timing."""
    worse = [row for row in rows if not row.good]
    sure = [row for row in worse if row.ratio - row.spread > 1]
    lines = [
        f"{len(rows)} cells, {steps} steps, {seeds} seeds. Worse than a rack alone by more than "
        f"{WORSE - 1:.0%}: **{len(worse)}**, of these with the whole 95 % interval of the "
        f"differences by seed above: **{len(sure)}**. Worse than the best of the racks alone, the "
        f"luck of a draw: {sum(not row.good_beside_the_best for row in rows)}.",
        "",
        "Error of the merged model / error of a rack alone, geometric mean of the cells:",
        "",
        "| cells | " + " | ".join(TIMINGS) + " |",
        "|---|" + "---|" * len(TIMINGS),
    ]
    groups = {f"H {each}": [r for r in rows if r.cell.period == each] for each in PERIODS}
    names = list(dict.fromkeys(row.cell.problem for row in rows))
    groups |= {each: [r for r in rows if r.cell.problem == each] for each in names}
    for name, group in groups.items():
        row = [f"| {name} |"]
        for timing in TIMINGS:
            logs = [math.log(r.ratio) for r in group if r.cell.timing == timing]
            row.append(f" {math.exp(statistics.fmean(logs)):.2f} |" if logs else " |")
        lines.append("".join(row))
    if worse:
        lines += ["", "| worse | merged / alone |", "|---|---|"]
        lines += [
            f"| {', '.join(map(str, row.cell))} | {row.ratio:.3f} +- {row.spread:.3f} |"
            for row in worse
        ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------- commands

PROCESS_CELLS = [
    Cell(name, optimizer, period, 2)
    for name, optimizer in (("linear", "sgd"), ("quadratic100", "adamw"), ("mlp", "adamw"))
    for period in (1, 4, 16, 64)
]
PROCESS_CELLS += [
    Cell("linear0", "sgd", 4, 2),
    Cell("linear", "sgd", 16, 3, UNEQUAL),
    Cell("mlp", "adamw", 16, 3, UNEQUAL),
]


def measure_processes(cell: Cell, steps: int, seeds: int) -> Row:
    """Train a cell on racks that are processes, with mend's defaults, over the loopback; a job for
    each seed, as the error of one seed says little: of (mlp, adamw, H 16) the reference has .79 to
    1.01 of a rack alone in ten of them."""
    merged = [_merged_by_processes(cell, steps, seed) for seed in range(seeds)]
    return row_of(cell, merged, [alone_error(cell, steps, seed) for seed in range(seeds)])


def _merged_by_processes(cell: Cell, steps: int, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            sys.executable, "-m", "mend.tools", "launch", "--racks", str(cell.racks),
            "--no-witness", str(Path(__file__).with_name("small_problems_rank.py")),
            folder, json.dumps(cell), str(steps), str(seed),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if [each["outcome"] for each in told] != ["merged"] * cell.racks:
        raise RuntimeError(f"{cell} ended {told}")
    return float(told[0]["error"])


def _compare_processes(steps: int, seeds: int) -> bool:
    """Print every cell of PROCESS_CELLS; return whether one is worse than a rack alone."""
    rows = []
    for cell in PROCESS_CELLS:
        rows.append(row := measure_processes(cell, steps, seeds))
        said = f"{row.ratio:.3f} +- {row.spread:.3f} of a rack alone"
        print(*cell, said, "" if row.good else "WORSE than a rack alone", flush=True)
    worse = sum(not row.good for row in rows)
    beside = sum(not row.good_beside_the_best for row in rows)
    print(f"{len(rows)} cells: {worse} worse than a rack alone, {beside} than the best rack")
    return worse > 0


def _batched(cell: Cell, steps: int, seeds: int, momentum: float | None) -> Row:
    from benchmarks.small_problems_batch import alone_errors, merged_errors

    torch.set_num_threads(1)
    merged = merged_errors(cell, steps, seeds, momentum)
    return row_of(cell, merged, alone_errors(cell, steps, seeds))


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=0, help="a fixed choice of so many; 0: all")
    parser.add_argument("--problems", default=",".join(PROBLEMS), help=f"or {GPT}")
    parser.add_argument("--racks", default="2,4,8")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="processes that share the cells")
    parser.add_argument("--momentum", type=float, help="another outer momentum than the default")
    parser.add_argument(
        "--processes", action="store_true", help="a dozen cells on real racks; 1 if one is worse"
    )
    parser.add_argument("--save", action="store_true", help="write the table of these problems")
    options = parser.parse_args()
    if options.processes:
        sys.exit(_compare_processes(options.steps, options.seeds))
    problems = options.problems.split(",")
    racks = [int(count) for count in options.racks.split(",")]
    wanted = chosen(options.cells) if options.cells else cells(racks, problems)
    job = partial(_batched, steps=options.steps, seeds=options.seeds, momentum=options.momentum)
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for row in pool.imap(job, wanted, chunksize=1):
            rows.append(row)
            if sys.stderr.isatty():
                print(f"\r{len(rows)} of {len(wanted)}", end="", file=sys.stderr)
    page = table(rows, options.steps, options.seeds)
    print(page)
    if options.save:
        command = f"python -m benchmarks.small_problems {' '.join(sys.argv[1:])}"
        name = "small_problems_gpt.md" if GPT in problems else "small_problems.md"
        title = "# Small problems: the byte GPT" if GPT in problems else "# Small problems"
        (RESULTS / name).write_text(f"{title}\n\n`{command}`\n\n{page}")


if __name__ == "__main__":
    main()
