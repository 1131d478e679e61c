"""The settings of a rank, and the parts that its machines are built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from msgspec import structs

from mend.consensus.records import MomentFragments, Policy, Seat
from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import LeaderOptions
from mend.coordination.machines import CoordinatorSpec, LeaderSpec, ProcessSpec, RankSpec
from mend.coordination.messages import Hello, Resume
from mend.detector import DetectorOptions
from mend.engine.checkpoint.saved_state import SavedState
from mend.engine.features.data_ledger import DataLedger
from mend.engine.features.served_metrics import NOWHERE, MetricsAddress
from mend.engine.io.io_loop import IoLoopOptions
from mend.engine.rank_factory import RankFactory
from mend.engine.state.fragment_state import StepOptions
from mend.engine.witness import detect_ns
from mend.errors import UsageError
from mend.fragment.model_plan import ModelPlan
from mend.types import MS, VERSION, WITNESS, Address, Layout, Member, Peer

TORCH = ".".join(str(torch.__version__).split(".")[:2])
"""torch's version without patch and build. Racks compare it: the bits of merges and the layout of
optimizer states may differ between minor versions."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rank takes from MendConfig. `facts`: (key, value) pairs that must be equal on all
    racks and in every job that resumes a checkpoint. `policy`: complete only after `completed`."""

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
    job_facts: tuple[tuple[str, str], ...] = ()
    """Pairs that must be equal on all racks; a job that resumes a checkpoint may have others."""
    unequal: bool = False
    """Whether racks have different numbers of ranks."""
    members: tuple[int, ...] | None = None
    """Global ranks of this rack, where one torchrun spans several; None: all of them."""
    merge_mean_names: tuple[str, ...] = ()
    tape_max_mb: int = 0
    """Maximum size of the tape in `diagnostics`; 0: no tape."""
    config: dict[str, object] = field(default_factory=dict)
    """The configuration as given, for the tape's header."""
    resume: Path | SavedState | None = None
    """A checkpoint to resume, a folder of checkpoints, or the state that DCP has loaded."""
    ledger: DataLedger | None = None
    """Gives out rows of data through the log."""
    detector: DetectorOptions = field(default_factory=DetectorOptions)
    outcomes: Path | None = None
    """Where `mend launch` reads how each rank ended."""
    metrics: MetricsAddress = NOWHERE
    """Where the leader serves its metrics."""
    factory: Callable[[Peer, Sequence[Layout]], RankFactory] = RankFactory
    """Makes the factory of the parts of the rank."""

    def completed(self, ranks: int, plan: ModelPlan) -> Settings:
        """These settings for a rack of `ranks` ranks that trains the model of `plan`."""
        moments = zip(plan.moments, plan.moment_periods.values(), strict=True)
        groups = [MomentFragments(len(cuts), period) for cuts, period in moments]
        if plan.statistics:
            groups.append(MomentFragments(len(plan.statistics), self.policy.period_steps))
        policy = structs.replace(
            self.policy, ranks=ranks, fragments=len(plan.planned), moments=tuple(groups)
        )
        if self.ledger is None:
            return replace(self, policy=policy)
        rows = self.ledger.rows
        if rows % ranks:
            raise UsageError(
                f"a DataLedger of {rows} rows for racks of {ranks} ranks: give it a multiple of "
                f"{ranks}, such as the first {rows - rows % ranks}"
            )
        policy = structs.replace(policy, units=rows // ranks, epochs=self.ledger.epochs)
        return replace(self, policy=policy, facts=(*self.facts, self.ledger.fact))


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """A rank's addresses and the digests of its fragments, for the other ranks of its rack. `lane`:
    for other racks; `inside`: for this one."""

    address: str
    lane: Address
    inside: Address
    digests: tuple[str, ...]


def parts_of(
    settings: Settings,
    me: Peer,
    member: Member,
    ranks: Sequence[Introduction],
    facts: Sequence[tuple[str, str]],
    *,
    sums: bool,
    started_ns: int,
    resumed: tuple[Resume, int] | None = None,
    buffers: tuple[tuple[str, str], ...] = (),
    part_lost: bool = False,
) -> ProcessSpec:
    """The parts of one rank's machines.

    `settings`: completed. `ranks`: the introductions of all ranks of the rack, in rank order.
    `facts`: see `RackModel`. `sums`: whether merges need sums over the ranks first. `resumed`: a
    checkpoint, and this rack's step in it. `buffers`: see `digests_of_buffers`. `part_lost`: see
    `Hello`."""
    policy = settings.policy
    heartbeat_ns, silence_ns = settings.heartbeat_ms * MS, detect_ns(settings.heartbeat_ms)
    versions = resumed[0].versions if resumed else ()
    options_r = RankOptions(heartbeat_ns, policy.ranks, sums, settings.detector)
    rank_machine = RankSpec(options_r, ranks[me.rank].digests, versions)
    if me.rank != 0:
        return ProcessSpec(me, member, rank_machine)
    hello = Hello(
        seat=Seat(member, ranks[0].address, tuple(rank.lane for rank in ranks)),
        policy=policy,
        facts=(("mend version", VERSION), ("torch version", TORCH), *facts, *settings.job_facts),
        digests=tuple(tuple(rank.digests[p] for rank in ranks) for p in range(policy.fragments)),
        resume=resumed[0] if resumed else None,
        resume_step=resumed[1] if resumed else 0,
        buffers=buffers,
        part_lost=part_lost,
    )
    where = Peer(WITNESS, 0) if settings.witness else Peer(0, 0)
    peers = tuple(Peer(rack, 0) for rack in sorted(settings.peers) if rack != me.rack)
    options = LeaderOptions(heartbeat_ns, silence_ns, settings.start_timeout_ns, peers)
    address = settings.witness or settings.peers[0]
    leader = LeaderSpec(hello, where, options, started_ns, address)
    options_c = CoordinatorOptions(policy.racks, heartbeat_ns, silence_ns, first=where == me)
    return ProcessSpec(me, member, rank_machine, leader, CoordinatorSpec(settings.job, options_c))
