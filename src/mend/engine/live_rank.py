"""Builds one rank of a rack from its settings, starts it, and ends it."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from mend.coordination.events import Event, Timed
from mend.coordination.machines import Machines, ProcessSpec
from mend.coordination.validation import plan_hash
from mend.engine.checkpoint.checkpoint import RackCheckpoint, left_out, read_part, together
from mend.engine.checkpoint.checkpoint_writer import PendingCheckpoint, Save
from mend.engine.checkpoint.saved_state import SavedState
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.threads import from_outside
from mend.engine.features.data_ledger import UnitFeed
from mend.engine.features.followed import Readable
from mend.engine.features.followed_log import followed_of
from mend.engine.features.micro_benchmark import LiveBenchmark, MicroBenchmark, watch_forward
from mend.engine.features.served_metrics import ServedMetrics
from mend.engine.hooks.model_checks import Copies, Newcomers
from mend.engine.hooks.step_hooks import FREED
from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.engine.io.process_age import startup_ns
from mend.engine.io.rack import RackGroup
from mend.engine.joining.rack_state_mirror import RackStateMirrors
from mend.engine.joining.state_copying import StateCopying
from mend.engine.joining.training_state import MirrorCalls, Replicas, StateRoutes, TrainingState
from mend.engine.loop.concurrent_outer_step import ConcurrentOuterStep
from mend.engine.one_trainer import OneTrainer
from mend.engine.rack_model import RackModel
from mend.engine.rank_config import Introduction, Settings, parts_of
from mend.engine.snapshot import Training, note_of, view_of_rank
from mend.engine.state.fragment_state import FragmentState, Request
from mend.engine.state.outcome import Outcome, report_end, tell_begin
from mend.engine.state.trainer_feature import TrainerFeature
from mend.engine.state.training_progress import PERIOD_S, TrainingProgress
from mend.engine.trainer.driver import Driver
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_end import NOTE_NS
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.errors import CheckpointError, ConfigError, GaveUp, InvariantError, format_error, require
from mend.events.base import Emit
from mend.events.kinds import (
    BuffersChanged,
    CloseGaveUp,
    MemoryLocked,
    ProcessStarted,
    ProtectionChosen,
    RackResumed,
    ResumeLost,
    ResumeRecut,
)
from mend.fragment.device import Side
from mend.fragment.model_plan import ModelPlan
from mend.fragment.stages import Contents
from mend.fragment.statistics import digests_of_buffers, digests_of_rest, in_few_words
from mend.status.event_log import EventLog
from mend.status.messages import JobStatus
from mend.status.server import NOTES_S, Recent
from mend.trace.writer import TapeWriter, begin, header_of
from mend.types import BUFFERS_MAX, SECOND, WITNESS, Member, Peer

P = ParamSpec("P")
T = TypeVar("T")

LOCKED_BYTES_NOTED = 2 * 10**9
"""Page-locking this much takes seconds; an event explains the delay."""

LOOK_S = 1.0
"""How often to check whether pulls are under way."""


class LiveRank(OneTrainer):
    """One running rank: the trainer on the caller's thread, everything else on the loop's."""

    exchanges = True

    def __init__(
        self,
        plan: ModelPlan,
        settings: Settings,
        numerics: Numerics,
        state_of: Callable[[Emit], TrainingState],
        group: RackGroup | None = None,
    ) -> None:
        """Build everything, then start to receive; `begin` waits for the other racks. All ranks of
        the rack call it together. After a failure nothing is left running; the error is raised.
        `state_of`: makes the training state. `group`: the parts of the rack; None: its ranks."""
        self.numerics, self._ending = numerics, threading.RLock()
        self.group = self.of_ranks = group or group_of(settings)
        self._noted_ns = dict[int, int]()
        """rack -> when its pulls were noted last."""
        with ExitStack() as undo:
            self._open(undo, plan, settings)
            model = RackModel(plan, self.settings, self.group, numerics)
            self._resumed = self._part(model)
            fragment_states = together(self.group, lambda: self._fragment_states(model))
            self._factory = self.settings.factory(self.me, plan.layouts)
            self.published = self._factory.published()
            self._driver = Driver(
                self.group, self.published, self.io_loop.now_ns,
                left=self.close, broken=self._break_off,
            )  # fmt: skip
            state = state_of(self.recorder.note)
            addresses = self._make_machines(undo, model, fragment_states, mirrored=state.mirrored)
            self._make_trainer(undo, model, fragment_states, state)
            undo.callback(self._stop)
            self._start(addresses)
            self._undo = undo.pop_all()

    def _open(self, undo: ExitStack, plan: ModelPlan, settings: Settings) -> None:
        """This rank's place in its rack, its event log, and its sockets, which hear nothing yet."""
        group = self.group
        undo.callback(group.close)
        plan.join(group.gather(plan.contents, Contents), group.members)
        if settings.unequal and plan.differs:
            rule = "has other parameters on other ranks of this rack"
            remedy = "Racks of different sizes have no stages or experts; use as many ranks on each"
            raise ConfigError("model", type(plan.module).__name__, rule, f"{remedy}.")
        self.settings = settings = settings.completed(group.ranks, plan)
        self.me = me = Peer(settings.rack, group.rank)
        self.recorder = EventLog({"rack": me.rack, "rank": me.rank}, settings.diagnostics)
        undo.callback(self.recorder.close)
        nonce = group.gather_bytes(secrets.token_bytes(7))[0]
        self.member = member = Member(me.rack, int.from_bytes(nonce, "big"))
        options = self._io_loop_options()
        self.io_loop = IoLoop(me, member, settings.job, options, self.recorder)
        self.pace = TrainingProgress(
            self.recorder.note, self._traffic, lambda: self.numerics.agreement, warns=me.rank == 0
        )
        undo.callback(self.pace.end)
        undo.callback(self._close_noting, self.numerics.close)
        self._side = Side(plan.gpu) if plan.gpu is not None else None
        if self._side is not None:
            undo.callback(self._side.close)
        undo.callback(self.io_loop.close)  # only if `_stop` has not closed it before
        self.metrics = ServedMetrics(self.recorder.note)
        undo.callback(self.metrics.close)
        if me.rank == 0 and settings.metrics.port:
            self.metrics.open(settings.metrics, {"job_id": settings.job, "rack": str(me.rack)})
        digests = dict[str, str]()
        if settings.policy.racks > 1:
            digests = digests_of_rest(plan.module, plan.parameters.values())
        self._buffers = weakref.ref(plan.module), digests

    def _io_loop_options(self) -> IoLoopOptions:
        """Only the leader listens on the configured port; the other ranks take any free one."""
        options = replace(self.settings.io_loop, ranks=self.group.ranks)
        if self.me.rank == 0:
            return options
        return replace(options, bind=f"tcp://{options.lane_host}:0")

    def _part(self, model: RackModel) -> RackCheckpoint | None:
        """This rack's part of the checkpoint to resume, if there is one. Notes what is lost."""
        source, racks, note = self.settings.resume, self.settings.policy.racks, self.recorder.note
        if source is None:
            return None
        part = (
            together(self.group, lambda: source.part(*self.me, model.facts))
            if isinstance(source, SavedState)
            else read_part(source, self.me.rack, self.group, model.facts, model.cuttable())
        )
        if part is None:
            note(ResumeLost(self.me.rack, None))
            return None
        manifest = part.manifest
        about = (str(part.folder), manifest.step, tuple(manifest.versions))
        note(RackResumed(*about, manifest.open_tokens))
        if part.recut is not None:
            note(ResumeRecut((manifest.ranks, self.group.ranks)))
        for rack, tokens in left_out(part, racks).items():
            note(ResumeLost(rack, tokens, racks))
        return part.compared(model.plan.tensors, model.frozen_then)

    def _buffers_to_compare(self, model: RackModel) -> tuple[tuple[str, str], ...]:
        """(name, digest) of the buffers that racks compare: those of the first rank, and where
        ranks have different modules, also those that only other ranks have. Empty on the other
        ranks."""
        apart, leads = model.plan.differs, self.me.rank == 0
        if self.settings.policy.racks == 1 or self._resumed is not None or not (leads or apart):
            return ()
        lines = digests_of_buffers(model.plan.module)
        if not apart:
            return lines
        ranks = self.group.gather(lines, tuple[tuple[str, str], ...])
        named = {name: digest for rank in reversed(ranks) for name, digest in rank}
        return tuple(sorted(named.items()))[:BUFFERS_MAX] if leads else ()

    def _fragment_states(self, model: RackModel) -> list[FragmentState]:
        """The fragments at version 0, or at the versions of the checkpoint. With a GPU, also
        allocate the memory of the whole run."""
        fragment_states = model.fragment_states()
        if self._resumed is not None:
            for fragment, state in enumerate(fragment_states):
                rules = self.numerics.of(moments=bool(state.moments))
                self._resumed.restore(fragment, state, rules)
        if self._side is not None:
            self._side.prepare(*_on_device(self.numerics, fragment_states))
            self._prepare(fragment_states)
        return fragment_states

    def _prepare(self, fragment_states: Sequence[FragmentState]) -> None:
        """Allocate, and page-lock, the memory of the whole run before the first round."""
        numels = _numels_ahead(self.numerics, fragment_states)
        size = 4 * sum(numels)
        if self.me.rank == 0 and size >= LOCKED_BYTES_NOTED:
            self.recorder.note(MemoryLocked(round(size / 1e9, 1)))
        ready = [self.numerics.buffers.empty(numel) for numel in numels]
        del ready  # back into the pool

    def _make_machines(
        self,
        undo: ExitStack,
        model: RackModel,
        fragment_states: list[FragmentState],
        *,
        mirrored: bool,
    ) -> list[str]:
        """Make the loop thread's half, which agrees with the other racks, pulls and merges. Returns
        the addresses of the ranks of this rack."""
        genesis, part = [state.anchor for state in fragment_states], self._resumed
        digests = tuple(anchor.digest for anchor in genesis)
        ranks = self._introduced(digests)
        parts = parts_of(
            self.settings, self.me, self.member, ranks, model.facts,
            sums=self.numerics.measuring is not None, started_ns=self.io_loop.now_ns(),
            resumed=(part.resume, part.manifest.step) if part else None,
            buffers=self._buffers_to_compare(model),
            part_lost=part is None and self.settings.resume is not None,
        )  # fmt: skip
        if self.me.rank == 0:
            self.recorder.note(ProtectionChosen(self.settings.io_loop.protection))
        machines = self._factory.machines(parts)
        payloads = tuple(anchor.payload_bytes for anchor in genesis)
        self.tape = self._tape(machines, parts, payloads, model.elements)
        if self.tape is not None:
            undo.callback(self.tape.close)
        self.rank = ConcurrentOuterStep(
            self.me, self.member, machines, [state.owned for state in fragment_states], genesis,
            self.numerics, self.published, self.io_loop, model.plain,
            self._factory.tape(self.tape), self._moments,
            partial(self._factory.features, mirrored=mirrored),
        )  # fmt: skip
        self.io_loop.find_by(Readable(self.rank.store, model.parts(fragment_states)).find)
        return [rank.address for rank in ranks]

    def _introduced(self, digests: tuple[str, ...]) -> list[Introduction]:
        """The introductions of all ranks of the rack. Raises ConfigError where other racks could
        not tell two ranks apart."""
        shares = self.io_loop.options.shares_port
        lane = inside = self.io_loop.lane_address
        if shares and self.group.ranks > 1:
            inside = self.io_loop.inside
        mine = Introduction(self._advertised(inside.host), lane, inside, digests)
        ranks = self.group.gather(mine, Introduction)
        if shares:
            self.io_loop.relay([rank.inside for rank in ranks])
        elif twice := [lane for lane, n in Counter(rank.lane for rank in ranks).items() if n > 1]:
            rule = f"several ranks of this rack are at {twice[0].host}:{twice[0].port}"
            remedy = (
                "Set it to each host's own name; or give data_ports a single port: then the rack's "
                "leader carries the connections of all ranks."
            )
            raise ConfigError("advertise_host", lane.host, rule, remedy)
        return ranks

    def _make_trainer(
        self,
        undo: ExitStack,
        model: RackModel,
        fragment_states: list[FragmentState],
        training_state: TrainingState,
    ) -> None:
        """Make the training thread's half, which captures and applies between steps."""
        group, io_loop, rank, note = self.group, self.io_loop, self.rank, self.recorder.note
        post, part = self._post, self._resumed
        teams = [team for state in fragment_states for team in state.holding.teams]
        group.team_up(teams, cuda=self._side is not None)
        if part is not None:
            together(group, lambda: part.registered(training_state))
        parts = TrainerParts(
            member=self.member, policy=self.settings.policy, options=self.settings.step,
            fragment_states=fragment_states, published=self.published, numerics=self.numerics,
            now_ns=io_loop.now_ns, post=post, captured=self._on_loop(rank.captured), note=note,
            grows=rank.store.serve_growing, side=self._side,
            routes=self._routes(training_state, fragment_states),
            resumed=(part.state.progress, part.offers(fragment_states)) if part else None,
            troubles=io_loop.pull_troubles.describe,
            before_capture=_before_captures(model.plan, group),
            features=self._trainer_features(model.plan.model, post),
            started_ns=io_loop.now_ns() - startup_ns(),
        )  # fmt: skip
        self.trainer = self._factory.trainer(parts)
        if (staging := self.trainer.model.staging) is not None:
            undo.callback(staging.close)
        self._checkpoints = self._factory.checkpoints(
            group, self.me.rack, model.facts, self.trainer, drive=self.drive, post=post,
            note=note, now_ns=io_loop.now_ns,
        )  # fmt: skip
        undo.callback(self._close_noting, self._checkpoints.close)
        if (ledger := self.settings.ledger) is not None:
            feed = UnitFeed(self.trainer, post, io_loop.now_ns)
            ledger.attach(feed, self.me.rank, self.group.ranks, self.drive)

    def _routes(
        self, training_state: TrainingState, fragment_states: Sequence[FragmentState]
    ) -> StateRoutes:
        """How the training state reaches racks that join."""
        group, on_loop = self.group, self._on_loop
        copying = require(self.rank.feature(StateCopying), "a live rank copies states")
        boxes = [holders for state in fragment_states for holders in state.holding.replicas]
        alike = group.ranks > 1 and all(len(holders) == group.ranks for holders in boxes)
        calls = None
        if (mirrors := self.rank.feature(RackStateMirrors)) is not None:
            serve, seek, fetch = mirrors.serve, mirrors.seek, mirrors.fetch
            calls = MirrorCalls(on_loop(serve), on_loop(seek), on_loop(fetch))
        return StateRoutes(
            training_state, on_loop(copying.give), on_loop(copying.reserve),
            Replicas(group.rank == 0, group.minimum) if alike else None, calls,
        )  # fmt: skip

    def _trainer_features(
        self, model: nn.Module, post: Callable[[Event], None]
    ) -> list[TrainerFeature]:
        """The micro-benchmark, where the coordinator validates slow ranks."""
        if not self.settings.detector.validates:
            return []
        device = self._side.device if self._side is not None else torch.device("cpu")
        product_ns, watch = LiveBenchmark(device).product_ns, watch_forward(weakref.ref(model))
        return [MicroBenchmark(self.published, self.io_loop.now_ns, post, product_ns, watch)]

    def _start(self, addresses: Sequence[str]) -> None:
        """Start to receive. Everything is built by now."""
        self.io_loop.every(PERIOD_S, self.pace.write)
        self._show()
        self.io_loop.call(lambda: self._connect(addresses))
        self.io_loop.attach(self.rank)

    @property
    def _moments(self) -> int:
        """Number of fragments of moments and running statistics, the last ones."""
        return self.settings.policy.fragments - self.settings.policy.of_weights

    def _tape(
        self, machines: Machines, parts: ProcessSpec, payload_bytes: tuple[int, ...], elements: int
    ) -> TapeWriter | None:
        """Begin the tape of the machines, if one is wanted."""
        settings = self.settings
        plan = plan_hash(parts.leader.hello) if parts.leader else ""
        if plan:
            begun = ProcessStarted(tuple(self.member), plan, settings.job, elements=elements)
            self.recorder.note(begun)
        header = header_of(
            settings.job, parts, plan=plan, config=settings.config, payload_bytes=payload_bytes,
            moments=self._moments,
        )  # fmt: skip
        tape = begin(settings.diagnostics, settings.tape_max_mb, header, self.recorder.note)
        if tape is not None:
            tape.watch(machines.named())
        return tape

    def _traffic(self) -> tuple[int, int]:
        """Bytes (sent, received)."""
        return self.io_loop.bytes_sent, self.io_loop.bytes_received

    def _advertised(self, inside: str) -> str:
        """The sideband's address for other processes. Only the leader's is for other racks: with
        one port for all, the advertised host may be the leader's, so the others give `inside`."""
        host, address = self.settings.io_loop.advertise_host, self.io_loop.address
        if self.me.rank != 0 and self.io_loop.options.shares_port:
            host = f"[{inside}]" if ":" in inside else inside
        return f"tcp://{host}:{address.rsplit(':', 1)[1]}" if host else address

    def _connect(self, addresses: Sequence[str]) -> None:
        """Loop thread. A leader connects to its ranks and to every process that may coordinate, a
        rank to its leader."""
        if self.me.rank != 0:
            self.io_loop.connect(Peer(self.me.rack, 0), addresses[0])
            return
        for rank, address in enumerate(addresses[1:], start=1):
            self.io_loop.connect(Peer(self.me.rack, rank), address)
        if self.settings.witness:
            self.io_loop.connect(Peer(WITNESS, 0), self.settings.witness)
        for rack, address in self.settings.peers.items():
            if rack != self.me.rack:
                self.io_loop.connect(Peer(rack, 0), address)

    def _show(self) -> None:
        """Answer status queries. The leader answers for all ranks of the rack."""
        io_loop, leader, coordinator = self.io_loop, self.rank.leader, self.rank.coordinator
        if leader is None:
            return

        training = Training(
            self.published, self.pace,
            Recent(lambda: note_of(self.pace, self._traffic, io_loop.now_ns())), self.group.ranks,
            missed=lambda: sum(count for _, count in self.trainer.standing[2].missed),
            host_bytes=lambda: self.numerics.buffers.total_bytes,
        )  # fmt: skip

        def view(ended: bool) -> JobStatus:
            job, now_ns = self.settings.job, io_loop.now_ns()
            return view_of_rank(job, leader, coordinator, training, now_ns, ended=ended)

        io_loop.every(NOTES_S, training.recent.note)
        io_loop.every(LOOK_S, self._note_pulls)
        job, rack = self.settings.job, self.me.rack
        io_loop.observe(view, lambda asked: followed_of(job, rack, leader.log, asked))
        self.metrics.publish(view, io_loop)

    def _note_pulls(self) -> None:
        """Note the progress of pulls that other racks wait for: at once, then every NOTE_NS."""
        now_ns, notes = self.io_loop.now_ns(), self.published.look().transfers.notes()
        noted_ns = {rack: self._noted_ns.get(rack, now_ns - NOTE_NS) for rack, _ in notes}
        for rack, pulling in notes:
            if now_ns - noted_ns[rack] >= NOTE_NS:
                noted_ns[rack] = now_ns
                self.recorder.note(pulling)
        self._noted_ns = noted_ns

    # -------------------------------------------------------------- training thread

    def begin(self) -> None:
        """Wait for the other racks, then train on the lowest rack's version 0. Raises the error
        that stops the start."""
        # In the first half of this time the leader raises StartTimeout for missing hellos; the rest
        # bounds the copy of version 0.
        self.drive(self.trainer.begin(2 * self.settings.start_timeout_ns))
        tell_begin(self.me, self.settings.outcomes)

    def drive(self, requests: Generator[Request, Any, T]) -> T:
        """See `Driver`."""
        return self._driver.drive(requests)

    def each(self, requests_of: Callable[[Trainer], Generator[Request, Any, T]]) -> T:
        """`drive`, for the trainer of each part."""
        return self.drive(requests_of(self.trainer))

    def after_step(self) -> None:
        """The work that is due after the step."""
        self._driver.work(self.trainer.work())

    @property
    def unfinished(self) -> bool:
        """Whether `go_on` has something to do."""
        return self._driver.unfinished is not None

    def go_on(self) -> None:
        """See `Driver`."""
        self._driver.go_on()

    def _break_off(self, error: InvariantError) -> None:
        """Leave without telling the other racks, whichever thread found the error. A script that
        catches it trains on alone, and each later call raises it again."""
        self.trainer.outcome = Outcome("failed", format_error(error))
        self.io_loop.break_off(error)
        self.abort()

    def checkpoint(
        self, folder: Path, save: Save | None, limit_ns: int, *, wait: bool
    ) -> PendingCheckpoint:
        """See `Runtime.checkpoint`."""
        return self._checkpoints.checkpoint(folder, save, limit_ns, wait=wait)

    def saved_state(self, limit_ns: int) -> dict[str, Any]:
        """See `Runtime.checkpoint_state`."""
        return self._checkpoints.saved_state(limit_ns)

    def settle_checkpoint(self) -> CheckpointError | None:
        """See `CheckpointWriter.settle`."""
        return self._checkpoints.settle()

    def _post(self, event: Event) -> None:
        """Give an event of the training thread to the rank machine. A sample of the pace, which
        comes up to twenty times a second, does not wake the loop."""
        self.io_loop.call(partial(self.rank.tell, event), soon=not isinstance(event, Timed))

    def _on_loop(self, job: Callable[P, None]) -> Callable[P, None]:
        """A function that makes the loop's thread do `job` soon."""
        return lambda *args, **options: self.io_loop.call(partial(job, *args, **options))

    # -------------------------------------------------------------- the end

    def close(self) -> None:
        """Call it after `trainer.close()`, on all ranks of the rack together: wait until the other
        racks have heard the end, then stop."""
        self.await_end()
        self.abort()

    def await_end(self) -> None:
        """The first part of `close`."""
        self._note_buffers()
        self._note_alone()
        self.group.barrier()
        coordinator = self.rank.coordinator
        if coordinator is not None and coordinator.proposer.leading:
            # A rack that has missed the end copies it from this one; otherwise that takes three
            # seconds.
            self.io_loop.done.wait(max(5.0, self.settings.step.shutdown_ns / SECOND))
        self.group.barrier()  # this rank's rail is served by all ranks of the rack

    def watch(self, look: Callable[[], None]) -> None:
        """Call `look` about once a second, on the loop."""
        self.io_loop.every(PERIOD_S, look)

    def _note_buffers(self) -> None:
        """Note the buffers that training changed although no module announced it at the start, and
        the frozen parameters that it changed."""
        module, before = self._buffers[0](), self._buffers[1]
        if module is None or not before:
            return
        after = digests_of_rest(module, ())
        if changed := [name for name, digest in before.items() if after.get(name) != digest]:
            self.recorder.note(BuffersChanged(in_few_words(changed)))

    def _note_alone(self) -> None:
        """Note it if this rack trained on long after the others had ended."""
        with self.published.changed:
            about = self.published.last_rounds.alone()
        if about is not None and (about.alone, 0) == (self.me.rack, self.me.rank):
            self.recorder.note(about)

    def abort(self) -> None:
        """Stop now, tell the coordinator if there is time, free threads and ports. Idempotent; any
        thread. On one of mend's own threads it returns at once and another thread does the work."""
        from_outside(self._end)

    def abort_freed(self) -> None:
        """As `abort`, where the model was freed. A script that trains on with its parts gets an
        error that says so."""
        from_outside(self._end_freed)

    def _end_freed(self) -> None:
        self.published.fail(GaveUp(FREED))
        self._end()

    def _end(self) -> None:
        with self._ending:
            self._undo.close()

    def _stop(self) -> None:
        """The first step of the end: stop the loop, wake threads that wait, and report the
        outcome."""
        self.io_loop.close(self.rank.say_farewell)
        self.published.fail(GaveUp("this rack has left the job"))  # wakes threads that wait
        report_end(self.trainer.ended(self.me.rank), self.settings.outcomes, self.recorder.note)

    def _close_noting(self, close: Callable[[], list[str]]) -> None:
        if left := close():
            self.recorder.note(CloseGaveUp(tuple(left)))


def group_of(settings: Settings) -> RackGroup:
    """The ranks of the rack."""
    limit_ns = settings.start_timeout_ns + settings.step.wait_timeout_ns
    return RackGroup(settings.members, limit_ns / SECOND)


def _before_captures(plan: ModelPlan, group: RackGroup) -> Callable[[], None]:
    """The checks before captures, which all ranks of the rack make together."""
    newcomers, copies = Newcomers(plan), Copies(plan, group)

    def refuse() -> None:
        newcomers.refuse()
        copies.refuse()

    return refuse


def _numels_ahead(numerics: Numerics, fragment_states: Sequence[FragmentState]) -> list[int]:
    """Number of elements of every large vector that the run needs besides the first anchors: a
    second version of each anchor, the residuals, and the vectors of the rounds in flight. Locking
    them during the run would hold up training that launches kernels."""
    numel = max(state.owned.numel for state in fragment_states)
    kept = [state.anchor.data.numel() for state in fragment_states]
    more = [max(kept)]
    if numerics.spare.residuals:
        more.append(numel)
        kept += [state.owned.numel for state in fragment_states if state.moments is None]
    kept += more * numerics.spare.rounds
    flying = [numel] * (numerics.spare.vectors - len(kept))
    if numerics.on_device is not None:
        flying[0] = -(-numerics.on_device.parcel_bytes(numel) // 4)
    return kept + flying


def _on_device(
    numerics: Numerics, fragment_states: Sequence[FragmentState]
) -> tuple[list[int], list[int]]:
    """Number of elements of each vector that the device holds, and of each that is uploaded to it:
    those of a round. Where the device encodes, these include an anchor and a residual of every
    fragment (no residual with feedback in the weights), a delta and a pending residual."""
    numels = [state.owned.numel for state in fragment_states if state.moments is None]
    most = max(numels)
    if numerics.on_device is None:
        return [most], [most] * 2
    residuals = [] if numerics.in_weights else numels
    return [*residuals, most, most], [*numels, most, most]
