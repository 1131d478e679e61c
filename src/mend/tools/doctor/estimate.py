"""Estimates the memory of a rank and the time of an exchange, from settings and measurements.

`merge_ns_per_element` merges a little to time it; the rest is arithmetic.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

from mend.codec import codec_named, fragment_codec
from mend.config.settings import MendConfig
from mend.config.wiring import keeps_residuals, rounds_in_flight
from mend.errors import ConfigError
from mend.outer import OUTERS
from mend.tools.doctor.terms import Finding, ok, problem, remark
from mend.types import Owned, Span

ROUND_TRIPS = 6
"""Round trips of an exchange between racks that a witness coordinates: an offer is announced (1),
pulled and reported (1 1/2), gathered and its result held (1), voted on (1), announced (1/2); one is
for TCP to find the rate. Measured over a shaped link: docs/internals/plan.md."""

SHARDED_TRIPS = 2
"""Further ones where racks merge a slice each: the merge is announced, the slice is pulled."""

ANCHOR_VERSIONS = 2
FP32 = 4
NUMEL_LARGE = 1 << 24
"""Enough that the blocks of a codec are as good as whole."""

SIDE = 1024
"""Rows and columns of the matrices of a model of which nothing but its size is known."""

ENCODE_NS = 1.0
"""Per element: delta, encoding and checksum on a worker; docs/internals/benchmarks.md measured 0.6
with a pool of 4 threads."""

MARGIN = 0.8
"""An exchange that takes more of the overlap than this leaves nothing for a bad day."""

MEMORY_SHARE = 0.8
PARAMS_MAX = 10**14
SAMPLE_NS = 50_000_000
BLOCK_NUMEL = 1 << 16
"""A piece of a tensor that `merge="rda"` measures is no longer."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_PARAMS = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KMBGT]?)", re.ASCII)
_THOUSANDS = re.compile(r"\d{1,3}(?:[,_]\d{3})+", re.ASCII)


def params_of(text: str) -> int:
    """`1.5B`, `350M`, `124_000_000`: trained elements of the model. Raises ConfigError."""
    number = text.strip().upper()
    if _THOUSANDS.fullmatch(number):  # nothing else: `1,5B` is not 15B
        number = number.replace("_", "").replace(",", "")
    match = _PARAMS.fullmatch(number)
    found = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 0 < found <= PARAMS_MAX:
        rule = "must be a number of parameters like 1.5B, 350M or 124000000"
        raise ConfigError("--params", text, rule, "Count what is trained.")
    return found


# ------------------------------------------------------------------ memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory of one rank in bytes."""

    anchors: int
    rounds: int
    residual: int = 0
    """Residual of a lossy codec."""

    @property
    def total(self) -> int:
        return self.anchors + self.rounds + self.residual

    def parts(self) -> str:
        owed = [f"{amount(self.residual)} residual"] if self.residual else []
        return ", ".join(
            [f"{amount(self.anchors)} anchors", *owed, f"{amount(self.rounds)} rounds in flight"]
        )


def memory_of(config: MendConfig, params: int, ranks: int) -> Memory:
    """Two versions of what the rank owns (fp32; as much again for each state vector of the outer
    optimizer, and for each moment of the inner one that is exchanged), and for each round in flight
    its part of a fragment in fp32, once per rack, once more, and once for each vector of the
    version that is being made. A codec with a residual takes as much as the rank owns once more,
    and a part for each round in flight, unless the GPU keeps it."""
    owned = math.ceil(params / ranks)
    lr, momentum, ramp = config.outer_lr, config.outer_momentum, config.ramp_rounds
    vectors = 1 + len(OUTERS[config.outer_optimizer](lr, momentum, ramp).states)
    owes = keeps_residuals(config)
    part = math.ceil(owned / config.fragments)
    rounds = rounds_in_flight(config) * (config.racks + 1 + vectors + owes) * part * FP32
    anchors = vectors + len(config.moment_periods)
    return Memory(ANCHOR_VERSIONS * FP32 * owned * anchors, rounds, FP32 * owned * owes)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of this machine in bytes. None: not known, or no limit."""

    available: int | None
    limit: int | None
    """Limit of the machine or of the container, whichever is less."""


def of_memory(memory: Memory, room: Room, ranks_here: int) -> Finding:
    """`ranks_here`: ranks that share this machine."""
    need = memory.total * ranks_here
    text = (
        f"{ranks_here} rank(s) here need about {amount(need)} of host memory "
        f"({memory.parts()} each)"
    )
    shrink = (
        "A larger MEND_FRAGMENTS (smaller rounds), a smaller MEND_OVERLAP_STEPS (fewer of them in "
        "flight), MEND_OUTER_OPTIMIZER_MOMENTUM=0 (half the anchors), more ranks that share the "
        "model, or more memory for the job."
    )
    if room.limit is not None and need > room.limit:
        return problem("memory", f"{text}; there are {amount(room.limit)}.", shrink)
    if room.available is not None and need > MEMORY_SHARE * room.available:
        return remark("memory", f"{text}; {amount(room.available)} are available now.", shrink)
    return ok("memory", text)


def amount(size: float) -> str:
    if size < 1e5:
        return f"{size:,.0f} B"
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


# ------------------------------------------------------------------ time


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round of one rack, milliseconds. bytes: what the rack pulls."""

    bytes: int
    transfer_ms: float
    trips_ms: float
    work_ms: float
    delay_ms: float

    @property
    def total_ms(self) -> float:
        return self.transfer_ms + self.trips_ms + self.work_ms + self.delay_ms


def exchange_of(
    config: MendConfig, params: int, ranks: int, *, mbit: float, trip_ms: float, merge_ns: float
) -> Exchange:
    """`mbit`: inbound, from all others at once. `merge_ns`: per element, of one rank's worker.

    Every rack pulls the payload of every other one, or where they shard a slice of each and the
    slices that others have merged; its ranks share the network and not the work.
    """
    part = math.ceil(params / config.fragments)
    payload = payload_bytes(config.codec, math.ceil(part / ranks)) * ranks
    size, trips = payload * (config.racks - 1), ROUND_TRIPS
    if config.sharded:
        size = (payload + FP32 * part) * (config.racks - 1) // config.racks
        trips += SHARDED_TRIPS
    return Exchange(
        bytes=size,
        transfer_ms=size * 8 / mbit / 1000,
        trips_ms=trips * trip_ms,
        work_ms=math.ceil(part / ranks) * (merge_ns + ENCODE_NS) / 1e6,
        delay_ms=config.simulated_merge_delay_ms,
    )


def moment_bytes(config: MendConfig, params: int) -> int:
    """Return the bytes that a rack receives in H steps for all moments, which travel as fp32."""
    payloads = Fraction(config.racks - 1)
    if config.sharded:
        payloads *= Fraction(2, config.racks)
    each = int(FP32 * params * payloads * config.sync_period_steps)
    return sum(each // period for period in config.moment_periods.values())


def tau_for(total_ms: float, step_ms: float) -> int:
    return max(1, math.ceil(total_ms / MARGIN / step_ms))


def merge_ns_per_element(merge: str, racks: int) -> float:
    """Measure for some tens of milliseconds how long one thread takes to merge the payloads of
    `racks` racks and to digest the result."""
    import torch

    from mend.engine.compute.digest import StateDigest
    from mend.merge import MERGES, Measuring

    rule, threads = MERGES[merge](), torch.get_num_threads()
    deltas = [torch.full((BLOCK_NUMEL,), 0.5 + rack) for rack in range(racks)]
    weights = [1 / 2**rack for rack in range(1, racks)] + [1 / 2 ** (racks - 1)]
    out, digest = torch.empty(BLOCK_NUMEL), StateDigest(BLOCK_NUMEL, 1)
    took: list[float] = []
    torch.set_num_threads(1)  # as in a worker, where others are busy with training
    limit_ns = time.perf_counter_ns() + SAMPLE_NS
    try:
        while len(took) < 3 or time.perf_counter_ns() < limit_ns:
            begun_ns = time.perf_counter_ns()
            if isinstance(rule, Measuring):
                rule.measure(deltas)
            rule.block(deltas, weights, out)
            digest.feed(out)
            took.append((time.perf_counter_ns() - begun_ns) / BLOCK_NUMEL)
    finally:
        torch.set_num_threads(threads)
    return median(took)


def payload_bytes(codec: str, numel: int) -> int:
    """Return the bytes of a payload. A codec that depends on the shapes of tensors is given
    matrices of SIDE x SIDE, the last one smaller."""
    spans = [Span(0, min(SIDE * SIDE, numel - begin)) for begin in range(0, numel, SIDE * SIDE)]
    shapes = tuple((-(-span.numel // SIDE), SIDE) for span in spans)
    owned = Owned(tuple(spans), numel, shapes)
    return fragment_codec(codec_named(codec), owned, 0).payload_bytes


def item_bytes(codec: str) -> float:
    """Return the bytes that a payload has per element of a long vector."""
    return payload_bytes(codec, NUMEL_LARGE) / NUMEL_LARGE
