"""The cells of a delay sweep, their order and their overlap. Pure arithmetic.

A cell is one job: one delay, distribution, mode and seed. A place is a (delay, distribution); its
cells of one seed run next to each other, so that a disturbance of the machine meets all modes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.delay_sweep import cost_model as sweep_line
from mend.coordination.schedule import gap_steps
from mend.errors import ConfigError
from mend.tools.links_spec import Link
from mend.transport.delayed import Distribution

NONE, BLOCKING, CONCURRENT = "none", "blocking", "concurrent"
MODES = (NONE, BLOCKING, CONCURRENT)
DISTRIBUTIONS: tuple[Distribution, ...] = ("constant", "bimodal", "long_tail")

SLACK = 1.5
"""An exchange beside training takes longer than one that training waits for."""

CALIBRATION = -1
"""Seed of the two cells that only find out t_step and the time of an exchange."""

SET_BY_THE_SWEEP = frozenset(
    f"MEND_{name}"
    for name in (
        "EXCHANGE", "CONCURRENT_OUTER_STEP", "LOCKSTEP", "MERGE_MIN_RACKS",
        "SYNC_PERIOD_STEPS", "FRAGMENTS", "OVERLAP_STEPS", "SIMULATED_MERGE_DELAY_MS",
        "SIMULATED_MERGE_DELAY_DISTRIBUTION", "SIMULATED_MERGE_DELAY_SEED",
        "OUTER_RAMP_ROUNDS", "OUTER_OPTIMIZER_MOMENTUM",
    )
)  # fmt: skip
"""Set by the sweep for every cell; neither --env nor the shell may set them."""

DELAY_MS_MAX = 600_000.0
SEED_IN_ARGUMENT = "{seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A delay and its distribution, at which the modes are compared."""

    delay_ms: float
    distribution: Distribution

    @property
    def name(self) -> str:
        return f"{self.distribution}-{self.delay_ms:g}ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One job. Blocking and concurrent of a place have the same tau, so they train the same."""

    seed: int
    place: Place
    mode: str
    overlap_steps: int

    @property
    def key(self) -> str:
        """Name of its folder and of its line; unique in a sweep."""
        seed = "calibration" if self.seed == CALIBRATION else f"seed{self.seed}"
        return f"{seed}-{self.place.name}-{self.mode}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Everything that the figures depend on. `machine`: which one, and which versions."""

    command: tuple[str, ...]
    """Script and arguments, or -m and a module; `{seed}` in one becomes the cell's seed."""
    delays_ms: tuple[float, ...]
    distributions: tuple[Distribution, ...]
    seeds: int
    racks: int
    nproc_per_rack: int
    period_steps: int
    fragments: int
    overlap_steps: int | None
    """None: per place, the least that covers the delay and a measured exchange."""
    warm_up_steps: int
    on_cpu: bool
    link: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def gap_steps(self) -> int:
        """Steps between two rounds."""
        return gap_steps(self.fragments, self.period_steps)

    @property
    def pulls(self) -> int:
        """Delayed transfers of a round, of which the latest ends it: every rank pulls from its
        rail in every other rack."""
        return self.racks * self.nproc_per_rack * (self.racks - 1)

    @property
    def places(self) -> tuple[Place, ...]:
        """All delays by all distributions; without a delay there is only one."""
        found = []
        for delay in self.delays_ms:
            kinds = self.distributions if delay else ("constant",)
            found += [Place(delay_ms=delay, distribution=kind) for kind in kinds]
        return tuple(found)

    def fields(self) -> dict[str, Any]:
        """Return the settings as they are written to a file."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]  # its own dict

    def hash(self) -> str:
        """Return a hash of all settings; cells with other ones are not mixed."""
        text = json.dumps(self.fields(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(sweep: Sweep) -> None:
    """Raise ConfigError for settings that cannot be run."""
    small = {"racks": 2, "nproc_per_rack": 1, "seeds": 1, "fragments": 1, "warm_up_steps": 1}
    for name, least in small.items():
        if getattr(sweep, name) < least:
            raise ConfigError(name, getattr(sweep, name), f"must be at least {least}", "Raise it.")
    if sweep.period_steps < 2:
        remedy = "Use 8 or more."
        raise ConfigError("period", sweep.period_steps, "leaves no step to overlap", remedy)
    tau = sweep.overlap_steps
    if tau is not None and not 1 <= tau < sweep.period_steps:
        rule = f"must be 1 to {sweep.period_steps - 1}, as period={sweep.period_steps}"
        raise ConfigError("tau", tau, rule, "Lower it, raise --period, or use --tau auto.")
    _check_places(sweep)
    if sweep.link is not None:
        Link.to_make(sweep.link)
    if taken := sorted(SET_BY_THE_SWEEP & set(sweep.env)):
        remedy = "Use the option of the sweep, or leave it out."
        raise ConfigError("env", taken[0], "is set by the sweep for every cell", remedy)


def _check_places(sweep: Sweep) -> None:
    if not sweep.delays_ms or len(set(sweep.delays_ms)) < len(sweep.delays_ms):
        rule = "must be different delays, at least one"
        raise ConfigError("delays", sweep.delays_ms, rule, "Try --delays 0,500,1000.")
    for delay in sweep.delays_ms:
        if not 0 <= delay <= DELAY_MS_MAX:
            rule = f"must be 0 to {DELAY_MS_MAX:g} milliseconds"
            raise ConfigError("delays", delay, rule, "Try --delays 0,500,1000.")
    kinds = set(sweep.distributions)
    if not kinds or kinds - set(DISTRIBUTIONS) or len(kinds) < len(sweep.distributions):
        rule = "must be known ones, each once"
        remedy = f"Choose from {','.join(DISTRIBUTIONS)}."
        raise ConfigError("distributions", sweep.distributions, rule, remedy)


# ------------------------------------------------------------------ cells


def calibration(sweep: Sweep) -> tuple[Cell, ...]:
    """Return the cells for `overlap_steps=None`: alone for t_step, then a blocking exchange."""
    place = Place(delay_ms=0.0, distribution="constant")
    tau = min(8, sweep.period_steps - 1)
    return tuple(
        Cell(seed=CALIBRATION, place=place, mode=mode, overlap_steps=tau)
        for mode in (NONE, BLOCKING)
    )


def overlaps(sweep: Sweep, step_ms: float, exchange_ms: float) -> dict[Place, int]:
    """tau of every place: the given one, or the least that covers 19 of 20 rounds' delay and the
    exchange; always below the period."""
    if sweep.overlap_steps is not None:
        return dict.fromkeys(sweep.places, sweep.overlap_steps)
    found = {}
    for place in sweep.places:
        delay_ms = sweep_line.usual_delay_ms(place.delay_ms, place.distribution, sweep.pulls)
        steps = sweep_line.covering_steps(delay_ms + SLACK * exchange_ms, step_ms)
        found[place] = min(sweep.period_steps - 1, steps)
    return found


def cells(sweep: Sweep, taus: Mapping[Place, int]) -> Iterator[Cell]:
    """Yield all cells, seed by seed. The order of the places turns from seed to seed, and that of
    the modes from place to place, so that no mode is always first on a machine that gets warm."""
    for seed in range(sweep.seeds):
        turned = seed % len(sweep.places)
        places = sweep.places[turned:] + sweep.places[:turned]
        for number, place in enumerate(places):
            first = (seed + number) % len(MODES)
            for mode in MODES[first:] + MODES[:first]:
                yield Cell(seed=seed, place=place, mode=mode, overlap_steps=taus[place])


def environment(sweep: Sweep, cell: Cell) -> dict[str, str]:
    """The MEND_* of a cell, for a script that says `MendConfig()`. Both modes are in lockstep, so
    that they merge the same work in the same rounds and losses can be compared bit for bit."""
    values = {
        "MEND_EXCHANGE": str(cell.mode != NONE).lower(),
        "MEND_CONCURRENT_OUTER_STEP": str(cell.mode != BLOCKING).lower(),
        "MEND_LOCKSTEP": "true",
        "MEND_MERGE_MIN_RACKS": str(sweep.racks),
        "MEND_SYNC_PERIOD_STEPS": str(sweep.period_steps),
        "MEND_FRAGMENTS": str(sweep.fragments),
        "MEND_OVERLAP_STEPS": str(cell.overlap_steps),
        # No ramp: tau is the same in all rounds that are measured.
        "MEND_OUTER_RAMP_ROUNDS": "0",
        "MEND_OUTER_OPTIMIZER_MOMENTUM": "0",
        "MEND_SIMULATED_MERGE_DELAY_MS": repr(cell.place.delay_ms),
        "MEND_SIMULATED_MERGE_DELAY_DISTRIBUTION": cell.place.distribution,
        "MEND_SIMULATED_MERGE_DELAY_SEED": str(max(0, cell.seed)),
    }
    assert values.keys() == SET_BY_THE_SWEEP
    return values


def command_of(sweep: Sweep, cell: Cell) -> tuple[str, ...]:
    """The script's command with the seed put in."""
    seed = str(max(0, cell.seed))
    return tuple(part.replace(SEED_IN_ARGUMENT, seed) for part in sweep.command)


def counted_from(sweep: Sweep, cell: Cell) -> int:
    """First step that counts. The first merge is applied tau steps after its capture; from then
    on every round costs what it costs."""
    return max(sweep.warm_up_steps, cell.overlap_steps)
