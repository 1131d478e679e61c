"""The functions that a training script calls. `mend_init` hooks the optimizer; everything else runs
between steps."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from mend.codec import cost_of
from mend.config import MendConfig
from mend.config.placing import placed
from mend.config.topology import ranks_of_one_rack
from mend.config.wiring import cores_near, numerics_of, settings_of
from mend.engine import registry
from mend.engine.checkpoint.checkpoint_writer import PendingCheckpoint
from mend.engine.checkpoint.saved_state import SavedState, source_of
from mend.engine.counted_steps import CountedSteps, whole
from mend.engine.features.data_ledger import DataLedger, DataUnits
from mend.engine.hooks import signals
from mend.engine.hooks.model_checks import check_optimizers, warn_of_statistics
from mend.engine.hooks.step_hooks import HoldsParameters, optimizers_of
from mend.engine.io.rack import RackGroup, refuse_ungrouped
from mend.engine.joining.inbox import MirrorInbox
from mend.engine.joining.training_state import Stateful, TrainingState
from mend.engine.live_rank import LiveRank, group_of
from mend.engine.local_only import LocalOnlyRank
from mend.engine.rank_of_parts import RankOfParts
from mend.engine.state.fragment_state import RankPosition
from mend.engine.state.outcome import Outcome, RankEnd, refuse_clean_exit
from mend.engine.trainer.trainer import Trainer
from mend.errors import (
    CheckpointError,
    ConfigError,
    Diverged,
    Evicted,
    InvariantError,
    JobLost,
    MendError,
    NotMerged,
    UsageError,
    format_error,
    require,
)
from mend.events.base import Emit
from mend.events.kinds import CheckpointFailed, RackPlaced, RowsLeft
from mend.fragment.model_plan import ModelPlan
from mend.fragment.parts import JobParts, cut_job
from mend.hardware.async_tp import AsyncTp
from mend.mesh import RackSeat, find_seat, rack_of
from mend.status.metrics import flat, samples_of_rank
from mend.status.status import Status, TokenLedger, data_rows, slow_rack
from mend.step_counters import StepCounter, listen
from mend.types import MS, SECOND

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mend.determinism.enabling import Determinism, Level

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""Or anything with `param_groups`, such as a wrapper around an optimizer."""

Sources = tuple[Path | SavedState | None, DataLedger | None]

YEAR_S = 366 * 86400

LIVES_MAX = 8
"""Maximum number of attempts to join in one `mend_init`; each but the first because the job that it
had joined was lost."""


def mend_init(
    model: nn.Module,
    config: MendConfig | None = None,
    optimizer: Optimizers | None = None,
    *,
    mesh: DeviceMesh | None = None,
    resume: str | Path | SavedState | None = None,
    ledger: DataLedger | None = None,
    determinism: Level | None = None,
    seed: int = 0,
) -> Runtime:
    """Join the job and return when this rack trains on the version 0 that all racks share.

    A step is a step of `optimizer` (of several: of the last one). Without it mend counts the steps
    of the optimizer that it sees training the model, unless the loop calls `runtime.step()` itself.
    Blocks until every rack has said hello. `mesh`: that of `mend.rack_mesh`, where one torchrun
    spans several racks; it says which ranks share this one. With `rack_aware` mend decides that as
    `rack_mesh` does, where the script makes no mesh.

    `resume`: a checkpoint that `Runtime.checkpoint` made, or a folder of them, of which the newest
    complete one is taken, or a SavedState that torch.distributed.checkpoint has loaded; the same on
    all racks. Load what was saved with it into the model and the optimizer first. The job goes on
    with its versions, outer state, open offers, tokens and step (`status().step`). None: a new job.

    `ledger`: gives each row of a dataset to one rack, see `mend.DataLedger`; with `resume` it goes
    on where the checkpoint was made.

    `determinism`: "run", "shape" or "everywhere" enables mend.determinism until the rack leaves, in
    this thread; generators are seeded from `seed` and the rack's number. One that is enabled
    already stays.

    Raises ConfigError, UsageError (called twice; an optimizer of another model; `resume` of another
    type; `resume` or `ledger` with exchange=False; a ledger of no multiple of the rack's ranks, or
    with apply_mode="overwrite"), PlanMismatch (the racks' models or settings differ), Refused,
    StartTimeout, AddressInUse, NotDeterministic, or CheckpointError (none is complete, damaged, of
    another model or plan; racks differ in theirs).
    """
    source = source_of(resume)
    config = config if config is not None else MendConfig()
    optimizers = optimizers_of(optimizer)
    if registry.find(model) is not None:
        raise UsageError(
            "mend_init was called twice for this model; call mend_shutdown(model) first"
        )
    _warn_of_codec(config)
    config, members = _seated(config, mesh)
    asked, config = config, placed(config, members)
    plan = ModelPlan(
        model, config.fragments, frozen=config.exchange_frozen, optimizers=optimizers,
        moment_periods=config.moment_periods, statistics=config.exchange_statistics,
    )  # fmt: skip
    for lives in reversed(range(LIVES_MAX)):
        # A rack whose job was lost begins again as a new life. This attests that its former life is
        # over and held nothing, as if its launcher had started it again.
        with contextlib.suppress(*[JobLost] if lives else ()):
            place = (asked, config, members, mesh)
            with registry.name_holder(config):
                return _begun(plan, place, optimizers, (source, ledger), (determinism, seed))
    raise InvariantError("the last life returns or raises", {"lives": LIVES_MAX})


def _begun(
    plan: ModelPlan,
    place: tuple[MendConfig, MendConfig, tuple[int, ...] | None, DeviceMesh | None],
    optimizers: Sequence[HoldsParameters],
    sources: Sources,
    determined: tuple[Level | None, int],
) -> Runtime:
    """The runtime of a rank that trains, registered. On an error everything is undone. `place`: the
    configuration as the script gave it, and with this process's place in it; the ranks of its rack;
    their mesh. `sources`: the checkpoint to resume, and the data ledger. `determined`: level and
    seed."""
    asked, config, members, mesh = place
    with contextlib.ExitStack() as undo:
        switches = _switches(*determined, config.rack_number)
        if switches is not None:
            undo.callback(switches.close)
        rank = _rank_of(plan, config, members, sources, optimizers)
        undo.callback(rank.abort)
        exchanges = config.exchange and config.racks > 1
        if exchanges and not config.exchange_statistics:
            warn_of_statistics(plan)
        if config != asked:
            address = config.peer_addresses[config.rack_number]
            rank.recorder.note(RackPlaced(config.racks, address))
        async_tp = AsyncTp()
        check_optimizers(plan, optimizers, exchanges=exchanges)
        if config.async_tp_enabled:
            async_tp = AsyncTp.enable(plan.model, mesh, rank.recorder.note)
            undo.callback(async_tp.close)
        rank.begin()
        for part in rank.parts:
            part.pace.begin(*part.trainer.standing[:2])
        runtime = Runtime(plan, config, rank, optimizers, async_tp, switches)
        registry.enter(plan.module, runtime)
        undo.pop_all()
    return runtime


def mend_shutdown(model: nn.Module, *, keep_local: bool = False) -> Status | None:
    """Merge what is still open, leave the job, and put the anchor into the model.

    The anchor is the same bits on every rack. Waits up to shutdown_timeout_s for racks that are
    still training, then leaves alone. `keep_local`: leave the model's own weights in place.

    Returns the last status; its `outcome` says whether all work was merged. Where it was not, the
    model keeps its own weights; errors of the job become an `outcome` and are not raised, so that
    the script can save them. `model` may be any module that shares parameters with the one that
    mend_init was given. Returns None when mend trains no model. Raises UsageError when mend trains
    other models only, and in a forked process.
    """
    runtime = registry.find(model)
    if runtime is None:
        registry.refuse_stranger(model)
        return None
    status: Status = runtime.shutdown(keep_local=keep_local)
    if runtime._checkpoint_error is not None:
        warnings.warn(str(runtime._checkpoint_error), stacklevel=2)
    return status


def _introduce(counter: StepCounter) -> None:
    for runtime in registry.runtimes_of(counter.model):
        runtime._meet(counter)


listen(_introduce)


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
    resume: str | Path | SavedState | None = None,
    ledger: DataLedger | None = None,
    determinism: Level | None = None,
    seed: int = 0,
) -> Iterator[Runtime]:
    """mend_init now, mend_shutdown at the end.

    On an exception (also Ctrl-C) leave at once and keep the weights. Raises NotMerged at the end,
    and for sys.exit(0), when work of this rack was not merged, Diverged when its weights are no
    numbers; the model then holds them. Raises CheckpointError when the last `async_checkpoint` did.
    """
    runtime = mend_init(
        model, config, optimizer, mesh=mesh, resume=resume, ledger=ledger,
        determinism=determinism, seed=seed,
    )  # fmt: skip
    try:
        yield runtime
    except BaseException as error:
        runtime._leave(Outcome("aborted", type(error).__name__))
        if not runtime._forked:
            refuse_clean_exit(error, runtime.status())
        raise
    status = runtime.shutdown(keep_local=keep_local)
    if status.outcome == "diverged":
        raise Diverged(status.outcome_detail)
    how = (status.outcome, status.outcome_detail, status.step, status.tokens, status.ledger.merged)
    ended = RankEnd(status.rack, status.rank, *how)
    if not ended.good:
        raise NotMerged(
            f"rack {status.rack} ended {ended}. Save this model before you start the rack again"
        ) from runtime._checkpoint_error
    if runtime._checkpoint_error is not None:
        raise runtime._checkpoint_error


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What `schedule_for(step)` says is due after a step."""

    should_sync_params: bool
    should_sync_momenta: bool
    fragments: tuple[int, ...]


class Runtime:
    """Handle of a rack in a job. Use it from the training thread, except for methods marked "any
    thread"."""

    def __init__(
        self,
        plan: ModelPlan,
        config: MendConfig,
        rank: LiveRank | RankOfParts | LocalOnlyRank,
        optimizers: Sequence[HoldsParameters],
        async_tp: AsyncTp,
        switches: Determinism | None = None,
    ) -> None:
        self.config = config
        self._async_tp, self._switches = async_tp, switches
        self._rank, self._trainer = rank, rank.trainer
        self._closed = self._forked = False
        self._last: Status | None = None
        self._checkpoint_error: CheckpointError | None = None
        """Error of the last background checkpoint, if only `shutdown` has waited for it."""
        self._steps = CountedSteps(plan, rank, optimizers, async_tp)
        self._began = rank.trainer.standing[0]
        """The step of the job at which this rank began: above 0 after a resume or a join."""
        self._met = weakref.WeakSet[StepCounter]()
        rank.metrics.status = self.status
        # Runs when the model is freed, or at the end of a program that never shut down. The module
        # itself: a script may drop a wrapper of torch.compile and train on.
        self._finalizer = weakref.finalize(plan.module, rank.abort_freed)

    # -------------------------------------------------------------- the loop

    def count_tokens(self, tokens: int) -> None:
        """Weight of the current step; call it before optimizer.step().

        Several calls add up; without a call a step counts 1, or what `local_batch` returned.
        Raises UsageError unless `tokens` is a whole number from 0 to 2^40.
        """
        self._steps.count_tokens(tokens)

    def count_rows(self, rows: int) -> None:
        """Rows that the current step takes from the ledger on this rank; call it before
        optimizer.step(). Several calls add up. Raises UsageError without a ledger, for a value
        that is not a whole number, and at a step for which no rows, or more than the sampler gave,
        were counted.
        """
        self._steps.count_rows(rows)

    def local_batch(self, count: int) -> int:
        """How many of `count` micro-batches to take in the step that begins: all of them, or, on a
        rack that is slow where `failslow_action="act"`, fewer, at least one. Call it before each
        step with the same `count` on all ranks of the rack; they get the same answer. Divide the
        gradients by it. Raises UsageError unless `count` is a whole number from 1 to 2^40.
        """
        return self._steps.local_batch(count)

    def step(self, tokens: int | None = None) -> None:
        """One step of the inner optimizer is done. From here on mend counts these calls alone.

        For loops that gave mend_init no optimizer, and whose steps mend cannot see (a CUDA graph,
        an optimizer that is not one of torch). Raises UsageError when mend_init was given one.
        """
        if self._closed and not self._steps.by_given_optimizer:
            raise UsageError("a step after mend_shutdown")
        self._steps.count_by_hand(tokens)

    def register_state(
        self, name: str, value: Stateful, scope: Literal["job", "rack"] = "job"
    ) -> None:
        """Have `value` (anything with state_dict and load_state_dict) travel with this rack.

        `scope="job"`: what all racks have in common, such as a learning-rate scheduler or a grad
        scaler. A rack that joins gets it from another rack, with the optimizers that mend_init was
        given. `scope="rack"`: what is this rack's own, such as a place in the data or random
        generators; no other rack has it, so a rack that joins begins with its own fresh one.
        Both are a part of `checkpoint`, and are loaded by `mend_init(resume=)`.

        Call it right after mend_init, on every rank, with the same names on every rack. Where there
        is something to load, it is loaded at once: the rest of the script sees it. Raises
        UsageError (after the first step, a name twice, no state dict) and StateRefused (a value
        that cannot travel, by its place; a state that `value` does not take).
        """
        if self._trainer.states.state is not None:
            self._trainer.states.state.register(name, value, scope)

    def _meet(self, counter: StepCounter) -> None:
        """Register an object that counts the steps of this model; see `TrainingState.meet`."""
        state = self._trainer.states.state
        if counter in self._met or state is None:
            return
        if not state.meet(counter, self._began):
            kind, step = type(counter).__name__, self._trainer.standing[0]
            warnings.warn(
                f"{kind}.steps={counter.steps} will be in no checkpoint, nor travel to a rack that "
                f"joins: this {kind} makes its first step after step {step} of the job. Make it "
                "before the first one, and call runtime.register_state('trainer', trainer)",
                stacklevel=5,
            )
        self._met.add(counter)

    def record(self, **values: float) -> None:
        """Note plain numbers of the step that is done, such as `record(loss=loss.item())`.

        They go to the events file, for `mend report`. Never blocks; any thread. Raises UsageError
        for a tensor (its `.item()` waits for a GPU: the script says when); after shutdown it warns.
        """
        with signals.held():
            self._rank.pace.record(values)

    def drain(self, timeout_s: float) -> None:
        """Wait until every own offer is merged or dropped and everything decided is applied.

        All ranks of a rack call it together. Raises GaveUp after `timeout_s` seconds; nothing is
        lost then. Raises UsageError inside `anchor_weights`, whose end would undo what is applied.
        """
        self._steps.refuse_borrowed("drain()")
        with self._steps.writes.aside(), self._rank.untimed():
            self._steps.go_on()
            limit_ns = _limit_ns("drain", timeout_s)
            self._rank.each(lambda trainer: trainer.drain(limit_ns))

    def checkpoint(
        self,
        folder: str | Path,
        save: Callable[[Path], object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Path:
        """Write the state of the whole job into `folder`, with all racks at one place of the log.

        All ranks of all racks call it, with folders of the same name; the first to arrive waits for
        the others, up to `timeout_s` (None: wait_timeout_s). `save(path)` is called on every rank
        of this rack when it stands there: what it writes into that folder (the model, the
        optimizer, the position in the data) becomes a part of the checkpoint. Returns when all
        racks have written; their parts are in `folder / f"rack-{rack}"`.

        Raises CheckpointError when no complete checkpoint was made, or a former one of
        `async_checkpoint` was not; training may go on then.
        """
        return self._checkpoint(folder, save, timeout_s, wait=True).path

    def async_checkpoint(
        self,
        folder: str | Path,
        save: Callable[[Path], object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> PendingCheckpoint:
        """As `checkpoint`, but return as soon as the state is taken; a thread writes it while
        training goes on.

        `save(path)` still runs in this call. What it returns may be done later: a function without
        arguments is called on that thread, and something with `result()`, such as the future of
        `torch.distributed.checkpoint.async_save`, is waited for there; neither may read what
        training changes. The checkpoint is complete when `result()` of the returned handle says so.

        A former one is waited for first, here and in `checkpoint`, `mend_shutdown` and at the end
        of a `session`. If it failed and nobody has called its `result()`, its CheckpointError is
        raised: here once the new one is on its way; at the end of a session; mend_shutdown warns.
        """
        return self._checkpoint(folder, save, timeout_s, wait=False)

    def _checkpoint(
        self,
        folder: str | Path,
        save: Callable[[Path], object] | None,
        timeout_s: float | None,
        *,
        wait: bool,
    ) -> PendingCheckpoint:
        if not str(folder):
            raise UsageError("checkpoint(folder=''): name a folder; '.' is the working directory")
        rank = self._may_checkpoint("checkpoint" if wait else "async_checkpoint")
        self._steps.settle()
        limit_s = self.config.wait_timeout_s if timeout_s is None else timeout_s
        limit_ns = _limit_ns("checkpoint", limit_s)
        path = Path(folder).absolute()
        with self._steps.writes.writing(), self._rank.untimed():
            return rank.checkpoint(path, save, limit_ns, wait=wait)

    def checkpoint_state(self) -> dict[str, Any]:
        """mend's state on this rank, with all racks at one place of the log, for
        `torch.distributed.checkpoint.save` or `async_save`.

        All ranks of all racks call it, after the same step in lockstep; the first one waits for
        the others, up to wait_timeout_s. It may apply what is decided: copy the model and the
        optimizer after it. `mend_init` resumes it from a `SavedState`. Raises CheckpointError when
        the racks do not come together, UsageError with exchange=False and after shutdown.
        """
        if self._rank.settings.unequal:
            raise UsageError(
                "checkpoint_state() where racks have different numbers of ranks (ranks_by_rack): "
                "use checkpoint(folder)"
            )
        rank = self._may_checkpoint("checkpoint_state")
        self._steps.settle()
        with self._steps.writes.writing(), self._rank.untimed():
            return rank.parts[0].saved_state(int(self.config.wait_timeout_s * SECOND))

    def __reduce__(self) -> NoReturn:
        # torch.distributed.checkpoint pickles what has no state_dict.
        raise UsageError("a Runtime cannot be saved: save runtime.checkpoint_state()")

    def _may_checkpoint(self, what: str) -> LiveRank | RankOfParts:
        if isinstance(self._rank, LocalOnlyRank):
            raise UsageError("a checkpoint is of a job that exchanges; this one has exchange=False")
        if self._closed:
            raise UsageError(f"{what}() after mend_shutdown")
        return self._rank

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank of this rack. All its ranks call it together.

        For what one rank notices and all must act on at one step: a signal, a time limit. Raises
        UsageError for a value that has no truth value of its own, such as text.
        """
        if not hasattr(flag, "__bool__"):  # numpy's and torch's bools have it, text has not
            raise UsageError(f"any_rank({flag!r}): give it True or False")
        group = None if isinstance(self._rank, LocalOnlyRank) else self._rank.of_ranks
        return bool(flag) if group is None else group.minimum([-int(bool(flag))])[0] < 0

    # -------------------------------------------------------------- looking

    def status(self) -> Status:
        """Where this rack stands. Cheap; any thread. After shutdown: the last one."""
        with signals.held():  # the loop shares the locks
            return self._last if self._last is not None else self._status()

    def metrics(self) -> dict[str, float]:
        """Numbers of `status()` by name, such as `{"mend/step": 12.0, "mend/rounds_by_racks/2":
        3.0}`, for the `log` of a tracker. The names are those of the page on monitoring. Cheap; any
        thread.
        """
        return flat(samples_of_rank(self.status()))

    def anchor_digest(self) -> str:
        """sha256 hex over (version, digests) of every fragment as trained on now.

        Equal on all racks at equal versions. Any thread. Empty when this rack trains for itself.
        """
        return self._digest_of(self._trainer.standing[2])

    def _digest_of(self, position: RankPosition) -> str:
        if not self.config.exchange or not all(position.digests):
            return ""
        digest = hashlib.sha256()
        for fragment, version in enumerate(position.versions):
            digests = ",".join(position.digests[fragment])
            digest.update(f"{fragment} {version} {digests}\n".encode())
        return digest.hexdigest()

    @contextlib.contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """The model holds the merged weights inside the block, and its own again after it.

        All ranks of a rack enter and leave it together.
        """
        self._steps.go_on()
        trainers = [part.trainer for part in self._rank.parts]
        local = [trainer.local_weights() for trainer in trainers]
        with self._steps.writes.aside(), self._rank.untimed():
            try:
                self._steps.borrowed = True
                self._rank.each(Trainer.publish_anchor)
                yield
            finally:
                with signals.held():
                    for trainer, weights in zip(trainers, local, strict=True):
                        trainer.put_back(weights)
                    self._steps.borrowed = False

    def _status(self) -> Status:
        rank, trainer = self._rank, self._trainer
        step, tokens, position = trainer.standing  # read once: all of it is of one moment
        published = rank.published.look()  # after it: applied versions count as committed
        units = rank.published.of(DataUnits).units
        rounds, sent = published.rounds, [part.published.look().sent for part in rank.parts]
        fragments = len(trainer.weights) or 1  # 0: this rack trains for itself
        rounds_by_racks, rounds_recent = rank.published.rounds_by_racks()
        merged, open_ = position.merged / fragments, tokens - position.marked / fragments
        return Status(
            rack=self.config.rack_number,
            rank=rank.me.rank,
            step=step,
            tokens=tokens,
            versions=position.versions,
            rounds_committed=rounds.count,
            rounds_missed=dict(position.missed),
            ledger=TokenLedger(merged, open_, position.discarded / fragments),
            tokens_merged_share=merged / tokens if tokens else 0.0,
            racks_configured=self.config.racks,
            racks_live=published.orders.live,
            racks_merged=rounds.members,
            closed_by=rounds.reason,
            stall_ms_total=position.stall_ns_total / MS,
            stall_ms_last=position.stall_ns_last / MS,
            host_bytes=sum(part.numerics.buffers.total_bytes for part in rank.parts),
            device_bytes_peak=sum(
                staging.side.bytes_peak
                for part in rank.parts
                if (staging := part.trainer.model.staging) is not None
            ),
            bytes_sent=sum(part.io_loop.bytes_sent for part in rank.parts),
            bytes_received=sum(part.io_loop.bytes_received for part in rank.parts),
            anchor_digest=self._digest_of(position),
            waiting=published.orders.why,
            async_tp=self._async_tp.description,
            frames_refused=sum(part.io_loop.frames_refused for part in rank.parts),
            events_lost=sum(part.recorder.lost for part in rank.parts),
            last_error=published.error,
            outcome=trainer.outcome.word,
            outcome_detail=trainer.outcome.detail,
            rounds_by_racks=rounds_by_racks,
            rounds_recent=rounds_recent,
            outer_rounds=rounds.outer[0],
            outer_momentum=rounds.outer[1],
            codec=self.config.codec,
            payload_bytes=sum(each.bytes for each in sent),
            moment_bytes=sum(each.moment_bytes for each in sent),
            payload_bytes_fp32=sum(each.fp32_bytes for each in sent),
            residual_share=published.sent.residual,
            protection=rank.settings.io_loop.protection,
            log_lines_lost=sum(part.recorder.lines_lost for part in rank.parts),
            slow=tuple(map(slow_rack, published.orders.slow)),
            joined_state=trainer.states.state.account if trainer.states.state else "",
            mirror_bytes=rank.published.of(MirrorInbox).kept_bytes,
            bytes_relayed=sum(part.io_loop.bytes_relayed for part in rank.parts),
            data=data_rows(units, rank.settings.policy) if units is not None else None,
        )

    # -------------------------------------------------------------- the schedule

    def schedule_for(self, step: int) -> StepPlan:
        """What the schedule captures after `step` (counted from 1; after 0 nothing). Without
        lockstep a rack captures sooner where it joins a round that another has opened. Raises
        UsageError for what is not a whole number, and below 0."""
        whole("schedule_for", step, 0, "steps are counted from 1, and nothing is due after 0")
        schedule = self._trainer.calendar.schedule
        due, weights = schedule.captures(step), schedule.fragments
        fragment_states = self._trainer.fragment_states
        momenta = any(
            f >= weights and not fragment_states[f].in_model for f in due if fragment_states
        )
        return StepPlan(any(fragment < weights for fragment in due), momenta, due)

    def outer_step_in_flight(self) -> bool:
        """Whether an own contribution waits for its merge."""
        return any(state.offer is not None for state in self._trainer.fragment_states)

    # -------------------------------------------------------------- the end

    def shutdown(self, *, keep_local: bool = False) -> Status:
        """See mend_shutdown."""
        if self._forked:
            raise UsageError(
                "shutdown() was called in a forked process; call it in the process that trains"
            )
        if self._last is None:
            self._steps.refuse_borrowed("mend_shutdown()")
            try:
                self._settle_checkpoint()
                self._close(keep_local)
                self._last = self._status()
                self._unhook()
                # One that failed has not said that it leaves, so the job cannot end with it.
                if self._last.outcome not in ("diverged", "failed"):
                    self._rank.close()
            except BaseException as error:  # Ctrl-C
                self._leave(Outcome("aborted", type(error).__name__))
                raise
            self._leave(Outcome("aborted"))
        return require(self._last, "a rack that has left has a status")

    def _settle_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written: the other racks need this rank for it."""
        if not isinstance(self._rank, LocalOnlyRank):
            self._checkpoint_error = self._rank.settle_checkpoint()
            if self._checkpoint_error is not None:
                self._rank.recorder.note(CheckpointFailed(str(self._checkpoint_error)))

    def _close(self, keep_local: bool) -> None:
        """End the training. An error of mend becomes the outcome: the script has weights to
        save."""
        trainer = self._trainer
        try:
            # Other threads write to what it captures: a tensor of inference mode takes no writes.
            with torch.inference_mode(False):
                refusal = self._steps.finish() if self.config.exchange else None
                self._rank.each(lambda each: each.close(keep_local=keep_local, refusal=refusal))
            self._note_rows_left()
        except Evicted:
            return  # it has ended in order
        except MendError as error:
            if isinstance(error, Diverged):  # the word says it
                trainer.outcome = Outcome("diverged", str(error))
            else:
                trainer.outcome = Outcome("failed", format_error(error))

    def _note_rows_left(self) -> None:
        """Say which rows the merged weights lack: a batch that a DataLoader dropped, what a rack
        gave back that ended sooner, when the others could take no more, or lost work."""
        status = self._status()
        data, speaks = status.data, status.rank == 0 and status.outcome == "merged"
        if speaks and data is not None and data.left:
            rows = data.done + data.open + data.left
            self._rank.recorder.note(RowsLeft(data.left, rows))

    def abort(self) -> None:
        """Leave at once: no merge of what is open, the model keeps its own weights. Idempotent; any
        thread: a training thread that waits for other racks raises GaveUp."""
        self._leave(Outcome("abandoned"))

    def _leave(self, outcome: Outcome) -> None:
        """Leave the job. `outcome`: of this rank, unless it has one already."""
        if self._forked:
            return
        with signals.held():
            self._unhook()
            if self._last is None:
                for part in self._rank.parts:
                    if part.trainer.outcome.word == "running":
                        part.trainer.outcome = outcome
                self._last = self._status()
            self._finalizer.detach()
            self._async_tp.close()
            if self._switches is not None and self._switches.is_of_this_thread:
                self._switches.close()
            self._rank.abort()
            registry.leave(self)

    def _disown(self) -> None:
        """Called in a process that was forked from the one that trains: take no part in the job."""
        self._forked = True
        self._finalizer.detach()
        for part in self._rank.parts:
            part.published.disown()
        self._unhook()

    def _unhook(self) -> None:
        self._closed = True
        self._steps.close()


def _limit_ns(call: str, timeout_s: object) -> int:
    """A time limit in ns: 0 for a negative one, a year for infinity. Raises UsageError for NaN or
    another type."""
    if not isinstance(timeout_s, int | float) or timeout_s != timeout_s:
        raise UsageError(f"{call}(timeout_s={timeout_s!r}): give it a number of seconds")
    return int(max(0, min(timeout_s, YEAR_S)) * SECOND)


def _rank_of(
    plan: ModelPlan,
    config: MendConfig,
    members: tuple[int, ...] | None,
    sources: Sources,
    optimizers: Sequence[HoldsParameters],
) -> LiveRank | RankOfParts | LocalOnlyRank:
    state_of = partial(_training_state, plan, config, optimizers)
    resume, ledger = sources
    if not config.exchange:
        if ledger is not None:
            raise UsageError(
                "mend_init(ledger=) with exchange=False: a rack that trains for itself has no log "
                "that gives out rows. Leave ledger out, and use a plain sampler"
            )
        if resume is not None:
            raise UsageError(
                f"mend_init(resume={str(resume)!r}) with exchange=False: a rack that trains for "
                "itself reads no checkpoint of a job. Leave resume out, and load what the script "
                "has saved with it"
            )
        return LocalOnlyRank(settings_of(config, members), state_of)
    if ledger is not None and config.apply_mode == "overwrite":
        raise UsageError(
            'mend_init(ledger=) with apply_mode="overwrite", which discards the work of rows that '
            "the ledger would count as done. Leave apply_mode out"
        )
    cores = cores_near(plan)
    settings = settings_of(config, members, cores, resume, ledger)
    numerics = partial(numerics_of, config, plan, cores)
    if not config.ranks_by_rack:
        return LiveRank(plan, settings, numerics(), state_of)
    ranks = group_of(settings)
    parts = _parts_of_job(plan, config, sources, ranks)
    if parts is None or parts.hosts(ranks.ranks) == tuple(range(ranks.ranks)):
        return LiveRank(plan, settings, numerics(), state_of, ranks)
    copies_state = config.join_copies_state
    return RankOfParts(plan, settings, numerics, state_of, ranks, parts, copies_state=copies_state)


def _parts_of_job(
    plan: ModelPlan, config: MendConfig, sources: Sources, ranks: RackGroup
) -> JobParts | None:
    """The parts of a job whose racks have different numbers of ranks; None: all have the same
    number. Raises ConfigError and UsageError for what such a job cannot do."""
    sizes, rack = config.ranks_by_rack, config.rack_number
    if sizes[rack] != ranks.ranks:
        rule = f"says {sizes[rack]} for rack {rack}, which has {ranks.ranks}"
        raise ConfigError("ranks_by_rack", sizes, rule, "Start as many as it says, or change it.")
    if len(set(sizes)) == 1:
        return None
    resume, ledger = sources
    if ledger is not None:
        raise UsageError(
            "mend_init(ledger=) where racks have different numbers of ranks (ranks_by_rack). Leave "
            "ledger out, and use a plain sampler"
        )
    if isinstance(resume, SavedState):
        raise UsageError(
            "mend_init(resume=SavedState) where racks have different numbers of ranks "
            "(ranks_by_rack). Resume a folder of runtime.checkpoint"
        )
    named = dict(plan.module.named_parameters())
    parts = cut_job(sizes, named, ranks.members, ranks.rank)
    if config.join_copies_state and parts.rows(named.items(), ranks.ranks, 0):
        rule = (
            "a rack of another number of ranks has other shards of the optimizer's state, which a "
            "rack that joins cannot take (ranks_by_rack)"
        )
        remedy = "Set join_copies_state=False: a rack that joins begins with a fresh optimizer."
        raise ConfigError("join_copies_state", True, rule, remedy)
    return parts


def _training_state(
    plan: ModelPlan,
    config: MendConfig,
    optimizers: Sequence[HoldsParameters],
    note: Emit,
) -> TrainingState:
    names = {id(parameter): name for name, parameter in plan.module.named_parameters()}
    enabled = config.join_copies_state
    return TrainingState(
        optimizers, names, note, enabled=enabled, mirrored=config.mirror_rack_state
    )


def _warn_of_codec(config: MendConfig) -> None:
    costs = cost_of(config.codec, config.apply_mode)
    if costs and config.exchange and config.racks > 1:
        warnings.warn(costs, stacklevel=3)


def _switches(level: Level | None, seed: int, rack: int) -> Determinism | None:
    """Enable mend.determinism at this level; None: the script asked for none. The package is loaded
    only on demand, as it loads much of torch's compiler."""
    if level is None:
        return None
    enabling = import_module("mend.determinism.enabling")
    switches: Determinism | None = enabling.enable_for_rack(level, seed, rack)
    return switches


def _seated(
    config: MendConfig, mesh: DeviceMesh | None
) -> tuple[MendConfig, tuple[int, ...] | None]:
    """The configuration with this process's rack, and the global ranks of that rack; None: all
    ranks of the process group. The mesh names the rack; without one mend finds it if `rack_aware`
    is set."""
    if mesh is not None:
        return _of_seat(config, rack_of(mesh), "the mesh")
    if config.exchange:
        refuse_ungrouped(config.rack, ranks_of_one_rack())
    if not config.rack_aware:
        return config, None
    addressed = bool(config.sideband_peers) or not config.exchange
    seat = find_seat(config.rack, addressed=addressed)
    if seat is None:
        return config, None
    if not config.sideband_peers and not config.is_named("racks"):
        config = replace(config, racks=seat.racks)
    return _of_seat(config, seat, "rack_aware=True")


def _of_seat(
    config: MendConfig, seat: RackSeat, source: str
) -> tuple[MendConfig, tuple[int, ...] | None]:
    if config.rack not in (None, seat.rack):
        rule = f"{source} puts this process into rack {seat.rack}"
        raise ConfigError("rack", config.rack, rule, "Leave it out, and unset MEND_RACK.")
    if config.racks != seat.racks:
        rule = f"the ranks make {seat.racks} racks by {source}"
        raise ConfigError("racks", config.racks, rule, f"Set racks={seat.racks}.")
    return replace(config, rack=seat.rack), seat.ranks
