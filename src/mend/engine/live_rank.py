"""Starts one rank of a rack from plain settings, and takes it down again."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from mend.consensus.records import MomentFragments
from mend.coordination.events import Event
from mend.coordination.machines import Parts
from mend.coordination.schedule import schedule_of
from mend.coordination.validation import plan_hash
from mend.engine.checkpoint import (
    FROZEN_FACT,
    Cuttable,
    Facts,
    Part,
    left_out,
    read_part,
    together,
)
from mend.engine.checkpoint_writer import (
    CheckpointWriter,
    PendingCheckpoint,
    Save,
    nothing_to_write,
)
from mend.engine.concurrent_outer_step import ConcurrentOuterStep, Roles
from mend.engine.eviction import EvictableTrainer, process_age_ns
from mend.engine.fragment_state import tracks_of
from mend.engine.io_loop import IoLoop, IoLoopOptions
from mend.engine.micro_benchmark import LiveBenchmark, MicroBenchmark, watch_forward
from mend.engine.model_checks import BUFFERS_PAGE
from mend.engine.numerics import Anchor, Numerics
from mend.engine.outcome import tell_end
from mend.engine.published_state import PublishedState
from mend.engine.rack import RackGroup
from mend.engine.rack_state_mirror import RackStateMirrors
from mend.engine.rank_config import Introduction, Settings, parts_of
from mend.engine.recut import Recut
from mend.engine.replay_training import Again
from mend.engine.saved_state import SavedState
from mend.engine.snapshot import Training, note_of, view_of_rank
from mend.engine.state_giving import Given
from mend.engine.sums import check_room
from mend.engine.threads import from_outside
from mend.engine.trainer import AgreeMin, FragmentState, OpenOffer, Share, Spread, Wait
from mend.engine.training_progress import PERIOD_S, TrainingProgress
from mend.engine.training_state import Mirror, Replicas, TrainingState
from mend.errors import CheckpointError, GaveUp, UsageError
from mend.fragment.device import Side
from mend.fragment.model_plan import Cut, ModelPlan
from mend.fragment.plan import (
    Item,
    first_unequal_replica,
    items_of_others,
    rank_facts,
    sharded_by_rows,
)
from mend.fragment.shards import Holding, holding
from mend.fragment.statistics import buffer_digests, in_few_words
from mend.status.event_log import EventLog
from mend.status.messages import JobStatus
from mend.status.server import NOTES_S, Recent
from mend.trace.writer import TapeWriter, begin, header_of
from mend.types import SECOND, WITNESS, Member, Peer

T = TypeVar("T")


class LiveRank:
    """One running rank: trainer on the caller's thread, everything else on the driver's."""

    def __init__(self, plan: ModelPlan, settings: Settings, numerics: Numerics) -> None:
        self.settings, self.numerics = settings, numerics
        self._ending = threading.RLock()
        limit_ns = settings.start_timeout_ns + settings.step.give_up_ns
        self.group = RackGroup(settings.members, limit_ns / SECOND)
        self.me = Peer(settings.rack, self.group.rank)
        device = plan.device
        self._side = Side(device) if device is not None and device.type == "cuda" else None
        self.layouts = plan.layouts
        periods = zip(plan.moments, plan.moment_periods.values(), strict=True)
        self.schedule = schedule_of(
            len(plan.weights), settings.period_steps, settings.overlap_steps, settings.overlap_ramp,
            tuple(MomentFragments(len(cuts), period) for cuts, period in periods),
            polls=settings.racks > 1 and not settings.step.lockstep,
        )  # fmt: skip
        self.recorder = EventLog(
            {"rack": settings.rack, "rank": self.group.rank}, settings.diagnostics
        )
        self.tape: TapeWriter | None = None
        self._told = False
        try:
            nonce = self.group.gather_bytes(secrets.token_bytes(7))[0]
            self.member = Member(settings.rack, int.from_bytes(nonce, "big"))
            self.io_loop = IoLoop(
                self.me, self.member, settings.job, self._io_loop_options(), self.recorder
            )
        except BaseException:  # a port that is taken: there is no driver to abort yet
            self.recorder.close()
            self.group.close()
            raise
        digests = buffer_digests(plan.module) if settings.racks > 1 else {}
        self._buffers = weakref.ref(plan.module), digests
        self.pace = TrainingProgress(
            self.recorder.note, lambda: (self.io_loop.bytes_sent, self.io_loop.bytes_received)
        )
        self.io_loop.every(PERIOD_S, self.pace.write)
        try:
            self._build(plan, numerics)
            if settings.detector.validates and settings.replay is None:
                self._validate(plan.model)
        except BaseException:
            self.abort()
            raise

    def _io_loop_options(self) -> IoLoopOptions:
        """Only the leader listens on the configured port; the rack's other ranks take any."""
        options = replace(self.settings.io_loop, ranks=self.group.ranks)
        if self.me.rank == 0:
            return options
        return replace(options, bind=f"tcp://{options.lane_host}:0")

    def _build(self, plan: ModelPlan, numerics: Numerics) -> None:
        inventories = self._inventories(plan)
        plain = self._plain(plan)
        facts = self._model_facts(plan, plain, inventories)
        self._resumed = part = self._part(plan, inventories)
        tracks = together(self.group, lambda: self._tracks(plan, inventories, numerics, part))
        teams = [team for track in tracks for team in track.holding.teams]
        self.group.team_up(teams, cuda=self._side is not None)
        again = Again(replay, self.me, self.layouts) if (replay := self.settings.replay) else None
        self.published = again.published if again else PublishedState(len(self.layouts))
        self.trainer = (again.trainer if again else EvictableTrainer)(
            self.member,
            self.schedule,
            replace(self.settings.step, ranks=self.group.ranks),
            tracks,
            self.published,
            now_ns=self.io_loop.now_ns,
            post=self._post,
            own=self._own,
            note=self.recorder.note,
            numerics=numerics,
            side=self._side,
        )
        if part is not None:
            self.trainer.resume(part.state.progress, part.offers(tracks))
        genesis = [track.anchor for track in tracks]
        found = self._of_all_ranks(self._introduction(genesis), Introduction)
        parts = parts_of(
            self.settings,
            self.me,
            self.member,
            found,
            facts,
            sums=numerics.measuring is not None,
            started_ns=self.io_loop.now_ns(),
            script=again.script if again else None,
            resumed=(part.resume, part.manifest.step) if part else None,
            moments=self.schedule.moments,
        )
        if again and parts.leader:
            again.check(parts.leader.hello.facts)
        if self.me.rank == 0:
            self.recorder.note("protection", {"protection": self.settings.io_loop.protection})
        roles = self._roles(parts, tuple(track.anchor.payload_bytes for track in tracks))
        self.rank = ConcurrentOuterStep(
            self.me,
            self.member,
            roles,
            [track.owned for track in tracks],
            genesis,
            numerics,
            self.published,
            self.io_loop,
            plain,
            again.comparer if again else self.tape,
            self._moments,
        )
        self._show()
        self.io_loop.call(lambda: self._connect([one.address for one in found]))
        self.io_loop.attach(self.rank)

    def _validate(self, model: nn.Module) -> None:
        """Have the training thread make micro-benchmarks when the rank is slow."""
        device = self._side.device if self._side is not None else torch.device("cpu")
        self.rank.benchmark = self.trainer.benchmark = MicroBenchmark(
            self.io_loop.now_ns,
            self._post,
            LiveBenchmark(device).product_ns,
            watch_forward(weakref.ref(model)),
        )

    @property
    def _moments(self) -> int:
        """Fragments that are not of weights."""
        return len(self.layouts) - self.schedule.fragments

    def _plain(self, plan: ModelPlan) -> list[tuple[bool, ...]]:
        """Per fragment, which tensors the mean merges where the rule is another; else nothing."""
        if self.numerics.measuring is None:
            return []
        plain = plan.plain_slots(self.settings.merge_mean_names)
        check_room(plan.layouts, plain, self.settings.racks, self.numerics.rule.name)
        return plain

    def _model_facts(
        self,
        plan: ModelPlan,
        plain: Sequence[Sequence[bool]],
        inventories: Sequence[Sequence[Item]],
    ) -> Facts:
        slots = [slot for layout in plan.layouts for slot in layout.slots]
        flags = zip(slots, (flag for flags in plain for flag in flags), strict=False)
        means = [(f"merge {slot.name}", "mean") for slot, flag in flags if flag]
        self._plan_facts = (*plan.facts(), *means)
        found = (*self._plan_facts, *rank_facts(inventories))
        self._facts = (*self.settings.facts, ("ranks per rack", str(self.group.ranks)), *found)
        return found

    def _inventories(self, plan: ModelPlan) -> list[tuple[Item, ...]]:
        """What every rank of the rack holds. Replicas must hold the same bits: each speaks for a
        slice of all of them."""
        self._check_groups(plan)
        mine = plan.inventory(hash_all=self.group.ranks > 1)
        found = self._of_all_ranks(mine, tuple[Item, ...])
        if unequal := first_unequal_replica(found):
            name, one, other = unequal
            raise UsageError(
                f"ranks {one} and {other} of this rack hold different values of {name}; wrap the "
                "model in DistributedDataParallel, or broadcast its parameters, before mend_init"
            )
        return found

    def _check_groups(self, plan: ModelPlan) -> None:
        """What synchronises the ranks at every step must stay inside the rack."""
        if beyond := sorted(plan.spread() - set(self.group.members)):
            raise UsageError(
                f"the model is spread over ranks {beyond}, which are not of rack {self.me.rack} "
                f"(ranks {list(self.group.members)}); give DDP or fully_shard a mesh of this rack, "
                "such as mend.rack_mesh()['dp']; if all ranks of this torchrun are one rack, set "
                "MEND_RACK"
            )

    def _introduction(self, genesis: Sequence[Anchor]) -> Introduction:
        digests = tuple(anchor.digest for anchor in genesis)
        return Introduction(
            self.member.incarnation, self._advertised(), self.io_loop.lane_address, digests
        )

    def _cuttable(self, plan: ModelPlan, inventories: Sequence[Sequence[Item]]) -> Cuttable | None:
        """None: its ranks hold shards of another kind than rows."""
        sharded = sharded_by_rows(inventories)
        if sharded is None:
            return None

        def facts(ranks: int, rows: frozenset[str]) -> Facts:
            found: Facts = rank_facts([inventories[0]] * ranks)
            if rows or sharded:
                found = rank_facts(_others(plan, rows, ranks, hashes=False))
            return (*self.settings.facts, ("ranks per rack", str(ranks)), *self._plan_facts, *found)

        return Cuttable(self.layouts, self.schedule.fragments, facts, sharded)

    def _part(self, plan: ModelPlan, inventories: Sequence[Sequence[Item]]) -> Part | None:
        """What this rack has of the checkpoint to go on from. Says what is lost by it."""
        path = self.settings.resume
        if path is None:
            return None
        note, facts, cuttable = self.recorder.note, self._facts, self._cuttable(plan, inventories)
        part = (
            together(self.group, lambda: path.part(*self.me, facts))
            if isinstance(path, SavedState)
            else read_part(path, self.me.rack, self.group, facts, cuttable)
        )
        if part is None:
            effect = "begins with a copy of the others' weights; what only it had is lost"
            note("resume-lost", {"lost": self.me.rack, "open_tokens": None, "effect": effect})
            return None
        manifest = part.manifest
        about = {"folder": str(part.folder), "step": manifest.step, "versions": manifest.versions}
        note("resumed", {**about, "open_tokens": manifest.open_tokens})
        if part.recut is not None:
            effect = "parts of ranks are cut anew; what is registered with scope rack begins fresh"
            note("resume-recut", {"ranks": [manifest.ranks, self.group.ranks], "effect": effect})
        for rack, tokens in left_out(part, self.settings.racks).items():
            effect = f"the job has {self.settings.racks} racks now; what only it had is lost"
            note("resume-lost", {"lost": rack, "open_tokens": tokens, "effect": effect})
        return part.compared(plan.parameters, partial(_frozen, plan))

    def _tracks(
        self,
        plan: ModelPlan,
        inventories: Sequence[Sequence[Item]],
        numerics: Numerics,
        part: Part | None,
    ) -> list[FragmentState]:
        boxes = [{item.name: item.shard for item in items} for items in inventories]

        def held(cut: Cut) -> Holding:
            shards = [[of[name] for name in plan.names_in(cut)] for of in boxes]
            return holding(cut.layout, shards, self.me.rank)

        tracks = tracks_of(plan, numerics, held)
        if part is not None:
            for fragment, track in enumerate(tracks):
                part.restore(fragment, track, numerics.of(moments=bool(track.moments)))
        if self._side is not None:
            self._side.prepare(_on_device(numerics, tracks))
            _prepare(numerics, tracks)
        return tracks

    def _of_all_ranks(self, mine: T, kind: type[T]) -> list[T]:
        """What every rank of the rack says, in rank order."""
        blobs = self.group.gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(blob, type=kind) for blob in blobs]

    def _roles(self, parts: Parts, payload_bytes: tuple[int, ...]) -> Roles:
        """Make the machines, and begin their tape, if there is to be one."""
        roles = Roles.of_parts(parts)
        settings, plan = self.settings, plan_hash(parts.leader.hello) if parts.leader else ""
        if plan:
            self.recorder.note(
                "start", {"member": list(self.member), "plan": plan, "job": settings.job}
            )
        header = header_of(
            settings.job, parts, plan=plan, config=settings.config, payload_bytes=payload_bytes,
            moments=self._moments,
        )  # fmt: skip
        self.tape = begin(settings.diagnostics, settings.tape_mb_max, header, self.recorder.note)
        if self.tape is not None:
            self.tape.watch(roles.named())
        return roles

    def _advertised(self) -> str:
        host, address = self.settings.io_loop.advertise_host, self.io_loop.address
        return f"tcp://{host}:{address.rsplit(':', 1)[1]}" if host else address

    def _connect(self, addresses: Sequence[str]) -> None:
        """Loop thread. A leader speaks to whoever may coordinate and to its ranks, a rank to its
        leader."""
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
        """Let whoever looks see the rack; its leader speaks for all ranks."""
        io_loop, roles = self.io_loop, self.rank.roles
        leader = roles.leader
        if leader is None:
            return

        def traffic() -> tuple[int, int]:
            return io_loop.bytes_sent, io_loop.bytes_received

        training = Training(
            self.published,
            self.pace,
            Recent(lambda: note_of(self.pace, traffic, io_loop.now_ns())),
            self.group.ranks,
            lambda: sum(count for _, count in self.trainer.standing[2].missed),
            lambda: self.numerics.buffers.total_bytes,
        )

        def view(ended: bool) -> JobStatus:
            job, now_ns = self.settings.job, io_loop.now_ns()
            return view_of_rank(job, leader, roles.coordinator, training, now_ns, ended=ended)

        io_loop.every(NOTES_S, training.recent.note)
        io_loop.observe(view)

    # -------------------------------------------------------------- training thread

    def begin(self) -> None:
        """Wait for the other racks, then train on version 0 of the lowest. Raises what stops it."""
        self.trainer.life.started_ns = self.io_loop.now_ns() - process_age_ns()
        self._checkpoints = CheckpointWriter(
            self.group, self.me.rack, self._facts, self.trainer, live=self.live, post=self._post,
            note=self.recorder.note, now_ns=self.io_loop.now_ns,
        )  # fmt: skip
        # The leader raises StartTimeout for hellos; twice that bounds the copy of version 0 as
        # well.
        self.live(self.trainer.begin(2 * self.settings.start_timeout_ns))

    def carry(self, state: TrainingState) -> None:
        """Before `begin`: what the script trains with. A checkpoint that is resumed has what was
        registered. Raises CheckpointError."""
        self.trainer.training_state, self.trainer.give = state, self._give_state
        if self.settings.replay is None:
            self.trainer.reserve = self._reserve_state
        if state.mirrored and self.settings.replay is None:
            self.rank.mirrors = RackStateMirrors(self.rank)
            self.trainer.mirrors = _Mirrors(self.io_loop, self.rank.mirrors)
        ranks = self.group.ranks
        boxes = [holders for t in self.trainer.tracks for holders in t.holding.replicas]
        if ranks > 1 and all(len(holders) == ranks for holders in boxes):
            self.trainer.replicas = Replicas(self.group.rank == 0, self.group.minimum)
        part = self._resumed
        if part is not None:
            together(self.group, lambda: part.registered(state))

    def live(self, doing: Generator[Wait | AgreeMin | Share | Spread, Any, T]) -> T:
        """Drive a generator of `steps` on this thread; returns what it does."""
        answer: object = None
        while True:
            try:
                request = doing.send(answer)
            except StopIteration as end:
                value: T = end.value
                return value
            except SystemExit:  # a replay whose tape is at its end
                self.close()
                raise
            answer = self._answer(request)

    def _answer(self, request: Wait | AgreeMin | Share | Spread) -> object:
        match request:
            case Wait(ready, limit_ns):
                return self.published.wait(ready, limit_ns / SECOND)
            case AgreeMin(values):
                return self.group.minimum(values)
            case Share(_, slice_N, mine):
                return self.group.share(slice_N, mine)
            case Spread(data_B):
                self.group.spread(data_B)
                return None

    def checkpoint(
        self, folder: Path, save: Save | None, limit_ns: int, *, wait: bool
    ) -> PendingCheckpoint:
        """Write this rack's part, with all other racks at one place of the log. See `api`."""
        if self.settings.replay is not None:
            return nothing_to_write(folder)  # it is written; what it applied is on the tape
        return self._checkpoints.checkpoint(folder, save, limit_ns, wait=wait)

    def saved_state(self, limit_ns: int) -> dict[str, Any]:
        """This rank's state, with all other racks at one place of the log. See `api`."""
        if self.settings.replay is not None:
            return {}
        return self._checkpoints.saved_state(limit_ns)

    def settle_checkpoint(self) -> CheckpointError | None:
        """Wait for the one that is being written; why it failed, if nobody has asked."""
        return self._checkpoints.settle()

    def _post(self, event: Event) -> None:
        self.io_loop.call(lambda: self.rank.tell(event))

    def _own(self, offer: OpenOffer) -> None:
        self.io_loop.call(lambda: self.rank.own(offer))

    def _give_state(self, to: Member, step: int, data_B: Given) -> None:
        self.io_loop.call(lambda: self.rank.give_state(to, step, data_B))

    def _reserve_state(self, size: int) -> None:
        self.io_loop.call(lambda: self.rank.reserve_state(size))

    # -------------------------------------------------------------- the end

    def close(self) -> None:
        """After `trainer.close()`: let the others hear the end, then stop. All ranks together."""
        self._note_buffers()
        self.group.barrier()
        coordinator = self.rank.roles.coordinator
        if coordinator is not None and coordinator.proposer.leading:
            self.io_loop.done.wait(5.0)
        self.abort()

    def watch(self, look: Callable[[], None]) -> None:
        """Call `look` about once a second, on the loop."""
        self.io_loop.every(PERIOD_S, look)

    def _note_buffers(self) -> None:
        """Buffers whose module did not tell at the start that training changes them."""
        module, before = self._buffers[0](), self._buffers[1]
        if module is None or not before:
            return
        after = buffer_digests(module)
        if changed := [name for name, digest in before.items() if after.get(name) != digest]:
            effect = "changed in training and are not exchanged: each rack has its own"
            self.recorder.note(
                "buffers-changed",
                {"buffers": in_few_words(changed), "effect": effect, "remedy": BUFFERS_PAGE},
            )

    def abort(self) -> None:
        """Stop now, tell the coordinator if there is time, free threads and ports. Idempotent; any
        thread. On a thread of mend's own it returns at once, and another one does it."""
        from_outside(self._end)

    def _end(self) -> None:
        with self._ending:
            self.io_loop.close(self._farewell)
            if (published := getattr(self, "published", None)) is not None:
                published.fail(GaveUp("this rack has left the job"))  # whoever waits for it still
            if not self._told and hasattr(self, "trainer") and self.settings.replay is None:
                self._told = True
                tell_end(self.me, self.trainer, self.settings.outcomes, self.recorder.note)
            if self._side is not None:
                self._side.close()
            if left := [*self._end_checkpoints(), *self.numerics.close()]:
                self.recorder.note("close-gave-up", {"left": left})
            if self.tape is not None:
                self.tape.close()
            self.pace.end()
            self.recorder.close()
            self.group.close()

    def _end_checkpoints(self) -> list[str]:
        return self._checkpoints.close() if hasattr(self, "_checkpoints") else []

    def _farewell(self) -> None:
        rank = getattr(self, "rank", None)
        leader = rank.roles.leader if rank is not None else None
        if leader is not None:
            effect = leader.farewell()
            if effect.to != self.me:
                self.io_loop.send(effect.to, effect.body)


@dataclass(frozen=True, slots=True)
class _Mirrors:
    """The way of the training thread to those of the loop."""

    io_loop: IoLoop
    mirrors: RackStateMirrors

    def serve(self, step: int, data_B: torch.Tensor) -> None:
        self.io_loop.call(lambda: self.mirrors.serve(step, data_B))

    def seek(self) -> None:
        self.io_loop.call(self.mirrors.seek)

    def fetch(self, mirror: Mirror) -> None:
        self.io_loop.call(lambda: self.mirrors.fetch(mirror))


def _others(
    plan: ModelPlan, rows: frozenset[str], ranks: int, *, hashes: bool
) -> list[tuple[Item, ...]]:
    named, exchanged = dict(plan.module.named_parameters()), plan.parameters.keys()
    return items_of_others(named, exchanged, rows, ranks, hashes=hashes)


def _frozen(plan: ModelPlan, recut: Recut) -> str:
    """The fact of what is not exchanged, as the old ranks would have it. Collective."""
    items = _others(plan, recut.sharded_then, recut.then, hashes=True)
    return dict(rank_facts(items))[FROZEN_FACT]


def _prepare(numerics: Numerics, tracks: Sequence[FragmentState]) -> None:
    """Have all memory of the run ready: locking takes a while, and would hold up the first rounds.

    A second version of every anchor, and vectors for the rounds in flight.
    """
    second = [numerics.buffers.empty(track.anchor.data.numel()) for track in tracks]
    flying = numerics.buffers.idle_max - len(second)
    numel, parcels = max(track.owned.numel for track in tracks), list[Tensor]()
    if numerics.on_device is not None:
        size = numerics.on_device.parcel_bytes(numel)
        parcels = [numerics.buffers.empty(size, torch.uint8)]
    ready = [numerics.buffers.empty(numel) for _ in range(flying - len(parcels))]
    del second, parcels, ready


def _on_device(numerics: Numerics, tracks: Sequence[FragmentState]) -> list[int]:
    """Elements of the vectors that the device will hold: of a round, and where it encodes also an
    anchor and a residual of every fragment, a delta and what is pending."""
    numels = [track.owned.numel for track in tracks if track.moments is None]
    if numerics.on_device is None:
        return [max(numels)] * 3
    return [*numels, *numels, *[max(numels)] * 4]
