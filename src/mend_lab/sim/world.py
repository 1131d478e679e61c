"""Builds a job from a scenario, runs it to its end, and checks the invariants meanwhile.

World(7).run()                                         the scenario of seed 7
World(seed=7, racks=4).cut(0, 1, at=1.0, until=3.0).crash(2, at=5.0).heal(at=6.0).run()
"""

from __future__ import annotations

import gc
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mend.codec import codec_named
from mend.consensus.records import MomentFragments, Policy, Seat
from mend.consensus.units import all_free
from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.events import Event
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import LeaderOptions
from mend.coordination.machines import (
    CoordinatorSpec,
    LeaderSpec,
    ProcessSpec,
    RankSpec,
    machines_of,
)
from mend.coordination.messages import Hello, Resume, Retire
from mend.detector import DetectorOptions
from mend.engine.compute.numerics import Numerics, keeps_in_weights
from mend.engine.features.micro_benchmark import MicroBenchmark
from mend.engine.joining.state_copying import StateCopying
from mend.engine.joining.training_state import StateRoutes, TrainingState
from mend.engine.loop.concurrent_outer_step import ConcurrentOuterStep
from mend.engine.rank_factory import loop_features
from mend.engine.state.fragment_state import (
    FragmentProgress,
    FragmentState,
    RankProgress,
    StepOptions,
    tracks_of,
)
from mend.engine.state.published_state import PublishedState
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.engine.witness import build_witness
from mend.errors import Evicted, JobLost
from mend.fragment.model_plan import ModelPlan
from mend.fragment.shards import replicated
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.transport.security import Secrets
from mend.types import MS, PERSON, SECOND, WITNESS, Member, Peer, life_of
from mend_lab.sim.checkers import Checkers
from mend_lab.sim.faults import Broken, FaultActions, target
from mend_lab.sim.generate import draw
from mend_lab.sim.loop import Loop
from mend_lab.sim.moments import Adam, Moments
from mend_lab.sim.network import Network
from mend_lab.sim.numbers import Spoiler
from mend_lab.sim.process import (
    BYTES_NS,
    START_NS,
    THREAD_HOP_NS,
    Collective,
    MemoryTape,
    Process,
    Training,
    WatchedState,
)
from mend_lab.sim.scenario import (
    FOR_EVER,
    OFFERS_BEFORE,
    SHUTDOWN_NS,
    Fault,
    Scenario,
    calm,
    rounds_before,
)
from mend_lab.sim.scenario_builder import Writer

HEARTBEAT_MS = 250
"""Slower than live: quiet time costs events, and what is lost is repeated at this pace."""

DETECT_NS = 2 * SECOND
STALL_NS = 1 * SECOND
WAIT_TIMEOUT_NS = 60 * SECOND
SEAT_TIMEOUT_NS = 8 * SECOND
RETIRES_NS = 10 * SECOND
"""How long `mend retire` repeats its message."""

_OLD, _NEW = bytes(32), bytes(31) + b"1"
KEY_FILES = ((_OLD,), (_OLD, _NEW), (_NEW, _OLD), (_NEW,))
"""Of the lives of a process while the job's key is replaced, see SECURITY.md."""

UPDATES = 64
"""Different update vectors per rack; the steps go round them."""


def plain_fragments(scenario: Scenario) -> list[tuple[bool, ...]]:
    """Fragments are one tensor each; under rda the third is merged by the mean, as an embedding."""
    count = scenario.fragments * (1 + len(scenario.moment_periods))
    return [(p == 2 or p >= scenario.fragments,) for p in range(count)]


def _progress(fragment_states: Sequence[FragmentState]) -> RankProgress:
    """The progress in a checkpoint right after a merge of everything."""
    fragments = tuple(
        FragmentProgress(
            t.anchor.version, t.anchor.rounds, t.anchor.digest, OFFERS_BEFORE, 0, 0, 0, -1, ""
        )
        for t in fragment_states
    )
    return RankProgress(0, 0, 0, 0, (), fragments)


@dataclass
class SimulationReport:
    """The result of a run. `problems` is empty when every invariant held."""

    scenario: Scenario
    problems: list[str]
    commits: int
    finished: bool
    virtual_ns: int
    events: int
    trace: str
    felt: Counter[str]
    """kind of fault -> how often it made a difference."""


class World(Writer):
    """One job, which depends on its scenario alone. `run()` returns the report.

    `what`: a seed to draw the scenario from, or a scenario. Without it, `fields` of Scenario make a
    calm job, to which the calls of `Writer` add faults.
    """

    def __init__(
        self, what: Scenario | int | None = None, *, record: bool = False, **fields: Any
    ) -> None:
        """`record`: every process keeps a tape of its machines."""
        self.record = record
        if isinstance(what, int):
            self.scenario = draw(what)
        else:
            self.scenario = what if what is not None else calm(**fields)
        assert what is None or not fields, "a seed or a scenario, or the fields of one"
        self.loop = Loop()
        self.rng = random.Random(self.scenario.seed ^ 0x5EED)
        self.broken = Broken(self.loop, self.rng)
        self.network = Network(self.loop, self.scenario, self.rng, self.broken)
        self.checkers = Checkers(self.scenario, STALL_NS)
        self.trainings: dict[Peer, Training] = {}
        """The ranks of every rack in its newest life."""
        self.past: list[Process] = []
        self.witness: Process | None = None
        self.away: set[int] = set()
        """Targets that died and are to be started again."""
        self._lives: dict[int, int] = {}
        """Target -> number of its newest life, from 0."""
        self._founder = Peer(WITNESS if self.scenario.witness else 0, 0)
        """The first coordinator."""
        if self.scenario.witness:
            self._build_witness()
        for rack in range(self.scenario.racks):
            self._build_rack(rack)

    def run(self, *, first: bool = False) -> SimulationReport:
        """To the end of every live training loop, then the verdict. `first`: or to the first
        problem; a job with a bug may go on for long after it."""
        scenario = self.scenario
        self.checkers.scenario = scenario
        self.broken.plan(
            scenario,
            FaultActions(
                self._crash, self._restart, self._freeze, self._change_clock, self._retire
            ),
        )
        longest_fault_ns = max(
            (scenario.end_of(f) for f in scenario.faults if f.end_ns < FOR_EVER), default=0
        )
        limit_ns = 20 * scenario.length_ns + longest_fault_ns + 2 * WAIT_TIMEOUT_NS
        limit_ns += 10 * max(SHUTDOWN_NS, scenario.shutdown_ns)
        until = self._over_or_broken if first else self._over
        finished, fell = self._run_loop(until, limit_ns)
        checkers = self.checkers
        problems = [*checkers.problems, fell] if fell else checkers.verdict(self, finished)
        return SimulationReport(
            scenario, problems, len(checkers.commits), finished, self.loop.now_ns, self.loop.taken,
            checkers.trace(), self.broken.felt,
        )  # fmt: skip

    def _run_loop(self, until: Callable[[], bool], limit_ns: int) -> tuple[bool, str]:
        """Whether all ended, and the exception of the simulated code, if there was one."""
        collecting = gc.isenabled()
        gc.disable()  # nothing is freed in cycles during a run: looking for them costs a fifth
        try:
            return self.loop.run(until, limit_ns), ""
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = [each for each in frames if not each.filename.endswith("mend/errors.py")][-1]
            name = where.filename.rpartition("/")[2]
            return False, f"{type(error).__name__}: {error} ({name}:{where.lineno})"
        finally:
            if collecting:
                gc.enable()

    def _over_or_broken(self) -> bool:
        return bool(self.checkers.problems) or self._over()

    def _over(self) -> bool:
        if self.away:
            return False
        for each in self.trainings.values():  # asked once per event: `all` would cost more
            if not each.ended and not each.process.dead:
                return False
        return True

    # -------------------------------------------------------------- building

    def _coordinates(self, me: Peer) -> CoordinatorSpec:
        options = CoordinatorOptions(
            self.scenario.racks, HEARTBEAT_MS * MS, DETECT_NS, first=me == self._founder
        )
        return CoordinatorSpec("sim", options)

    def _begin_life(self, number: int) -> None:
        """A new life of a target; where the key is replaced, it reads its key file."""
        life = self._lives[number] = self._lives.get(number, -1) + 1
        if self.scenario.rotates:
            self.network.secrets[number] = Secrets(KEY_FILES[min(life, len(KEY_FILES) - 1)])

    def _build_witness(self) -> None:
        self._begin_life(target(WITNESS))
        member, me = Member(WITNESS, self.rng.getrandbits(62)), Peer(WITNESS, 0)
        self.witness = Process(me, member, self.network, self.loop, self.rng)
        kept = self.scenario.records_kept
        made_of = ProcessSpec(me, member, coordinator=self._coordinates(me), records_kept=kept)
        tape = self._tape(self.witness, made_of)
        self.witness.on_note = self.checkers.check_note
        self.witness.start(build_witness(made_of, self.witness, lambda line: None, tape))
        self.checkers.enter_process(self.witness)

    def _build_rack(self, rack: int) -> None:
        scenario = self.scenario
        self._begin_life(rack)
        member = Member(rack, self.rng.getrandbits(62))
        processes = [
            Process(Peer(rack, rank), member, self.network, self.loop, self.rng)
            for rank in range(scenario.ranks)
        ]
        collective = Collective(scenario.ranks)
        models = [self._model(rack, rank) for rank in range(scenario.ranks)]
        digests = [
            tuple(state.anchor.digest for state in fragment_states) for _, fragment_states in models
        ]
        policy = self._policy(len(digests[0]))
        for process, (parameters, fragment_states), own in zip(
            processes, models, digests, strict=True
        ):
            resume = self._resume(fragment_states)
            rank_machine = RankSpec(self._rank_options(), own, resume.versions if resume else ())
            made_of = ProcessSpec(process.me, member, rank_machine)
            if process.me.rank == 0:
                seat = Seat(member, process.address, tuple(p.lane for p in processes))
                by_fragment = tuple(zip(*digests, strict=True))
                hello = Hello(
                    seat, policy, (("model", "sim"),), by_fragment, resume=resume, part_lost=True
                )
                detect = LeaderOptions(HEARTBEAT_MS * MS, DETECT_NS, START_NS, self._leaders(rack))
                leader = LeaderSpec(hello, self._founder, detect, process.now_ns())
                coordinates, kept = self._coordinates(process.me), scenario.records_kept
                made_of = ProcessSpec(process.me, member, rank_machine, leader, coordinates, kept)
            self._connect(process, processes)
            self._start(process, made_of, parameters, fragment_states, policy, collective)

    def _start(
        self,
        process: Process,
        made_of: ProcessSpec,
        parameters: list[nn.Parameter],
        fragment_states: list[FragmentState],
        policy: Policy,
        collective: Collective,
    ) -> None:
        scenario, number = self.scenario, process.me.rack
        published = WatchedState(len(fragment_states), process, self.checkers.agreement)
        numerics = self._numerics(number)
        rank = ConcurrentOuterStep(
            process.me,
            process.member,
            machines_of(made_of),
            [state.owned for state in fragment_states],
            [t.anchor for t in fragment_states],
            numerics,
            published,
            process,
            plain_fragments(scenario),
            self._tape(process, made_of),
            len(fragment_states) - scenario.fragments,
            loop_features,
        )
        copying = rank.feature(StateCopying)
        assert copying is not None
        moments = Moments(parameters, process.me.rank) if scenario.carries else None
        training_state = TrainingState([moments], {}, process.note) if moments is not None else None
        post, give = process.on_loop(rank.tell), process.on_loop(copying.give)
        parts = TrainerParts(
            member=process.member, policy=policy, options=_step_options(scenario),
            fragment_states=fragment_states, published=published, numerics=numerics,
            now_ns=process.now_ns, post=post, captured=process.on_loop(rank.captured),
            note=process.note,
            routes=StateRoutes(training_state, give),
            features=self._benchmark(process, published, post),
            resumed=(_progress(fragment_states), ()) if scenario.first else None,
            started_ns=process.now_ns() - scenario.restart_ns,
        )  # fmt: skip
        trainer = Trainer(parts)
        training = Training(
            process,
            rank,
            trainer,
            collective,
            parameters,
            scenario,
            moments,
            update=partial(self._update, number, updates=self._updates(number)),
            tokens=partial(self.tokens, number),
            watch=self.checkers.watch,
            begin_again=self._begin_again,
        )
        process.trainer = self.trainings[process.me] = training
        self.checkers.enter(process, training, numerics)
        process.on_note = self.checkers.check_note
        process.start(rank)
        self.checkers.enter_process(process)

    def _tape(self, process: Process, made_of: ProcessSpec) -> MemoryTape | None:
        process.tape = MemoryTape(made_of) if self.record else None
        return process.tape

    def _connect(self, process: Process, rack: Sequence[Process]) -> None:
        for other in rack:
            process.connect(other.me, other.address)
        if process.me.rank == 0:
            for peer in {self._founder, *self._leaders(process.me.rack)}:
                process.connect(peer, f"tcp://sim:{peer.rack}-0")

    def _leaders(self, but: int) -> tuple[Peer, ...]:
        return tuple(Peer(rack, 0) for rack in range(self.scenario.racks) if rack != but)

    def _model(self, rack: int, rank: int) -> tuple[list[nn.Parameter], list[FragmentState]]:
        scenario = self.scenario
        whose = 0 if scenario.first else rack  # racks that resume have one anchor
        generator = torch.Generator().manual_seed(scenario.seed * 100 + whose)
        if scenario.unseeded:
            generator.manual_seed((scenario.seed * 100 + whose) * 100 + self._lives[rack])
        model = nn.ParameterList(
            [
                nn.Parameter(torch.randn(scenario.shape(p), generator=generator))
                for p in range(scenario.fragments)
            ]
        )
        plan = ModelPlan(
            model, scenario.fragments, optimizers=[Adam(list(model))],
            moment_periods=scenario.moment_periods,
        )  # fmt: skip
        numerics, first = self._numerics(), scenario.first
        fragment_states = tracks_of(
            plan, numerics, lambda cut: replicated(cut.layout, scenario.ranks, rank)
        )
        for state in fragment_states if first else ():
            rules, rounds = numerics.of(moments=bool(state.moments)), rounds_before(first)
            state.anchor = rules.adopt(state.anchor.data, state.owned, first, rounds)
        return list(model), fragment_states

    def _benchmark(
        self, process: Process, published: PublishedState, post: Callable[[Event], None]
    ) -> Sequence[MicroBenchmark]:
        if not self.scenario.validates:
            return ()
        slower, rack = self.broken.slower, target(process.me.rack)
        product_ns = lambda: MS * slower(rack)  # noqa: E731
        return (MicroBenchmark(published, process.now_ns, post, product_ns, None),)

    def _resume(self, fragment_states: Sequence[FragmentState]) -> Resume | None:
        """What a rack reports of the checkpoint that it has read."""
        first = self.scenario.first
        if not first:
            return None
        racks, count = tuple(range(self.scenario.racks)), len(fragment_states)
        units = all_free(self.scenario.units) if self.scenario.units else None
        rounds = (rounds_before(first),) * count
        return Resume("ab" * 32, 1, racks, (first,) * count, rounds, units)

    def _updates(self, rack: int) -> list[list[Tensor]]:
        scenario = self.scenario
        generator = torch.Generator().manual_seed(scenario.seed * 100 + 50 + rack)
        table = [
            torch.randn(UPDATES, *scenario.shape(p), generator=generator) * 0.01
            for p in range(scenario.fragments)
        ]
        return [[rows[i] for rows in table] for i in range(UPDATES)]

    def _update(self, rack: int, step: int, updates: list[list[Tensor]]) -> Sequence[Tensor]:
        changes = updates[step % UPDATES]
        if (rack, step) in self.scenario.non_finite:
            return [torch.full_like(change, float("nan")) for change in changes]
        return changes

    def tokens(self, rack: int, step: int) -> int:
        """Tokens of a step, which differ by rack and step."""
        return 1 + (step * 7 + rack) % 5

    def _numerics(self, rack: int = -1) -> Numerics:
        scenario = self.scenario
        outer = OUTERS["nesterov"](
            0.7 if scenario.momentum else 1.0, scenario.momentum, scenario.ramp
        )
        codec = codec_named(scenario.payload)
        return Spoiler(
            partial(self.broken.spoils, rack),
            codec,
            MERGES[scenario.merge](),
            outer,
            staleness_max_rounds=scenario.staleness_max_rounds,
            in_weights=keeps_in_weights(codec, scenario.apply_mode),
        )

    def _rank_options(self) -> RankOptions:
        sums = self._numerics().measuring is not None
        detector = DetectorOptions(validates=self.scenario.validates)
        return RankOptions(HEARTBEAT_MS * MS, self.scenario.ranks, sums, detector)

    def _policy(self, fragments: int) -> Policy:
        s = self.scenario
        return Policy(
            s.racks,
            s.ranks,
            fragments,
            s.k,
            s.grace_ns,
            s.lockstep,
            s.staleness_max_rounds,
            s.period_steps,
            s.overlap_steps,
            s.overlap_ramp,
            STALL_NS,
            SEAT_TIMEOUT_NS,
            restart_attests=True,
            expected=s.expected,
            moments=tuple(MomentFragments(s.fragments, p) for p in s.moment_periods.values()),
            acts=s.acts,
            evicts=s.evicts,
            sharded=s.sharded,
            units=s.units,
        )

    # -------------------------------------------------------------- breaking

    def _processes_of(self, rack: int) -> list[Process]:
        return [p for p in self.processes() if target(p.me.rack) == rack]

    def _crash(self, fault: Fault) -> None:
        """Kill a whole rack, or one rank; the launcher of the rack then ends the others."""
        if fault.kind == "restart":
            self.away.add(fault.a)
        for process in self._processes_of(fault.a):
            alone = fault.kind == "crash" and fault.b >= 0
            if not alone or process.me.rank == fault.b:
                self._kill(process, fault.kind)
            else:
                self.loop.at(
                    self.loop.now_ns + fault.amount, partial(self._kill, process, fault.kind)
                )

    def _kill(self, process: Process, kind: str) -> None:
        if not process.dead and not process.stopped:
            process.crash()
            self.broken.felt[kind] += 1
            self.checkers.agreement.check_survivors()

    def _restart(self, fault: Fault) -> None:
        """A new process with a new incarnation and no memory. One that ended stays so."""
        self.away.discard(fault.a)
        former = self._processes_of(fault.a)
        if not all(process.dead for process in former):
            return
        self.past += former
        if fault.a == target(WITNESS):
            self._build_witness()
        else:
            self._build_rack(fault.a)
        for process in self._processes_of(fault.a):
            process.tell = former[0].tell

    def _begin_again(self, training: Training) -> None:
        """As `mend_init` does it where the job is lost, and a launcher where the rack is evicted:
        once all ranks of the rack have said so, they end and begin another life."""
        rack = training.process.me.rack
        ranks = [each for peer, each in self.trainings.items() if peer.rack == rack]
        if not all(isinstance(each.failure, JobLost | Evicted) for each in ranks):
            return
        after_ns = THREAD_HOP_NS
        if isinstance(training.failure, Evicted):
            for each in ranks:
                each.process.later(THREAD_HOP_NS, each.process.give_up)
            if self.scenario.gone:
                return
            after_ns = self.scenario.restart_ns
        self.away.add(rack)
        self.loop.at(self.loop.now_ns + after_ns, partial(self._end_life, rack, ranks))

    def _end_life(self, rack: int, ranks: Sequence[Training]) -> None:
        for each in ranks:
            if not each.process.dead:
                each.process.give_up()
        if self.trainings[ranks[0].process.me] is ranks[0]:
            self._restart(Fault("restart", self.loop.now_ns, self.loop.now_ns, rack))

    def _freeze(self, fault: Fault, until_ns: int) -> None:
        for process in self._processes_of(fault.a):
            process.frozen_until_ns = max(process.frozen_until_ns, until_ns)

    def _change_clock(self, fault: Fault, begins: bool) -> None:
        for process in self._processes_of(fault.a):
            self.broken.felt[fault.kind] += 1
            if fault.kind == "clock_jump":
                process.jump(fault.amount)
            else:
                process.drift(fault.amount if begins else 0)

    def _retire(self, fault: Fault) -> None:
        """Tell all processes for a while that a dead rack is retired, as `mend retire` does."""
        for process in self._processes_of(fault.a):
            if process.dead and process.me.rank == 0:
                self.broken.felt["retire"] += 1
                for after_ns in range(0, RETIRES_NS, SECOND):
                    job = partial(self._say_retired, process.member)
                    self.loop.at(self.loop.now_ns + after_ns, job)

    def _say_retired(self, gone: Member) -> None:
        for process in self.processes():
            if process.host is not None and process.me.rank == 0:
                retire = Retire(gone.rack, life_of(gone))
                process.later(0, partial(process.host.heard, Peer(PERSON, 0), 0, retire))

    def processes(self) -> list[Process]:
        """The processes of every rack and the witness in their newest lives."""
        processes = [training.process for training in self.trainings.values()]
        return processes + ([self.witness] if self.witness else [])


def _step_options(scenario: Scenario) -> StepOptions:
    shutdown_ns = scenario.shutdown_ns
    overlapped, apply_mode = scenario.overlapped, scenario.apply_mode
    return StepOptions(overlapped, apply_mode, 0.5, WAIT_TIMEOUT_NS, shutdown_ns, BYTES_NS)
