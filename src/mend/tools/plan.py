"""Finds H, P, tau and payload for a link. Pure arithmetic.

Formulas: docs/internals/plan.md. The time of an exchange and the memory are those of
`doctor.estimate`; `mend doctor` measures what is assumed here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mend.codec import CODECS, RANK_MAX, codec_named, cost_of, is_codec
from mend.codec.on_device import ON_DEVICE
from mend.config.pair_warnings import OVERLAP_STEPS_DEFAULT
from mend.config.settings import MendConfig
from mend.coordination.schedule import gap_steps
from mend.engine.compute.numerics import keeps_in_weights
from mend.errors import ConfigError
from mend.tools.doctor.estimate import (
    FP32,
    MARGIN,
    Exchange,
    Memory,
    exchange_of,
    item_bytes,
    memory_of,
    moment_bytes,
    tau_for,
)
from mend.tools.links_spec import Link
from mend.tools.plan_loss import Loss, loss_of
from mend.types import MB

PERIODS = (16, 32, 64, 128, 256, 512, 1024)
PERIOD_FIRST = 32
"""The default."""
FRAGMENTS = (4, 8, 16, 32)
DTYPES = ("float32", "bfloat16")
PAYLOADS = (*DTYPES, "int8", "int4")
"""Codecs that are compared where nobody says which."""

CODEC_FIRST = "int4"
"""Cost no loss that was measured (docs/compression.md), at an eighth of the bytes."""

BUSY_MAX = 0.7
"""Most of the time that payloads may keep the link busy: the rest makes up for an outage."""

LINK_SHARE = 0.9
"""Payload's share of the rate: headers, and TCP that finds the rate anew in each round."""

TAU_SHARE = 4
"""tau is at most H over this; above it MendConfig warns."""

COPY_NS = {"cuda": 0.03, "cpu": 0.9}
"""Per element that a rank owns of a fragment: what capture and apply take from training
(benchmarks/results: h200.json, 0.3 % of 8 steps for 193M; stall_1_thread.json, 11.1 ms for 12.6M).
"""

DEVICE_PARTS = 2.5
"""Parts of a fragment in fp32 that a GPU holds beside the model, at most, as measured on H200."""

ENCODING_PARTS = 4.5
"""The same with encode_on="device", besides an anchor and a residual (none with feedback in the
weights) of every fragment: the delta, what is pending, the payload, the new anchor and what is
subtracted."""


def merge_ns_assumed(racks: int) -> float:
    """Per element, one thread, merge="mean". Measured (docs/internals/benchmarks.md): 2.5 for 4
    racks, 4.7 for 8."""
    return 0.3 + 0.55 * racks


@dataclass(frozen=True, slots=True)
class Asked:
    """The job. `params`: trained elements of the whole model; `link`: of one rack, shared by its
    `ranks`; `merge_ns`: per element that a rank merges; `delay_ms`: added to each exchange;
    `device`: that trains, of COPY_NS; `largest`: elements of the largest tensor, which no cut
    between fragments divides (0: not known); `codecs`: to compare."""

    params: int
    step_ms: float
    link: Link
    racks: int
    ranks: int
    merge_ns: float
    delay_ms: float = 0.0
    device: str = "cuda"
    largest: int = 0
    codecs: tuple[str, ...] = PAYLOADS


@dataclass(frozen=True)
class Choice:
    """One setting of H, P, tau and payload, and what comes of it. Times in milliseconds."""

    config: MendConfig
    exchange: Exchange
    """Exchange of a fragment of average size."""
    longest: Exchange
    """Exchange of the fragment that holds the largest tensor; tau is for this one."""
    step_ms: float
    copy_ms: float
    """Time of the training thread per round."""
    memory: Memory
    """Host memory of one rank."""
    device_bytes: int
    encoding_bytes: int = 0
    """GPU memory with encode_on="device" in place of `device_bytes`; 0: it cannot encode that."""
    moment_bytes: int = 0
    """Bytes that a rack receives, and sends, in H steps for the optimizer's moments."""

    @property
    def gap_ms(self) -> float:
        """Time between two rounds."""
        return self.step_ms * gap_steps(self.config.fragments, self.config.sync_period_steps)

    @property
    def window_ms(self) -> float:
        """Time that the overlap hides."""
        return self.step_ms * self.config.tau

    @property
    def link_busy(self) -> float:
        """Share of the time in which the link carries payloads. Above 1 it never catches up."""
        share = self.exchange.transfer_ms / self.gap_ms
        if not self.moment_bytes:
            return share
        moments_ms = self.exchange.transfer_ms * self.moment_bytes / self.exchange.bytes
        return share + moments_ms / (self.step_ms * self.config.sync_period_steps)

    @property
    def wait_ms(self) -> float:
        """Wait of training per round, on average, for exchanges that the overlap does not hide."""
        others = self.config.fragments - 1
        waits = others * self._wait_ms(self.exchange) + self._wait_ms(self.longest)
        return max(waits / (others + 1), self.exchange.transfer_ms - self.gap_ms)

    def _wait_ms(self, exchange: Exchange) -> float:
        return max(0.0, exchange.total_ms - self.window_ms)

    @property
    def utilisation(self) -> float:
        """Share of its time that a rack trains."""
        return self.gap_ms / (self.gap_ms + self.wait_ms + self.copy_ms)

    @property
    def fits(self) -> bool:
        """The exchange is hidden with a margin, and the link has room."""
        return (
            self.longest.total_ms <= MARGIN * self.window_ms
            and self.link_busy <= BUSY_MAX
            and TAU_SHARE * self.config.tau <= self.config.sync_period_steps
        )

    @cached_property
    def loss(self) -> Loss:
        """What the job is predicted to lose."""
        return loss_of(self.config)

    @property
    def good(self) -> bool:
        """It fits, and is not known to be worse than no exchange."""
        return self.fits and self.loss.helps

    @property
    def period_bytes(self) -> int:
        """Bytes that a rack receives in H steps, and sends."""
        return self.exchange.bytes * self.config.fragments + self.moment_bytes

    @property
    def mbit(self) -> float:
        """The same per second, on average, while nothing waits."""
        return self.period_bytes * 8 / (self.step_ms * self.config.sync_period_steps) * 1000 / MB


def codecs_of(text: str) -> tuple[str, ...]:
    """`float32,int4`. Raises ConfigError."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in found:
        if not is_codec(name):
            rule = f"{name!r} is not one of {', '.join(CODECS)}, powersgd-1 to powersgd-{RANK_MAX}"
            raise ConfigError("--codecs", text, rule, "Name codecs, separated by commas.")
    return found


def base_config(racks: int) -> MendConfig:
    """Everything that is not searched: from the environment and the TOML file, as in a job."""
    return MendConfig(
        rack=None,
        racks=racks,
        sideband_addr="",
        sideband_peers=(),
        fragments=FRAGMENTS[0],
        sync_period_steps=PERIOD_FIRST,
        overlap_steps=None,
        codec="float32",
        encode_on="host",
        simulated_merge_delay_ms=0.0,
    )


def choices(asked: Asked, base: MendConfig) -> list[Choice]:
    """The best P and tau for every H and codec, H ascending, codecs in the order asked."""
    return [_best(asked, base, period, name) for period in PERIODS for name in asked.codecs]


def _best(asked: Asked, base: MendConfig, period: int, payload: str) -> Choice:
    """The fewest fragments whose exchange is hidden by the default tau; else those whose is the
    shortest."""
    tried = [choice_of(asked, base, period, payload, count) for count in FRAGMENTS]
    enough = (c for c in tried if c.fits and c.config.tau <= OVERLAP_STEPS_DEFAULT)
    return next(enough, min(tried, key=lambda c: (not c.fits, c.wait_ms, c.config.tau)))


def choice_of(
    asked: Asked, base: MendConfig, period: int, payload: str, fragments: int, tau: int = 0
) -> Choice:
    """One row. `tau` 0: the least that hides the exchange with a margin, at most H / 4."""
    settings: dict[str, Any] = {  # of several types, which MendConfig checks
        "sync_period_steps": period,
        "fragments": fragments,
        "codec": payload,
        "exchange_plan": "mesh",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said in another form, and only of what is recommended
        config = replace(base, **settings, simulated_merge_delay_ms=asked.delay_ms)
        settings["exchange_plan"] = _plan_of(asked, base, config)
        config = replace(config, exchange_plan=settings["exchange_plan"])
        exchange = _exchange(asked, config, asked.params)
        longest = _exchange(asked, config, max(asked.params, asked.largest * fragments))
        if not tau:
            most = min((period // TAU_SHARE, *(k - 1 for k in base.moment_periods.values())))
            tau = max(1, min(tau_for(longest.total_ms, asked.step_ms), most))
        config = replace(base, **settings, overlap_steps=tau)
    return _choice(asked, config, exchange, longest)


def judge(asked: Asked, config: MendConfig) -> Choice:
    """The row of a configuration as it is."""
    params = max(asked.params, asked.largest * config.fragments)
    longest = _exchange(asked, config, params)
    return _choice(asked, config, _exchange(asked, config, asked.params), longest)


def _choice(asked: Asked, config: MendConfig, exchange: Exchange, longest: Exchange) -> Choice:
    part = math.ceil(asked.params / config.fragments / asked.ranks)
    copy_ms = part * COPY_NS[asked.device] / 1e6
    memory = memory_of(config, asked.params, asked.ranks)
    device_bytes = round(DEVICE_PARTS * part * FP32) if asked.device == "cuda" else 0
    encoding_bytes = 0
    if asked.device == "cuda" and config.codec in ON_DEVICE:
        stay = 1 if keeps_in_weights(codec_named(config.codec), config.apply_mode) else 2
        encoding_bytes = round((stay * asked.params / asked.ranks + ENCODING_PARTS * part) * FP32)
    return Choice(
        config, exchange, longest, asked.step_ms, copy_ms, memory, device_bytes, encoding_bytes,
        moment_bytes(config, asked.params),
    )  # fmt: skip


def _plan_of(asked: Asked, base: MendConfig, mesh: MendConfig) -> str:
    """Return the exchange plan that is asked for, else `auto`; but `mesh` for racks that auto
    shards though a mesh is quicker: it counts bytes and no round trips."""
    if base.is_named("exchange_plan") and base.exchange_plan != "auto":
        return base.exchange_plan
    auto = replace(mesh, exchange_plan="auto")
    if not auto.sharded:
        return "auto"
    times = [_exchange(asked, config, asked.params).total_ms for config in (mesh, auto)]
    return "auto" if times[1] < times[0] else "mesh"


def _exchange(asked: Asked, config: MendConfig, params: int) -> Exchange:
    """Return the exchange of a P-th of `params` elements."""
    return exchange_of(
        config,
        params,
        asked.ranks,
        mbit=asked.link.rate_bits * LINK_SHARE / MB,
        trip_ms=asked.link.rtt_ms,
        merge_ns=asked.merge_ns,
    )


def recommended(rows: list[Choice]) -> Choice:
    """The first of `ranked`. Where there is none, of the rows that are not known to be worse than
    no exchange the one that trains most of its time; else the one of least loss."""
    if best := ranked(rows):
        return best[0]
    helping = [row for row in rows if row.loss.helps]
    if not helping:
        return min(rows, key=_loss_key)
    return max(helping, key=lambda row: row.utilisation)


def ranked(rows: list[Choice]) -> list[Choice]:
    """The good rows by their predicted loss; of equal ones the least tau, then the fewest bytes,
    then the first codec asked."""
    return sorted([row for row in rows if row.good], key=_loss_key)


def _loss_key(row: Choice) -> tuple[float, bool, int, int, int]:
    """Beyond the measured H the loss is a bound only, and a longer H costs more, as a later result
    does."""
    loss, config = row.loss, row.config
    order = config.sync_period_steps, config.tau, row.period_bytes
    return round(loss.percent, 6), loss.known == "bound", *order


def measured_link(inbound_mbit: float, rtt_ms: float) -> Link:
    """The link over which payloads came at this rate."""
    return Link(round(inbound_mbit * MB / LINK_SHARE), rtt_ms)


def start_seconds(asked: Asked) -> float:
    """Until all racks have rack 0's model, at most: the others pull it over its link, in fp32."""
    size = asked.params * FP32 * (asked.racks - 1)
    return size * 8 / (asked.link.rate_bits * LINK_SHARE)


def advice(asked: Asked, chosen: Choice) -> Iterator[str]:
    """Say what to know about the choice, or to change, in one sentence or two each."""
    if not chosen.loss.helps:
        yield (
            f"In a run of 1,408 steps every setting is predicted to lose {chosen.loss.alone:.0f} % "
            f"or more, as much as a rack alone: compare other codecs (--codecs {CODEC_FIRST}), or "
            "exchange nothing."
        )
    elif not chosen.fits:
        yield from _what_would_fit(asked, chosen)
    elif chosen.config.tau > OVERLAP_STEPS_DEFAULT:
        share = chosen.config.tau / chosen.config.sync_period_steps
        yield (
            f"Merges come {chosen.config.tau} steps late ({share:.0%} of H), which costs some loss "
            "(docs/internals/numerics.md). A faster link or longer steps would need fewer."
        )
    if asked.link.loss_pct:
        yield (
            f"What TCP makes of {asked.link.loss_pct:g} % loss is not predicted: measure it, "
            f"mend launch --link {asked.link}."
        )
    yield from (f"{costs}." for costs in map(cost_of, asked.codecs) if costs)


def _what_would_fit(asked: Asked, chosen: Choice) -> Iterator[str]:
    """Say what would fit, by the longest H and the smallest payload, which need least."""
    config, least = chosen.config, min(asked.codecs, key=item_bytes)
    size = item_bytes(least) * asked.params * (asked.racks - 1)
    carried_ms = size * 8 / (asked.link.rate_bits * LINK_SHARE) * 1000
    period = math.ceil(carried_ms / BUSY_MAX / asked.step_ms)
    yield (
        f"No setting fits: with H={config.sync_period_steps} and {config.codec} payloads "
        f"training waits {chosen.wait_ms:.0f} ms per round, and payloads keep the link busy for "
        f"{chosen.link_busy:.0%} of the time."
    )
    rate = carried_ms * asked.link.rate_bits / (BUSY_MAX * PERIODS[-1] * asked.step_ms)
    if period > PERIODS[-1]:
        yield (
            f"H={PERIODS[-1]} with {least} needs a link of {rate / MB:.3g} Mbit/s; or "
            f"steps (more tokens in each) of {carried_ms / BUSY_MAX / PERIODS[-1]:.0f} ms; or "
            f"fewer racks or parameters; or H={period} and what that does to the loss."
        )
    else:
        fixed_ms = chosen.longest.trips_ms + chosen.longest.delay_ms
        yield (
            f"The link has room, but an exchange of {chosen.longest.total_ms:.0f} ms "
            f"({fixed_ms:.0f} of them round trips and delay) is longer than a quarter of H: "
            "longer steps, or a longer H."
        )
