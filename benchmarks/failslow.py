"""benchmarks.failslow: how well slow ranks are told from healthy ones, on generated step times.

    python -m benchmarks.failslow --series 1000 --save

Each kind of series is drawn so many times. Ranks that slow down must be named within 10 steps, a
ramp within 10 steps of passing 10 %; healthy ones may be named at most 0.1 times per 1,000 steps.
Beside mend's detector stand the same without its verification, a z-score of the newest step against
the 64 before it, and the detector of tsugi-mend 0.1.5 as it is described: a z-score within a window
of 64 that has the newest step in it. All get the same step times, divided by the tokens of the
step. The racks come in fours; a rack that is slow from the start is found by its peers alone.

`--save` writes benchmarks/results/failslow.md.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from benchmarks._common import RESULTS, read_options
from mend.detector import DetectorOptions, OwnPast, PeerComparison

GROUP = 4
STEPS = 300
BEFORE = 100
"""Healthy steps before a slowdown."""

WITHIN = 10
FOUND_GOAL = 0.99
FALSE_GOAL = 0.1
OPTIONS = {"series": (1_000, "of each kind"), "workers": (1, "processes")}

Series = list[list[float]]
"""[rack][step] -> step time per token."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`onset`: the step at which rack 0 becomes slow (a ramp: at which it has passed 10 %), None
    where all stay healthy."""

    name: str
    draw: Callable[[random.Random], Series]
    onset: int | None = None


def jitter(chance: random.Random, steps: int = STEPS, sigma: float = 0.05) -> list[float]:
    return [math.exp(chance.gauss(0.0, sigma)) for _ in range(steps)]


def _healthy(one: Callable[[random.Random], list[float]]) -> Callable[[random.Random], Series]:
    return lambda chance: [one(chance) for _ in range(GROUP)]


def _slowed(
    factors: list[float], noise: Callable[..., list[float]] = jitter
) -> Callable[[random.Random], Series]:
    """One rack whose steps take so many times as long."""

    def draw(chance: random.Random) -> Series:
        return [[x * f for x, f in zip(noise(chance, len(factors)), factors, strict=True)]]

    return draw


def _from_start(chance: random.Random) -> Series:
    slow, *peers = (jitter(chance, 60) for _ in range(GROUP))
    return [[2.0 * x for x in slow], *peers]


def _sync(chance: random.Random) -> list[float]:
    period = chance.choice((8, 16, 32, 64))
    phase = chance.randrange(period)
    return [1.3 * x if k % period == phase else x for k, x in enumerate(jitter(chance))]


def _bursts(chance: random.Random) -> list[float]:
    """A checkpoint, an evaluation, a collection of garbage: three steps in a row, every 100."""
    phase = chance.randrange(100)
    return [1.5 * x if (k + phase) % 100 < 3 else x for k, x in enumerate(jitter(chance))]


def heavy(chance: random.Random, steps: int = STEPS) -> list[float]:
    """Student t with 2 degrees of freedom in log time, and 1 step of 100 three times as long."""
    times = []
    for _ in range(steps):
        t = chance.gauss(0, 1) / math.sqrt(chance.gammavariate(1.0, 1.0))
        times.append(math.exp(min(0.05 * t, 3.0)) * (3.0 if chance.random() < 0.01 else 1.0))
    return times


def _drifting(chance: random.Random) -> list[float]:
    """Sequence lengths that wander between 512 and 2048 and vary by the batch. A twentieth of the
    time of a mean step does not depend on them."""
    where, times = chance.uniform(512, 2048), []
    for x in jitter(chance):
        where = min(max(where * math.exp(chance.gauss(0.0, 0.02)), 512), 2048)
        tokens = where * chance.uniform(0.85, 1.15)
        times.append((0.05 * 1024 + tokens) * x / tokens)
    return times


RAMP_STEPS, RAMP_TO = 200, 4.0
RAMP_PASSES = math.ceil(0.1 * RAMP_STEPS / (RAMP_TO - 1))
HEALTHY = [1.0] * BEFORE
TWICE = [*HEALTHY, *[2.0] * 60]
FIFTH = [*HEALTHY, *[1.2] * 60]
RAMP = [*HEALTHY, *(1.0 + (RAMP_TO - 1) * (k + 1) / RAMP_STEPS for k in range(RAMP_STEPS))]

KINDS = (
    Kind("lasting slowdown to 2x", _slowed(TWICE), BEFORE),
    Kind(
        "lasting slowdown to 1.2x, 1 % jitter", _slowed(FIFTH, partial(jitter, sigma=0.01)), BEFORE
    ),
    Kind("lasting slowdown to 2x, heavy tails", _slowed(TWICE, heavy), BEFORE),
    Kind("ramp to 4x over 200 steps", _slowed(RAMP), BEFORE + RAMP_PASSES),
    Kind("2x slow from the start", _from_start, 0),
    Kind("5 % jitter", _healthy(jitter)),
    Kind("+30 % on every outer-sync step", _healthy(_sync)),
    Kind("+50 % on three steps of 100", _healthy(_bursts)),
    Kind("heavy tails", _healthy(heavy)),
    Kind("drifting sequence lengths", _healthy(_drifting)),
)

# ------------------------------------------------------------------ detectors

Named = Iterator[tuple[int, int]]
"""(step, rack) of each time a rack is named as slow that was not before."""


def mend(series: Series) -> Named:
    past = [OwnPast(DetectorOptions()) for _ in series]
    peers = PeerComparison()
    for step, times in enumerate(zip(*series, strict=True)):
        for rack, sample in enumerate(times):
            if past[rack].observe(sample) and past[rack].slowdown is not None:
                yield step, rack
        onset, _ = peers.compare({rack: one.pace for rack, one in enumerate(past)})
        yield from ((step, rack) for rack in sorted(onset))


def unverified(series: Series) -> Named:
    """Change points alone: a rack is slow from a likely change to a higher level on."""
    options = DetectorOptions()
    for rack, times in enumerate(series):
        one, slow = OwnPast(options), False
        for step, sample in enumerate(times):
            one.observe(sample)
            one.slowdown = None
            changed = one.proposed > options.probability_min
            if changed and not slow:
                yield step, rack
            slow = changed


def z_score(series: Series, own: bool) -> Named:
    """Name samples over 3 deviations above the mean of a window; `own`: the newest step is in
    it."""
    for rack, times in enumerate(series):
        window: deque[float] = deque(maxlen=64)
        for step, sample in enumerate(times):
            if own:
                window.append(sample)
            if len(window) >= 8:
                mean = sum(window) / len(window)
                variance = sum(x * x for x in window) / len(window) - mean * mean
                if variance > 0 and sample - mean > 3.0 * math.sqrt(variance):
                    yield step, rack
            if not own:
                window.append(sample)


UNVERIFIED = "mend, not verified"
"""Scored on a quarter of the series: it is there to show what the verification is for."""

DETECTORS: dict[str, Callable[[Series], Named]] = {
    "mend": mend,
    UNVERIFIED: unverified,
    "z-score, 64 before": partial(z_score, own=False),
    "tsugi-mend, as described": partial(z_score, own=True),
}

# ------------------------------------------------------------------ scores


@dataclass(slots=True)
class Score:
    """`late`: steps from the onset to the verdict, of those that were found at all."""

    series: int = 0
    found: int = 0
    late: list[int] = field(default_factory=list)
    false: int = 0
    healthy_steps: int = 0

    @property
    def false_per_1000(self) -> float:
        return 1000 * self.false / max(self.healthy_steps, 1)


def score(kind: Kind, detector: Callable[[Series], Named], seeds: range) -> Score:
    """Score a detector. Of healthy kinds every rack is a series; of the others rack 0 is."""
    result = Score()
    for seed in seeds:
        series = kind.draw(random.Random(f"{kind.name} {seed}"))
        onset = kind.onset
        first = onset if onset is not None else len(series[0])
        ramps = "ramp" in kind.name
        truth = 0 if onset is None else first - RAMP_PASSES if ramps else first
        named, steps = list[tuple[int, int]](), len(series[0])
        for step, rack in detector(series):
            named.append((step, rack))
            if onset is not None and rack == 0 and step >= truth:
                steps = step + 1  # found; the rest tells nothing
                break
        others = 0 if onset is None else (len(series) - 1) * steps
        result.healthy_steps += others + (truth if onset is not None else first * len(series))
        result.false += sum(rack > 0 or onset is None or step < truth for step, rack in named)
        result.series += 1 if onset is not None else len(series)
        hits = [step - first for step, rack in named if rack == 0 and step >= truth]
        if onset is not None and hits:
            result.late.append(hits[0])
            result.found += hits[0] < WITHIN
    return result


def _one(job: tuple[int, str, int]) -> tuple[int, str, Score]:
    number, name, series = job
    kind = KINDS[number]
    series = max(series // 4, 1) if name == UNVERIFIED else series
    count = series if kind.onset is not None else -(-series // GROUP)
    return number, name, score(kind, DETECTORS[name], range(count))


def microseconds() -> float:
    """Time a sample of mend's detector after the past is full: median of blocks of 100."""
    one, chance, found = OwnPast(DetectorOptions()), random.Random(0), []
    for block in range(40):
        samples = jitter(chance, 100)
        begun = time.perf_counter()
        for sample in samples:
            one.observe(sample)
        if block >= 4:
            found.append((time.perf_counter() - begun) * 1e4)
    return statistics.median(found)


def _cell(kind: Kind, found: Score) -> str:
    if kind.onset is None:
        return f"{found.false_per_1000:.3f}"
    late = f", median {statistics.median(found.late):+.0f}" if found.late else ""
    return f"{100 * found.found / found.series:.1f} %{late}; {found.false_per_1000:.3f}"


def table(scores: dict[tuple[int, str], Score], series: int, cost_us: float) -> str:
    lines = [
        "# Fail-slow detection on generated step times",
        "",
        f"`python -m benchmarks.failslow --series {series}`. {series:,} series of each kind, the "
        f"healthy ones of {STEPS:,} steps. Rows with a slow rack: the share named within {WITHIN} "
        "steps of the onset (a ramp: of passing 10 %), the median number of steps until then (of "
        "all that were named), and false alarms per rank and 1,000 healthy steps. Other rows: "
        f"false alarms per rank and 1,000 steps. Goals: {100 * FOUND_GOAL:g} %, {FALSE_GOAL:g}. "
        f"'{UNVERIFIED}' is scored on a quarter of the series.",
        "",
        "| series | " + " | ".join(DETECTORS) + " |",
        "|---|" + "---|" * len(DETECTORS),
    ]
    for number, kind in enumerate(KINDS):
        cells = [_cell(kind, scores[number, name]) for name in DETECTORS]
        lines.append(f"| {kind.name} | " + " | ".join(cells) + " |")
    lines += ["", f"One sample costs mend's detector {cost_us:.0f} us on this machine (Python)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = read_options("failslow", __doc__, OPTIONS)
    jobs = [(n, name, options.series) for n in range(len(KINDS)) for name in DETECTORS]
    with ProcessPoolExecutor(options.workers) as pool:
        scores = {}
        for number, name, found in pool.map(_one, jobs):
            scores[number, name] = found
            print(f"{KINDS[number].name} | {name} | {_cell(KINDS[number], found)}", flush=True)
    page = table(scores, options.series, microseconds())
    print(page)
    if options.save:
        (RESULTS / "failslow.md").write_text(page)


if __name__ == "__main__":
    main()
