"""The meeting of `mend doctor --meet`: a job of its own that starts as the real one would, with the
same settings, ports, key and facts. A small model is exchanged once, and the job ends.

What only this job says (its refusals, its events, the answers of its observers) and what `watch`
sees of the ports becomes a `Meeting`. Nothing is left behind: its events go to a temporary folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from mend.api import Runtime, mend_init, mend_shutdown
from mend.config.settings import MendConfig
from mend.config.sources import OUTCOMES
from mend.engine.io.rack import RackGroup
from mend.engine.state.outcome import Outcome
from mend.engine.witness import detect_ns
from mend.errors import (
    ConfigError,
    Evicted,
    MendError,
    StartTimeout,
    TransportError,
    UsageError,
    format_error,
)
from mend.events.base import LoggedEvent
from mend.events.kinds import FetchFailed, HelloHeard, PayloadPulled, RackRefused
from mend.events.lines import TimedEvent, decode_line
from mend.status.status import Status
from mend.tools.doctor.jobs import meeting_of
from mend.tools.doctor.local import System
from mend.tools.doctor.terms import Meeting, Seen
from mend.tools.doctor.watch import Trips, Watch, round_trips
from mend.types import MB, MS, WITNESS

EXCHANGE_S = 20.0
"""Longest wait for the exchange while no bytes arrive."""

RANKS_S = 60.0
"""The first rank looks at its machine before it joins the others of its rack."""

RECORDED_S = 5.0
"""Longest wait until all racks have said what they have set."""

FOUNDER = 0
"""The rack that gets the hellos. The job of a meeting has no witness."""

FP32 = 4

LARGE = 0.5
"""Pulls of at least this part of the largest one are payloads; the rest is the small change of the
other fragments."""


_OF_THIS_RANK = (ConfigError, UsageError, TransportError)
"""Errors because of which this rank did not get as far as to listen."""


class Flows(msgspec.Struct):
    """What one rank has pulled: per rack the rate and the megabytes, and the rate from all."""

    mbit: dict[int, float]
    megabytes: dict[int, float]
    inbound_mbit: float


E = TypeVar("E", bound=LoggedEvent)


@dataclass
class MeetingResult:
    """The result of the meeting's job on this rank."""

    events: list[TimedEvent] = field(default_factory=list)
    status: Status | None = None
    error: BaseException | None = None
    trips: dict[int, Trips] = field(default_factory=dict)
    flows: Flows | None = None

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [event for _, event in self.events if isinstance(event, kind)]


def meet(config: MendConfig, wait_s: float, megabytes: float) -> Meeting:
    """Of the first rank of a rack: hold the meeting, and wait until it is over. `config`: placed.
    `megabytes`: what each rack pulls from all others together. Raises AddressInUse, and any
    MendError that keeps this rank from listening."""
    begun_s, doors = time.monotonic(), dict(config.peer_addresses)
    result = MeetingResult()
    watch = Watch(_watched(config), config.socks_proxy, config.rack_number)
    try:
        result = _run(config, wait_s, megabytes, lambda live: _look_around(config, live, watch))
    finally:
        watch.stop()
    if isinstance(error := result.error, _OF_THIS_RANK):
        raise error
    others = [rack for rack in doors if rack != config.rack_number]
    return Meeting(
        rack=config.rack_number,
        racks=config.racks,
        job=meeting_of(config.job_id),
        address=doors[config.rack_number],
        heartbeat_ms=config.sideband_heartbeat_ms,
        detect_ms=detect_ns(config.sideband_heartbeat_ms) / MS,
        seconds=time.monotonic() - begun_s,
        megabytes=megabytes,
        peers=tuple(_seen(config, result, watch, rack) for rack in others),
        failure=format_error(error),
        timed_out=isinstance(error, StartTimeout),
        answered=_answered(config, watch),
        outcome=_outcome(result),
        settings=settings_of(config),
        witness=_port(watch, WITNESS, config.witness_addr) if config.witness_addr else None,
        buffers=System().buffers(),
        inbound_mbit=result.flows.inbound_mbit or None if result.flows else None,
    )


def attend(config: MendConfig, wait_s: float, megabytes: float) -> int:
    """Of the other ranks of a rack: take part, and leave the findings to the first one. The exit
    status."""
    if is_alone(config):
        return 0
    error = _run(config, wait_s, megabytes, lambda _: {}).error
    if not isinstance(error, _OF_THIS_RANK):
        return 0  # the first rank says the same
    print(f"mend doctor: {format_error(error)}", file=sys.stderr)
    return 1


def is_alone(config: MendConfig) -> bool:
    """Whether there is nobody to meet."""
    return not config.exchange or config.racks == 1


def settings_of(config: MendConfig) -> dict[str, float]:
    """Settings for which no rack is refused, and which should be equal; `witness`: is there one."""
    return {
        "sideband_heartbeat_ms": float(config.sideband_heartbeat_ms),
        "concurrent_outer_step": float(config.concurrent_outer_step),
        "start_timeout_s": config.start_timeout_s,
        "witness": float(bool(config.witness_addr)),
        "python": float(f"{sys.version_info.major}.{sys.version_info.minor:02}"),
    }


# ------------------------------------------------------------------ the job


def _run(
    config: MendConfig,
    wait_s: float,
    megabytes: float,
    between: Callable[[Runtime], dict[int, Trips]],
) -> MeetingResult:
    result = MeetingResult()
    if launched := os.environ.pop(OUTCOMES, ""):  # a launcher would count this as the training
        Path(launched, "doctor").touch()
    with _rack(wait_s), tempfile.TemporaryDirectory(prefix="mend-doctor-") as folder:
        probe = probe_config(config, wait_s, Path(folder))
        model = payload(probe, megabytes)
        try:
            runtime = mend_init(model, probe, optimizer := _optimizer(model, probe))
            try:
                result.trips = between(runtime)
                _pull_apart(model, runtime.status().rack)
                optimizer.step()
                result.status = mend_shutdown(model)
            finally:
                runtime.abort()
        except (MendError, Evicted) as error:
            result.error = error
        result.events = _events(Path(folder))
        if result.status is not None and megabytes:
            result.flows = _of_all_ranks(flows_of(result.events, result.status.rack))
    return result


def probe_config(config: MendConfig, wait_s: float, folder: Path) -> MendConfig:
    """The settings of the meeting's job: those of the real one, but for what is its own."""
    return replace(
        config,
        job_id=meeting_of(config.job_id),
        witness_addr="",  # it belongs to the real job
        start_timeout_s=wait_s,
        shutdown_timeout_s=EXCHANGE_S,
        observe=True,
        diagnostics_dir=folder,
        tape_max_mb=0,
        async_tp_enabled=False,
    )


def payload(config: MendConfig, megabytes: float) -> nn.Module:
    """A model with equal weights on all racks, so that nothing is copied at the start, and one
    fragment that is worth measuring."""
    others = max(1, config.racks - 1)
    numel = max(1, int(megabytes * MB / FP32 / others))
    device = torch.device("cuda" if config.encode_on == "device" else "cpu")
    sizes = [numel, *[1] * (config.fragments - 1)]
    return nn.ParameterList(
        nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device)) for size in sizes
    )


def _pull_apart(model: nn.Module, rack: int) -> None:
    """Give the parameters a gradient of this rack's own, which no link can make smaller."""
    seeded = torch.Generator().manual_seed(rack)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=seeded, dtype=torch.float32, device="cpu")
        parameter.grad = noise.to(parameter.device)


def _optimizer(model: nn.Module, config: MendConfig) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if config.moment_periods else torch.optim.SGD
    return kind(model.parameters(), lr=1e-3)


@contextmanager
def _rack(wait_s: float) -> Iterator[None]:
    """The process group of a rack of several ranks, as torchrun describes it."""
    several = int(os.environ.get("WORLD_SIZE", "1") or 1) > 1
    if several:
        dist.init_process_group("gloo", timeout=timedelta(seconds=wait_s + RANKS_S))
    try:
        yield
    finally:
        if several:
            dist.destroy_process_group()


def _look_around(config: MendConfig, runtime: Runtime, watch: Watch) -> dict[int, Trips]:
    """While all racks are there: measure round trips, and hear what they have set."""
    watch.stop()
    doors = {r: at for r, at in config.peer_addresses.items() if r != config.rack_number}
    trips = round_trips(doors, config.socks_proxy)
    runtime.record(**settings_of(config))
    limit_s = time.monotonic() + RECORDED_S
    while time.monotonic() < limit_s:
        watch.look()
        if all(_recorded(watch, address) for address in doors.values()):
            break
    return trips


def _events(folder: Path) -> list[TimedEvent]:
    paths = sorted(folder.glob("events-*.jsonl"))
    return [decode_line(line) for path in paths for line in path.read_bytes().splitlines()]


def flows_of(events: Sequence[TimedEvent], rack: int) -> Flows:
    """From what one rank has pulled."""
    pulled = [(time_ns, event) for time_ns, event in events if isinstance(event, PayloadPulled)]
    foreign = [(time_ns, event) for time_ns, event in pulled if event.rack != rack]
    least = LARGE * max((event.bytes for _, event in foreign), default=0)
    large = [(time_ns, event) for time_ns, event in foreign if event.bytes >= least]
    mbit, megabytes = dict[int, float](), dict[int, float]()
    for _, event in large:
        size = event.bytes / MB
        megabytes[event.rack] = megabytes.get(event.rack, 0.0) + size
        best = mbit.get(event.rack, 0.0)
        mbit[event.rack] = max(best, size * 8e3 / max(event.ms, 1e-3))
    busy_ms = _busy_ms([(ns / MS - event.ms, ns / MS) for ns, event in large])
    return Flows(mbit, megabytes, sum(megabytes.values()) * 8e3 / busy_ms if busy_ms else 0.0)


def _busy_ms(spans: list[tuple[float, float]]) -> float:
    """Time that is in at least one of them."""
    busy, until = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


def _of_all_ranks(mine: Flows) -> Flows:
    """The sums over the ranks of this rack, which share its network."""
    ranks = RackGroup(None, EXCHANGE_S).gather(mine, Flows)
    total = Flows({}, {}, sum(flows.inbound_mbit for flows in ranks))
    for flows in ranks:
        for rack, mbit in flows.mbit.items():
            total.mbit[rack] = total.mbit.get(rack, 0.0) + mbit
            total.megabytes[rack] = total.megabytes.get(rack, 0.0) + flows.megabytes[rack]
    return total


# ------------------------------------------------------------------ what was learnt


def _watched(config: MendConfig) -> dict[int, str]:
    """Everything that is looked at from outside the job."""
    return dict(config.peer_addresses) | (
        {WITNESS: config.witness_addr} if config.witness_addr else {}
    )


def _port(watch: Watch, rack: int, address: str) -> Seen:
    knock, view = watch.knocks.get(rack), watch.looks.views.get(address)
    speaks = (knock is not None and knock.speaks) or address in watch.looks.speaking
    return Seen(
        rack=rack,
        address=address,
        answer=knock.answer if knock is not None else "",
        detail=knock.detail if knock is not None else "",
        speaks=speaks,
        locked=speaks and address in watch.looks.locked and view is None,
        job=view.job if view is not None else "",
        waits=view.detail if view is not None else "",
    )


def _seen(config: MendConfig, result: MeetingResult, watch: Watch, rack: int) -> Seen:
    address = config.peer_addresses[rack]
    trips = result.trips.get(rack, Trips(0, 0, None, None))
    clock_ns = watch.looks.clocks_ns.get(address)
    flows = result.flows
    refused = [event.detail for event in result.of(RackRefused) if event.rack == rack]
    failed = [event.error for event in result.of(FetchFailed) if event.rack == rack]
    mbit = flows.mbit.get(rack) if flows is not None else None
    return replace(
        _port(watch, rack, address),
        hello=any(event.rack == rack for event in result.of(HelloHeard)),
        refused=refused[-1] if refused else "",
        settings=_recorded(watch, address),
        tried=trips.tried,
        trips=trips.came,
        p50_ms=trips.p50_ms,
        p99_ms=trips.p99_ms,
        clock_ms=clock_ns / MS if clock_ns is not None else None,
        mbit=mbit,
        megabytes=flows.megabytes.get(rack, 0.0) if flows is not None else 0.0,
        error=failed[-1] if failed and not mbit else "",
    )


def _recorded(watch: Watch, address: str) -> dict[str, float]:
    view = watch.looks.views.get(address)
    return dict(view.training.recorded) if view is not None and view.training is not None else {}


def _answered(config: MendConfig, watch: Watch) -> bool:
    """As this process answers about itself; True where it does not."""
    mine = watch.looks.views.get(config.peer_addresses[config.rack_number])
    return config.rack == FOUNDER or mine is None or bool(mine.missing or mine.decided)


def _outcome(result: MeetingResult) -> str:
    status = result.status
    if status is None or Outcome(status.outcome).good:
        return ""
    return str(Outcome(status.outcome, status.outcome_detail))
