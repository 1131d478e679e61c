"""What a rank is built from: its settings, and the parts of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import structs

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
from mend.fragment.model_plan import ModelPlan
from mend.trace.replay_script import ReplayScript
from mend.types import MS, VERSION, WITNESS, Address, Member, Peer


@dataclass(frozen=True, slots=True)
class Settings:
    """What `api` takes from MendConfig. `facts`: (key, value) lines that all racks must share.
    `policy`: as far as the configuration says it, until `completed`.
    """

    rack: int
    policy: Policy
    job: str
    facts: tuple[tuple[str, str], ...]
    io_loop: IoLoopOptions
    peers: dict[int, str]
    witness: str
    heartbeat_ms: int
    start_timeout_ns: int
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
    detector: DetectorOptions = field(default_factory=DetectorOptions)
    outcomes: Path | None = None
    """Where `mend launch` looks for how each rank ended."""

    def completed(self, ranks: int, plan: ModelPlan) -> Settings:
        """With what a rank of a rack of so many finds of its rack and model."""
        moments = zip(plan.moments, plan.moment_periods.values(), strict=True)
        groups = tuple(MomentFragments(len(cuts), period) for cuts, period in moments)
        found = {"ranks": ranks, "fragments": len(plan.cuts), "moments": groups}
        return replace(self, policy=structs.replace(self.policy, **found))


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
    facts: Sequence[tuple[str, str]],
    *,
    sums: bool,
    started_ns: int,
    script: ReplayScript | None = None,
    resumed: tuple[Resume, int] | None = None,
) -> Parts:
    """`settings`: completed. `found`: what every rank of the rack said, in rank order. `facts`: see
    `RackModel`. `sums`: whether merges need sums over the ranks first. `script`: rack 0 decides
    what it says, and nobody takes over. `resumed`: a checkpoint, and this rack's step in it."""
    policy = settings.policy
    heartbeat_ns, silence_ns = settings.heartbeat_ms * MS, detect_ns(settings.heartbeat_ms)
    versions = resumed[0].versions if resumed else ()
    options_r = RankOptions(heartbeat_ns, policy.ranks, sums, settings.detector)
    rank_machine = RankParts(options_r, found[me.rank].digests, versions)
    if me.rank != 0:
        return Parts(me, member, rank_machine)
    hello = Hello(
        seat=Seat(member, found[0].address, tuple(one.lane for one in found)),
        policy=policy,
        facts=(("mend version", VERSION), *facts),
        digests=tuple(tuple(one.digests[p] for one in found) for p in range(policy.fragments)),
        resume=resumed[0] if resumed else None,
        resume_step=resumed[1] if resumed else 0,
    )
    where = Peer(WITNESS, 0) if settings.witness else Peer(0, 0)
    peers = tuple(Peer(rack, 0) for rack in sorted(settings.peers) if rack != me.rack)
    options = LeaderOptions(heartbeat_ns, silence_ns, settings.start_timeout_ns, peers)
    address = settings.witness or settings.peers[0]
    leader = LeaderParts(hello, where, options, started_ns, address)
    options_c = CoordinatorOptions(policy.racks, heartbeat_ns, silence_ns, first=where == me)
    coordinator: CoordinatorParts | None = CoordinatorParts(settings.job, options_c)
    if script is not None:
        directs = where == me
        directing = CoordinatorParts(settings.job, options_c, script.records, scripted=True)
        coordinator = directing if directs else None
    return Parts(me, member, rank_machine, leader, coordinator)
