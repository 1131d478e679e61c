"""sim.world: builds a job from a scenario, runs it to its end, checks the invariants on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from mend.codec import CODECS
from mend.fragment.plan import build_plan, trainable
from mend.fragment.shards import replicated
from mend.fragment.view import FragmentView
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.protocol.coordinator import Coordinator, CoordinatorOptions
from mend.protocol.leader import Leader, LeaderOptions
from mend.protocol.learner import Learner
from mend.protocol.messages import Hello, Policy, Seat
from mend.protocol.schedule import Schedule
from mend.protocol.shelf import LearnerOptions
from mend.runtime.handoff import Board
from mend.runtime.numerics import Numerics
from mend.runtime.rank import Rank, Roles
from mend.runtime.steps import StepOptions, Track, Trainer
from mend.runtime.witness import Witness
from mend.sim.checkers import Checkers
from mend.sim.loop import Loop
from mend.sim.network import Network
from mend.sim.process import Collective, Process, Training
from mend.sim.scenario import WITNESS_TARGET, Fault, Scenario, draw
from mend.terms import MS, SECOND, WITNESS, Member, Peer

HEARTBEAT_MS = 250
"""Slower than live: quiet time costs events, and what is lost is repeated at this pace."""

DETECT_NS = 2 * SECOND
START_NS = 30 * SECOND
STALL_NS = 1 * SECOND
GIVE_UP_NS = 60 * SECOND
SHUTDOWN_NS = 4 * SECOND
UPDATES = 64
"""Different update vectors per rack; the steps go round them."""


def plain_fragments(scenario: Scenario) -> list[tuple[bool, ...]]:
    """Fragments are one tensor each; under rda the third is merged by the mean, as an embedding."""
    return [(p == 2,) for p in range(scenario.fragments)]


@dataclass
class Report:
    """What a run came to. `problems` is empty when every invariant held."""

    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    commits: int = 0
    finished: bool = False
    virtual_ns: int = 0
    events: int = 0
    trace: str = ""


class World:
    """One job. `run()` returns the report; nothing outside the seed decides anything."""

    def __init__(self, scenario: Scenario | int) -> None:
        self.scenario = draw(scenario) if isinstance(scenario, int) else scenario
        self.loop = Loop()
        self.rng = random.Random(self.scenario.seed ^ 0x5EED)
        self.network = Network(self.loop, self.scenario, self.rng)
        self.checkers = Checkers(self.scenario, STALL_NS)
        self.trainings: dict[Peer, Training] = {}
        self.witness: Process | None = None
        self._build()

    def run(self) -> Report:
        """To the end of every live training loop, then a liveness verdict.

        Faults have ended by then or never end.
        """
        scenario = self.scenario
        for fault in scenario.faults:
            self.loop.at(fault.begin_ns, partial(self._break, fault))
        length_ns = max(n * ns for n, ns in zip(scenario.steps, scenario.step_ns, strict=True))
        longest_fault_ns = max((f.end_ns for f in scenario.faults if f.kind != "crash"), default=0)
        limit_ns = 20 * length_ns + longest_fault_ns + 2 * GIVE_UP_NS + 10 * SHUTDOWN_NS
        finished = self.loop.run(self._over, limit_ns)
        report = Report(
            scenario, finished=finished, virtual_ns=self.loop.now_ns, events=self.loop.taken
        )
        report.commits = len(self.checkers.commits)
        report.trace = self.checkers.trace()
        report.problems = self.checkers.verdict(self.trainings, finished)
        return report

    def _over(self) -> bool:
        return all(training.ended or training.process.dead for training in self.trainings.values())

    # -------------------------------------------------------------- building

    def _build(self) -> None:
        scenario = self.scenario
        coordinator = Peer(WITNESS, 0) if scenario.witness else Peer(0, 0)
        options = CoordinatorOptions(scenario.racks, HEARTBEAT_MS * MS, DETECT_NS)
        if scenario.witness:
            member = Member(WITNESS, self.rng.getrandbits(62))
            self.witness = Process(coordinator, member, self.network, self.loop, self.rng)
            machine = Coordinator(coordinator, "sim", options)
            self.witness.start(Witness(machine, self.witness, lambda line: None))
        for rack in range(scenario.racks):
            self._build_rack(rack, coordinator, options)

    def _build_rack(self, rack: int, coordinator: Peer, options: CoordinatorOptions) -> None:
        scenario = self.scenario
        member = Member(rack, self.rng.getrandbits(62))
        processes = [
            Process(Peer(rack, rank), member, self.network, self.loop, self.rng)
            for rank in range(scenario.ranks)
        ]
        collective = Collective(scenario.ranks)
        parts = [self._rank_parts(rack, rank) for rank in range(scenario.ranks)]
        genesis = [[track.anchor for track in tracks] for _, tracks in parts]
        schedule = Schedule(len(parts[0][1]), scenario.period_steps, scenario.overlap_steps)
        for rank, process in enumerate(processes):
            parameters, tracks = parts[rank]
            own = tuple(anchor.digest for anchor in genesis[rank])
            roles = Roles(Learner(process.me, member, self._learner_options(), own), None, None)
            if rank == 0:
                seat = Seat(member, process.address, tuple(p.lane for p in processes))
                digests = tuple(tuple(g[p].digest for g in genesis) for p in range(len(tracks)))
                hello = Hello(seat, self._policy(len(tracks)), (("model", "sim"),), digests)
                detect = LeaderOptions(HEARTBEAT_MS * MS, DETECT_NS, START_NS)
                roles.leader = Leader(hello, coordinator, detect, process.now_ns())
                if coordinator == process.me:
                    roles.coordinator = Coordinator(process.me, "sim", options)
            self._start(
                process, processes, coordinator, roles, parameters, tracks, schedule, collective
            )

    def _start(
        self,
        process: Process,
        rack: Sequence[Process],
        coordinator: Peer,
        roles: Roles,
        parameters: list[nn.Parameter],
        tracks: list[Track],
        schedule: Schedule,
        collective: Collective,
    ) -> None:
        scenario, number = self.scenario, process.me.rack
        board = Board(len(tracks))
        held: list[Training] = []
        numerics = self._numerics()
        trainer = Trainer(
            process.member,
            schedule,
            self._step_options(),
            tracks,
            board,
            now_ns=process.now_ns,
            post=lambda event: held[0].post(event),
            own=lambda offer: held[0].own(offer),
            note=process.note,
            numerics=numerics,
        )
        owned = [track.owned for track in tracks]
        rank = Rank(
            process.me,
            process.member,
            roles,
            owned,
            [t.anchor for t in tracks],
            numerics,
            board,
            process,
            plain_fragments(scenario),
        )
        updates = self._updates(number)
        training = Training(
            process,
            rank,
            trainer,
            collective,
            parameters,
            steps=scenario.steps[number],
            step_ns=scenario.step_ns[number],
            start_ns=START_NS,
            update=lambda step: self._update(number, step, updates),
            tokens=lambda step: 1 + (step * 7 + number) % 5,
            watch=self.checkers.watch,
        )
        held.append(training)
        process.trainer = training
        self.trainings[process.me] = training
        self.checkers.enter(process, training, numerics)
        process.watch = self.checkers.noted
        self._connect(process, rack, coordinator)
        process.start(rank)

    def _connect(self, process: Process, rack: Sequence[Process], coordinator: Peer) -> None:
        for other in rack:
            process.connect(other.me, other.address)
        if process.me.rank == 0:
            process.connect(coordinator, f"tcp://sim:{coordinator.rack}-0")

    def _rank_parts(self, rack: int, rank: int) -> tuple[list[nn.Parameter], list[Track]]:
        scenario = self.scenario
        generator = torch.Generator().manual_seed(scenario.seed * 100 + rack)
        model = nn.ParameterList(
            [
                nn.Parameter(torch.randn(scenario.numel + p, generator=generator))
                for p in range(scenario.fragments)
            ]
        )
        named = dict(trainable(model))
        numerics, tracks = self._numerics(), []
        for layout in build_plan(model, scenario.fragments):
            view = FragmentView(layout, [named[slot.name] for slot in layout.slots])
            held = replicated(layout, scenario.ranks, rank)
            values_N = torch.empty(held.owned.numel)
            view.read(held.owned, values_N)
            tracks.append(Track(view, held, numerics.genesis(values_N)))
        return list(model), tracks

    def _updates(self, rack: int) -> list[list[Tensor]]:
        scenario = self.scenario
        generator = torch.Generator().manual_seed(scenario.seed * 100 + 50 + rack)
        table = [
            torch.randn(UPDATES, scenario.numel + p, generator=generator) * 0.01
            for p in range(scenario.fragments)
        ]
        return [[rows[i] for rows in table] for i in range(UPDATES)]

    def _update(self, rack: int, step: int, updates: list[list[Tensor]]) -> Sequence[Tensor]:
        found = updates[step % UPDATES]
        if (rack, step) in self.scenario.non_finite:
            return [torch.full_like(change, float("nan")) for change in found]
        return found

    def _numerics(self) -> Numerics:
        scenario = self.scenario
        outer = OUTERS["nesterov"](0.7 if scenario.momentum else 1.0, scenario.momentum)
        return Numerics(CODECS[scenario.payload](), MERGES[scenario.merge](), outer)

    def _learner_options(self) -> LearnerOptions:
        sums = self._numerics().measuring is not None
        return LearnerOptions(HEARTBEAT_MS * MS, True, self.scenario.ranks, sums)

    def _policy(self, fragments: int) -> Policy:
        s = self.scenario
        return Policy(
            s.racks,
            s.ranks,
            fragments,
            s.k,
            s.grace_ns,
            s.lockstep,
            s.max_age,
            s.period_steps,
            s.overlap_steps,
            STALL_NS,
        )

    def _step_options(self) -> StepOptions:
        s = self.scenario
        return StepOptions(
            s.ranks, s.overlapped, s.lockstep, s.alignment, 0.5, STALL_NS, GIVE_UP_NS, SHUTDOWN_NS
        )

    # -------------------------------------------------------------- breaking

    def _break(self, fault: Fault) -> None:
        victims = [
            p
            for p in self.processes()
            if (WITNESS_TARGET if p.me.rack == WITNESS else p.me.rack) == fault.a
        ]
        for process in victims:
            if fault.kind == "crash":
                process.crash()
            elif fault.kind == "freeze":
                process.frozen_until_ns = fault.end_ns

    def processes(self) -> list[Process]:
        found = [training.process for training in self.trainings.values()]
        return found + ([self.witness] if self.witness else [])
