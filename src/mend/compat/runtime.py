"""The calls of a loop that was written for tsugi-mend."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from mend import api
from mend.compat.absent import ATTRIBUTES
from mend.compat.reducer import MergeResult
from mend.config import MendConfig
from mend.errors import UsageError
from mend.fragment.model_plan import ModelPlan
from mend.fragment.plan import unwrap
from mend.mesh import rack_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALONE = "which exchanges with nobody: set MEND_RACK and MEND_RACKS, or start it with mend launch"

__all__ = ["Runtime", "get_runtime", "mend_init", "mend_shutdown"]


@dataclass(frozen=True)
class Topology:
    """`racks` as in the settings: mend_init has returned, so all of them were there."""

    racks: int
    detection_method: str = "settings"

    def n_racks(self) -> int:
        """The number of racks in the job."""
        return self.racks


@dataclass(frozen=True)
class Heartbeat:
    """Another live rack."""

    rank_id: str
    health_bit: bool = True


class Peers:
    """The other racks, or ranks of this rack, in the form of the predecessor's sideband."""

    def __init__(self, runtime: Runtime, ranks: tuple[int, ...]) -> None:
        self._runtime, self._ranks = runtime, ranks

    def peer_snapshot(self) -> dict[str, Heartbeat]:
        """The live ones by name: this rank_id, with the number of the other."""
        status = self._runtime.status()
        racks = [rack for rack in status.racks_live if rack != status.rack]
        names = self._runtime.names(self._ranks or racks)
        return {name: Heartbeat(name) for name in names}


class Runtime:
    """mend's Runtime, with the calls that have nothing to do."""

    def __init__(
        self,
        runtime: api.Runtime,
        *,
        steps_by_hand: bool,
        rank_id: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """`ranks`: other ranks of this rack that the script considers peers."""
        self._runtime, self._steps_by_hand = runtime, steps_by_hand
        self.rank_id = rank_id or f"rack-{runtime.config.rack_number}"
        self.topology = Topology(runtime.config.racks)
        has_peers = bool(ranks or runtime.config.sideband_peers)
        self.sideband = Peers(self, ranks) if has_peers else None
        self._warned = False
        self._round: int | None = None
        """The round number of outer_step_begin, until its result is collected."""
        self._collected = 0
        """Number of commits that the script has been given."""

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            raise AttributeError(f"{name} has no counterpart in mend: {ATTRIBUTES[name]}")
        return getattr(self._runtime, name)

    def names(self, racks: Iterable[int]) -> list[str]:
        """Names of racks: this rank_id, with their numbers."""
        stem = self.rank_id.rstrip("0123456789")
        return [f"{stem}{rack}" for rack in racks]

    def step_begin(self, step: int) -> None:
        """Nothing is due before a step."""

    def step_end(self, step: int, step_time_ms_override: float | None = None) -> None:
        """One step is done; ignored if an optimizer given to mend_init has counted it. mend counts
        and times steps itself, so the arguments are not used."""
        if self._steps_by_hand:
            self._runtime.step()

    def outer_step_begin(
        self, round_id: int, fragment_provider: Any = None, expected_learner_ids: Any = None
    ) -> None:
        """The next merge is the one that outer_step_collect reports as this round. mend captures
        and exchanges by itself: the provider is not called, and a warning says so once. Raises
        UsageError for a roster of this round only, and before the last round is collected."""
        if expected_learner_ids is not None:
            raise UsageError(
                "outer_step_begin(expected_learner_ids=): mend has one roster for all rounds. Set "
                "expected_racks, or leave it out: a round waits for all live racks"
            )
        if self._round is not None:
            raise UsageError(
                f"outer_step_begin({round_id}): round {self._round} is still in flight. Call it "
                "while outer_step_in_flight() is False"
            )
        self._round = round_id
        if fragment_provider is not None and not self._warned:
            self._warned = True
            warnings.warn(
                "outer_step_begin: mend reads the fragments from the model itself; "
                "fragment_provider is not called. Both outer_step lines can be removed.",
                stacklevel=2,
            )

    def outer_step_in_flight(self) -> bool:
        """Whether a round was begun whose result was not collected."""
        return self._round is not None

    def outer_step_collect(self) -> MergeResult | None:
        """The newest merge since the last call, if a round is in flight and there is one. Its
        `merged_delta` is empty, because mend applies it itself."""
        if self._round is None:
            return None
        status = self._runtime.status()
        if status.rounds_committed <= self._collected:
            return None
        round_id, self._round, self._collected = self._round, None, status.rounds_committed
        merged = status.racks_merged
        absent = [rack for rack in range(status.racks_configured) if rack not in merged]
        return MergeResult(
            round_id, [], self.names(merged), [], math.nan, status.closed_by, self.names(absent)
        )


_runtimes: WeakKeyDictionary[nn.Module, Runtime] = WeakKeyDictionary()
"""By model. A value holds its mend runtime, which would never be freed if that were the key."""


def mend_init(
    model: nn.Module,
    config: MendConfig,
    rank_id: str | None = None,
    optimizer: api.Optimizers | None = None,
) -> None:
    """As `mend.mend_init`. `rank_id`: a label; racks have numbers (MEND_RACK). `optimizer`: where
    moments are exchanged. Where nothing names this rack, a quorum of one without peers is a job of
    this rack alone, and the ranks of one torchrun that count each other as peers are a rack each,
    or one rack if the model reduces gradients over them. A rack alone warns. Raises what
    `mend.mend_init` raises."""
    if optimizer is None and config.momentum_sync_period_steps is not None:
        warnings.warn(
            "momentum_sync_period_steps averages moments of an optimizer that mend_init is given; "
            "it has none, and averages none, as tsugi-mend does",
            stacklevel=2,
        )
        config = replace(config, momentum_sync_period_steps=None)
    seat = _seat_of(config, model)
    runtime = api.mend_init(model, seat.config, optimizer, mesh=seat.mesh)
    by_hand = optimizer is None
    made = Runtime(runtime, steps_by_hand=by_hand, rank_id=rank_id, ranks=seat.ranks)
    _runtimes[unwrap(model)] = made


class _Seat(NamedTuple):
    config: MendConfig
    mesh: DeviceMesh | None = None
    ranks: tuple[int, ...] = ()
    """Other ranks of this rack that the script considers peers."""


def _seat_of(config: MendConfig, model: nn.Module) -> _Seat:
    """In the predecessor every process is a learner, and none has a number."""
    if config.rack is not None or not config.exchange:
        return _Seat(config)
    peers = len(config.sideband_peers)
    asks_for_one = config.is_named("merge_min_racks") and not config.is_named("racks")
    if not peers and config.merge_min_racks == 1 and (asks_for_one or config.racks == 1):
        warnings.warn(f"this job has one rack, {ALONE}", stacklevel=3)
        return _Seat(replace(config, rack=0, racks=1))
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1 or not ranks == config.racks == peers + 1:
        return _Seat(config)
    if not ModelPlan(model, config.fragments).spread():
        return _Seat(config, rack_mesh(ranks_per_rack=1))
    warnings.warn(f"the ranks of this model's collectives are one rack, {ALONE}", stacklevel=3)
    one = replace(config, rack=0, racks=1, merge_min_racks=1, sideband_peers=())
    return _Seat(one, None, tuple(rank for rank in range(ranks) if rank != dist.get_rank()))


def mend_shutdown(model: nn.Module) -> None:
    """As `mend.mend_shutdown`. The last figures are in get_runtime(model).status() before it."""
    api.mend_shutdown(model)


def get_runtime(model: nn.Module) -> Runtime:
    """The runtime of this model. Raises UsageError without one."""
    runtime = api.get_runtime(model)
    for kept in list(_runtimes.values()):
        if kept._runtime is runtime:
            return kept
    made = _runtimes[unwrap(model)] = Runtime(runtime, steps_by_hand=False)
    return made
