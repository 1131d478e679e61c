"""api: what a training script calls. mend_init hooks the optimizer, the rest runs between steps."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mend.config import MendConfig
from mend.config.wiring import local_place, rules_of, settings_of
from mend.errors import ConfigError, UsageError
from mend.fragment.plan import trainable
from mend.mesh import rack_of
from mend.runtime import registry
from mend.runtime.alone import AloneRank
from mend.runtime.async_tp import AsyncTp
from mend.runtime.making import live_rank
from mend.runtime.start import LiveRank
from mend.runtime.status import Status, TokenLedger
from mend.runtime.track import Marks
from mend.terms import MS, SECOND

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def mend_init(
    model: nn.Module,
    config: MendConfig | None = None,
    optimizer: Optimizers | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> Runtime:
    """Join the job and return when this rack trains on the version 0 that all racks share.

    With `optimizer` (one, or several of which a step of the last one is a step) the loop needs no
    other line. Without, call `runtime.step(tokens=n)` after each step. Blocks until every rack has
    said hello. `mesh`: that of `mend.rack_mesh`, where one torchrun spans several racks; it says
    which ranks share this one.

    Raises ConfigError, UsageError (called twice), PlanMismatch (the racks' models or settings
    differ), Refused, StartTimeout, AddressInUse.
    """
    config = config if config is not None else MendConfig()
    members = None
    if mesh is not None:
        config, members = _seated(config, mesh)
    optimizers = (
        [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or [])
    )
    if registry.find(model) is not None:
        raise UsageError(
            "mend_init was called twice for this model; call mend_shutdown(model) first"
        )
    if config.inactive_fields:
        warnings.warn(
            "mend accepts these settings but does not act on them yet: "
            f"{', '.join(config.inactive_fields)}",
            stacklevel=2,
        )
    settings = settings_of(config, members)
    rank: LiveRank | AloneRank
    if config.exchange:
        rank = live_rank(model, settings, rules_of(config), local_place())
    else:
        rank = AloneRank(settings)
    async_tp = AsyncTp()
    try:
        _refuse_strangers(model, optimizers)
        if config.async_tp_enabled:
            async_tp = AsyncTp.enable(model, mesh, rank.recorder.note)
        rank.begin()
        runtime = Runtime(model, config, rank, optimizers, async_tp)
        registry.enter(model, runtime)
    except BaseException:
        async_tp.close()
        rank.abort()
        raise
    return runtime


def mend_shutdown(model: nn.Module, *, keep_local: bool = False) -> Status | None:
    """Merge what is still open, leave the job, and put the anchor into the model.

    The anchor is the same bits on every rack. Waits up to shutdown_timeout_s for racks that are
    still training, then leaves alone. `keep_local`: leave the model's own weights in place. Returns
    the last status; None (and nothing happens) when the model has no runtime.
    """
    runtime = registry.find(model)
    return None if runtime is None else runtime.shutdown(keep_local=keep_local)


def get_runtime(model: nn.Module) -> Runtime:
    """The runtime of this model. Raises UsageError without one."""
    runtime: Runtime = registry.get_runtime(model)
    return runtime


@contextlib.contextmanager
def session(
    model: nn.Module,
    config: MendConfig | None = None,
    optimizer: Optimizers | None = None,
    *,
    keep_local: bool = False,
    mesh: DeviceMesh | None = None,
) -> Iterator[Runtime]:
    """mend_init now, mend_shutdown at the end.

    On an exception (also Ctrl-C) leave at once and keep the weights.
    """
    runtime = mend_init(model, config, optimizer, mesh=mesh)
    try:
        yield runtime
    except BaseException:
        runtime.abort()
        raise
    mend_shutdown(model, keep_local=keep_local)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What `schedule_for(step)` says is due after a step."""

    should_sync_params: bool
    should_sync_momenta: bool
    fragments: tuple[int, ...]


class Runtime:
    """Handle of a rack in a job. Use it from the training thread, but for what says "any
    thread"."""

    def __init__(
        self,
        model: nn.Module,
        config: MendConfig,
        rank: LiveRank | AloneRank,
        optimizers: Sequence[torch.optim.Optimizer],
        async_tp: AsyncTp,
    ) -> None:
        self.config = config
        self._async_tp = async_tp
        self._rank, self._trainer = rank, rank.trainer
        self._tokens: int | None = None
        self._borrowed = False
        self._closed = False
        self._last: Status | None = None
        self._warned_provider = False
        self._hooks = []
        if optimizers:
            mine = weakref.WeakMethod(self._after_step)

            def hook(*_: Any) -> None:
                if (after := mine()) is not None:
                    after()

            self._hooks = [optimizers[-1].register_step_post_hook(hook)]
        self._hooked = bool(optimizers)
        self._model = weakref.ref(model)
        # Runs when the model is freed, or at the end of a program that never shut down.
        self._finalizer = weakref.finalize(model, rank.abort)

    # -------------------------------------------------------------- the loop

    def count_tokens(self, tokens: int) -> None:
        """Weight of the current step; call it before optimizer.step().

        Several calls add up; without a call a step counts 1.
        """
        if tokens < 0:
            raise UsageError(f"count_tokens({tokens}): tokens cannot be negative")
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def step(self, tokens: int | None = None) -> None:
        """One step of the inner optimizer is done. For loops that gave mend_init no optimizer."""
        if self._hooked:
            raise UsageError(
                "mend counts the optimizer's steps already; remove runtime.step(), or the optimizer"
            )
        if tokens is not None:
            self.count_tokens(tokens)
        self._after_step()

    def step_begin(self, step: int) -> None:
        """Older pair with step_end; nothing is due before a step."""

    def step_end(self, step: int) -> None:
        """One step is done, unless an optimizer given to mend_init has counted it already."""
        if not self._hooked:
            self._after_step()

    def _after_step(self) -> None:
        if self._closed:
            raise UsageError("a step after mend_shutdown")
        if self._borrowed:
            raise UsageError("a step inside `with runtime.anchor_weights()`")
        if self._trainer.beside is not None and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "the optimizer's step is being captured into a CUDA graph, whose replays mend does "
                "not see: give mend_init no optimizer, and call runtime.step() after each replay"
            )
        tokens, self._tokens = self._tokens, None
        if self._trainer.stepped(1 if tokens is None else tokens):
            self._rank.live(self._trainer.work())
        if self._async_tp.asked:
            self._async_tp.stepped()
        trainer = self._trainer
        self._rank.pace.stepped(trainer.step, trainer.tokens, trainer.stall_ns_total)

    def record(self, **values: float) -> None:
        """Note plain numbers of the step that is done, such as `record(loss=loss.item())`.

        They go to the events file, for `mend report`. Never blocks; any thread. Raises UsageError
        for a tensor (its `.item()` waits for a GPU: the script says when), and after shutdown.
        """
        self._rank.pace.record(values)

    def drain(self, timeout_s: float) -> None:
        """Wait until every own offer is merged or dropped and everything decided is applied.

        All ranks of a rack call it. Raises GaveUp after timeout_s; nothing is lost then.
        """
        self._rank.live(self._trainer.drain(int(timeout_s * SECOND)))

    # -------------------------------------------------------------- looking

    def status(self) -> Status:
        """Where this rack stands. Cheap; any thread. After shutdown: the last one."""
        return self._last if self._last is not None else self._status()

    def anchor_digest(self) -> str:
        """sha256 hex over (version, digests) of every fragment as trained on now.

        Equal on all racks at equal versions. Any thread. Empty when this rack trains for itself.
        """
        return self._digest_of(self._trainer.standing[2])

    def _digest_of(self, marks: Marks) -> str:
        if not self.config.exchange or not all(marks.digests):
            return ""
        digest = hashlib.sha256()
        for fragment, version in enumerate(marks.versions):
            digests = ",".join(marks.digests[fragment])
            digest.update(f"{fragment} {version} {digests}\n".encode())
        return digest.hexdigest()

    @contextlib.contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """The model holds the merged weights inside the block, its own again behind it.

        All ranks of a rack enter and leave it together.
        """
        local = self._trainer.local_weights()
        self._borrowed = True
        try:
            self._rank.live(self._trainer.publish_anchor())
            yield
        finally:
            self._trainer.put_back(local)
            self._borrowed = False

    def _status(self) -> Status:
        rank, trainer = self._rank, self._trainer
        step, tokens, marks = trainer.standing  # read once: all of it is of one moment
        board = rank.board.look()  # behind it: what is applied here counts as committed
        fragments = len(marks.versions) or 1  # 0: this rack trains for itself
        merged, open_ = marks.merged / fragments, tokens - marks.marked / fragments
        return Status(
            rack=rank.me.rack,
            rank=rank.me.rank,
            step=step,
            tokens=tokens,
            versions=marks.versions,
            rounds_committed=board.commits,
            rounds_missed=dict(marks.missed),
            ledger=TokenLedger(merged, open_, marks.discarded / fragments),
            tokens_merged_share=merged / tokens if tokens else 0.0,
            racks_configured=self.config.racks,
            racks_live=board.live,
            racks_merged=board.members_last,
            closed_by=board.reason_last,
            stall_ms_total=marks.stall_ns_total / MS,
            stall_ms_last=marks.stall_ns_last / MS,
            host_bytes=rank.numerics.buffers.total_bytes,
            device_bytes_peak=trainer.beside.side.bytes_peak if trainer.beside else 0,
            bytes_sent=rank.driver.bytes_sent,
            bytes_received=rank.driver.bytes_received,
            anchor_digest=self._digest_of(marks),
            waiting=board.why,
            async_tp=self._async_tp.said,
            inactive_fields=self.config.inactive_fields,
            frames_refused=rank.driver.counters.frames_refused,
            events_lost=rank.recorder.lost,
            last_error=board.error,
            log_lines_lost=rank.recorder.lines_lost,
        )

    # -------------------------------------------------------------- the older, explicit surface

    def schedule_for(self, step: int) -> StepPlan:
        """What is captured after `step` (counted from 1)."""
        due = self._rank.schedule.captures(step)
        return StepPlan(bool(due), False, due)

    def outer_step_in_flight(self) -> bool:
        """Whether an own contribution waits for its merge."""
        return any(track.offer is not None for track in self._trainer.tracks)

    def outer_step_begin(self, round_id: int, fragment_provider: Any = None) -> None:
        """Nothing to do: mend captures and exchanges by itself.

        The provider is not called; a warning says so once.
        """
        if fragment_provider is not None and not self._warned_provider:
            self._warned_provider = True
            warnings.warn(
                "outer_step_begin: mend reads the fragments from the model itself; "
                "fragment_provider is not called. Both outer_step lines can be removed.",
                stacklevel=2,
            )

    def outer_step_collect(self) -> None:
        """Always None: mend has already applied what was merged."""

    # -------------------------------------------------------------- the end

    def shutdown(self, *, keep_local: bool = False) -> Status:
        """See mend_shutdown."""
        if self._last is None:
            try:
                self._rank.live(self._trainer.close(keep_local=keep_local))
                self._last = self._status()
                self._unhook()
                self._rank.close()
            finally:
                self.abort()
        assert self._last is not None
        return self._last

    def abort(self) -> None:
        """Leave at once: no merge of what is open, the model keeps its own weights. Idempotent; any
        thread: a training thread that waits for other racks raises GaveUp."""
        self._unhook()
        if self._last is None:
            self._last = self._status()
        self._finalizer.detach()
        self._async_tp.close()
        self._rank.abort()
        model = self._model()
        if model is not None and registry.find(model) is self:
            registry.leave(model)

    def _unhook(self) -> None:
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _refuse_strangers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """An optimizer that holds none of the model's parameters was made before fully_shard, or for
    another model: it trains nothing that mend exchanges."""
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    trained = trainable(model)
    missing = [name for name, parameter in trained if id(parameter) not in held]
    if optimizers and len(missing) == len(trained):
        raise UsageError(
            "the optimizer holds none of the model's parameters; make it after fully_shard (and "
            "after what else replaces parameters), then call mend_init"
        )
    if optimizers and missing:
        warnings.warn(
            f"the optimizer does not hold {missing[0]} and {len(missing) - 1} more trainable "
            "parameters of the model; mend exchanges them all the same",
            stacklevel=3,
        )


def _seated(config: MendConfig, mesh: DeviceMesh) -> tuple[MendConfig, tuple[int, ...]]:
    """The configuration of the rack that this process has in the mesh, and the rack's ranks."""
    seat = rack_of(mesh)
    if config.rack not in (None, seat.rack):
        rule = f"the mesh puts this process into rack {seat.rack}"
        raise ConfigError("rack", config.rack, rule, "Leave it out, and unset MEND_RACK.")
    if config.racks != seat.racks:
        rule = f"the mesh has {seat.racks} racks"
        raise ConfigError("racks", config.racks, rule, f"Set racks={seat.racks}.")
    return replace(config, rack=seat.rack), seat.ranks
