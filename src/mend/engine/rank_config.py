"""What a rank is built from: its settings, and the parts of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mend.consensus.records import MomentFragments, Policy, Seat
from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import LeaderOptions
from mend.coordination.machines import CoordinatorParts, LeaderParts, Parts, RankParts
from mend.coordination.messages import Hello, Resume
from mend.detector import DetectorOptions
from mend.engine.fragment_state import StepOptions
from mend.engine.io_loop import IoLoopOptions
from mend.engine.saved_state import SavedState
from mend.engine.witness import detect_ns
from mend.trace.replay_script import ReplayScript
from mend.types import MS, VERSION, WITNESS, Address, Member, Peer


@dataclass(frozen=True, slots=True)
class Settings:
    """What `api` takes from MendConfig. `facts`: (key, value) lines that all racks must share."""

    rack: int
    racks: int
    job: str
    facts: tuple[tuple[str, str], ...]
    io_loop: IoLoopOptions
    peers: dict[int, str]
    witness: str
    heartbeat_ms: int
    start_timeout_ns: int
    evict_ns: int
    restart_attests: bool
    period_steps: int
    overlap_steps: int
    overlap_ramp: int
    quorum_min_learners: int
    grace_ns: int
    max_age: int
    token_weighted: bool
    step: StepOptions
    diagnostics: Path | None
    members: tuple[int, ...] | None = None
    """Global ranks of this rack, where one torchrun spans several; None: all of them."""
    merge_mean_names: tuple[str, ...] = ()
    tape_mb_max: int = 0
    """Most that the tape in `diagnostics` takes; 0: none."""
    config: dict[str, object] = field(default_factory=dict)
    """As it was given, for the tape's header."""
    replay: Path | None = None
    """The script of a replay, if this run is one."""
    resume: Path | SavedState | None = None
    """A checkpoint to go on from, a folder of them, or what DCP has loaded of one."""
    expected: tuple[int, ...] = ()
    """Racks that a round waits for; empty: for all that are live."""
    detector: DetectorOptions = field(default_factory=DetectorOptions)
    acts: bool = False
    """Whether slow racks are mitigated."""
    evicts: bool = False
    """Whether they may also be evicted, to be started again."""
    sharded: bool = False
    """Whether racks merge a slice each and pull the others' merged slices."""
    mirrors: bool = False
    """Whether racks keep for each other what is registered with scope rack."""
    encodes_on_device: bool = False
    """Whether offers are encoded on the GPU that holds the weights."""
    outcomes: Path | None = None
    """Where `mend launch` looks for how each rank ended."""


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a rack tell each other at start."""

    incarnation: int
    address: str
    lane: Address
    digests: tuple[str, ...]


def parts_of(
    settings: Settings,
    me: Peer,
    member: Member,
    found: Sequence[Introduction],
    model_facts: Sequence[tuple[str, str]],
    *,
    sums: bool,
    started_ns: int,
    script: ReplayScript | None = None,
    resumed: tuple[Resume, int] | None = None,
    moments: tuple[MomentFragments, ...] = (),
) -> Parts:
    """`found`: what every rank of the rack said, in rank order. `sums`: whether merges need sums
    over the ranks first. `script`: rack 0 decides what it says, and nobody takes over. `resumed`: a
    checkpoint, and this rack's step in it."""
    ranks = len(found)
    heartbeat_ns, silence_ns = settings.heartbeat_ms * MS, detect_ns(settings.heartbeat_ms)
    versions = resumed[0].versions if resumed else ()
    options_r = RankOptions(heartbeat_ns, ranks, sums, settings.detector)
    rank_machine = RankParts(options_r, found[me.rank].digests, versions)
    if me.rank != 0:
        return Parts(me, member, rank_machine)
    fragments = len(found[0].digests)
    hello = Hello(
        seat=Seat(member, found[0].address, tuple(one.lane for one in found)),
        policy=policy_of(settings, ranks, fragments, moments),
        facts=(
            ("mend version", VERSION),
            *settings.facts,
            ("ranks per rack", str(ranks)),
            *model_facts,
        ),
        digests=tuple(tuple(one.digests[p] for one in found) for p in range(fragments)),
        resume=resumed[0] if resumed else None,
        resume_step=resumed[1] if resumed else 0,
    )
    where = Peer(WITNESS, 0) if settings.witness else Peer(0, 0)
    peers = tuple(Peer(rack, 0) for rack in sorted(settings.peers) if rack != me.rack)
    options = LeaderOptions(heartbeat_ns, silence_ns, settings.start_timeout_ns, peers)
    address = settings.witness or settings.peers[0]
    leader = LeaderParts(hello, where, options, started_ns, address)
    options_c = CoordinatorOptions(settings.racks, heartbeat_ns, silence_ns, first=where == me)
    coordinator: CoordinatorParts | None = CoordinatorParts(settings.job, options_c)
    if script is not None:
        directs = where == me
        directing = CoordinatorParts(settings.job, options_c, script.records, scripted=True)
        coordinator = directing if directs else None
    return Parts(me, member, rank_machine, leader, coordinator)


def policy_of(
    settings: Settings, ranks: int, fragments: int, moments: tuple[MomentFragments, ...] = ()
) -> Policy:
    return Policy(
        racks=settings.racks,
        ranks=ranks,
        fragments=fragments,
        quorum_min_learners=settings.quorum_min_learners,
        grace_ns=settings.grace_ns,
        lockstep=settings.step.lockstep,
        max_age=settings.max_age,
        period_steps=settings.period_steps,
        overlap_steps=settings.overlap_steps,
        overlap_ramp=settings.overlap_ramp,
        stall_max_ns=settings.step.stall_max_ns,
        evict_ns=settings.evict_ns,
        restart_attests=settings.restart_attests,
        token_weighted=settings.token_weighted,
        expected=settings.expected,
        moments=moments,
        acts=settings.acts,
        evicts=settings.evicts,
        sharded=settings.sharded,
    )
