"""`mend doctor --meet`: lets the racks meet at the addresses of the job, and lays out what each
measured as a `Meeting`. Prints progress to stderr."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

from mend.config.keyfile import protection_of
from mend.config.settings import MendConfig
from mend.coordination import wire
from mend.engine.witness import detect_ns
from mend.hardware.cpu_affinity import Machine, host
from mend.tools.doctor.local import System
from mend.tools.doctor.meeting import MeetingResult, longest_s, meet
from mend.tools.doctor.meeting_messages import About, Pull, clean
from mend.tools.doctor.meeting_state import Rules
from mend.tools.doctor.terms import Flow, Meeting, Seen
from mend.types import MS, SECOND, VERSION, Address

TURNS_S_MAX = 60.0
"""Many racks have many turns: each is shorter then."""

VALUE_CHARS_MAX = 200

AGREE = ("grace_window_ms", "stall_max_s", "evict_s", "restart_attests_death")
"""Besides the config's own facts: what a hello is refused for."""

BETTER = ("sideband_heartbeat_ms", "concurrent_outer_step", "start_timeout_s", "witness_addr")
"""Not refused, and seldom meant to differ."""


def rules_of(config: MendConfig, wait_s: float, pull_s: float) -> Rules:
    """`pull_s` of every turn, less where there are many racks. Raises ConfigError without a
    rack."""
    turns = 2 * config.racks + 1
    each_s = min(pull_s, TURNS_S_MAX / turns)
    rack = config.rack_number
    return Rules(config.job_id, rack, config.racks, int(wait_s * SECOND), int(each_s * SECOND))


def about_of(config: MendConfig, versions: dict[str, str], ranks: int | None) -> About:
    """`ranks` of a rack; None: nothing tells."""
    facts = {
        "mend version": VERSION,
        "wire version": wire.VERSION,
        **dict(config.hyper_facts()),
        **{name: getattr(config, name) for name in AGREE},
        "witness": "yes" if config.witness_addr else "none",
        "protection": protection_of(config, config.bind_address),
        "ranks per rack": ranks or "",
    }
    wishes = {name: getattr(config, name) for name in BETTER}
    peers = ",".join(f"{rack}={at}" for rack, at in config.peer_addresses.items())
    return About(
        versions=tuple((name, _short(each)) for name, each in versions.items() if name != "mend"),
        facts=tuple((name, _short(value)) for name, value in facts.items()),
        wishes=tuple((n, _short(v)) for n, v in {**wishes, "sideband_peers": peers}.items()),
        plan="",
        host=host()[:VALUE_CHARS_MAX],
        boot=Machine().boot(),
        listens=config.bind_address,
        lane=Address("", 0),  # both are known once it listens
        serves=False,
    )


def _short(value: object) -> str:
    """Long texts as their beginning and a digest of the whole."""
    text = str(value)
    if len(text) <= VALUE_CHARS_MAX:
        return clean(text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{clean(text[:VALUE_CHARS_MAX])}... ({digest})"


def hold_meeting(config: MendConfig, about: About, rules: Rules, *, loud: bool) -> Meeting:
    """Blocks until it is over. Raises AddressInUse, ConfigError, TransportError."""

    def say(line: str) -> None:
        if loud:
            print(line, file=sys.stderr, flush=True)

    wait_s, most_s = rules.wait_ns / SECOND, longest_s(rules)
    say(f"waiting up to {wait_s:g} s for {rules.racks - 1} other rack(s); {most_s:.0f} s at most")
    return meeting_of(meet(rules, config, about, say), config, about, System())


# ------------------------------------------------------------------ what was learnt


def meeting_of(met: MeetingResult, config: MendConfig, about: About, system: System) -> Meeting:
    """Return the result as plain data."""
    state, mine = met.state, met.state.rules.rack
    turn = state.turn
    witness = met.knocks.get(None)
    return Meeting(
        rack=mine,
        racks=config.racks,
        job=config.job_id,
        address=config.peer_addresses[mine],
        lane=f"{met.address.host}:{met.address.port}",
        heartbeat_ms=config.sideband_heartbeat_ms,
        detect_ms=detect_ns(config.sideband_heartbeat_ms) / MS,
        seconds=(met.ended_ns - state.begun_ns) / SECOND,
        turns_done=turn is not None and turn.last,
        versions=dict(about.versions),
        facts=dict(about.facts),
        wishes=dict(about.wishes),
        peers=tuple(
            _seen(met, about, rack, address)
            for rack, address in config.peer_addresses.items()
            if rack != mine
        ),
        witness=(config.witness_addr, witness.answer, witness.speaks) if witness else None,
        strangers=tuple(sorted(state.strangers)),
        jobs=tuple(sorted(state.jobs)),
        doubles=tuple(sorted(state.doubles)),
        garbage=state.garbage,
        buffers=system.buffers(),
    )


def _seen(met: MeetingResult, about: About, rack: int, address: str) -> Seen:
    state, mine = met.state, met.state.rules.rack
    other, knock = state.others.get(rack), met.knocks.get(rack)
    here = other.here if other is not None else None
    heard_by = (
        who
        for who, each in state.others.items()
        if each.here is not None and rack in dict(each.here.heard)
    )
    opened = rack in met.ever_open
    seen = Seen(
        rack=rack,
        address=address,
        heard=here is not None,
        hears_us=state.hears_us(rack),
        heard_by=tuple(sorted(heard_by)),
        answer="open" if opened else (knock.answer if knock is not None else ""),
        detail="" if knock is None or opened else knock.detail,
        speaks=rack in met.ever_speaks,
    )
    if other is None or here is None:
        return seen
    peer, trips = here.about, other.trips(rack)
    pulls = [pull for pull in state.pulls if pull.holder == rack]
    answered = trips.count > 0
    return replace(
        seen,
        host=peer.host,
        same_machine=bool(peer.boot) and peer.boot == about.boot,
        lane=f"{peer.lane.host}:{peer.lane.port}",
        versions=dict(peer.versions),
        facts=dict(peer.facts),
        wishes=dict(peer.wishes),
        asked=other.sent,
        trips=trips.count,
        p50_ms=trips.p50_ns / MS if answered else None,
        p99_ms=trips.p99_ns / MS if answered else None,
        clock_ms=trips.offset_ns / MS if answered else None,
        here=_newest_flow(pulls, together=False),
        there=_newest_flow([pull for pull in here.pulls if pull.holder == mine], together=False),
        together=_newest_flow(pulls, together=True),
    )


def _newest_flow(pulls: list[Pull], *, together: bool) -> Flow | None:
    newest = next((pull for pull in reversed(pulls) if pull.together == together), None)
    if newest is None:
        return None
    if newest.error or not newest.ns:
        return Flow(error=newest.error or "nothing came")
    return Flow(newest.bytes * 8e3 / newest.ns, newest.bytes / 1e6)
