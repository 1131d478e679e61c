"""A process without threads: its host interface and its training loop, under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mend.consensus.records import CheckpointRecord, Record, Snapshot
from mend.coordination.events import Effect, Event
from mend.coordination.ladder import taken_of
from mend.coordination.machines import ProcessSpec
from mend.coordination.messages import Envelope, Message, Patch
from mend.coordination.streams import Streams
from mend.engine.checkpoint.checkpoint_barrier import CheckpointBarrier
from mend.engine.features.data_ledger import UnitFeed
from mend.engine.io.host import Host
from mend.engine.loop.concurrent_outer_step import ConcurrentOuterStep
from mend.engine.state.fragment_state import (
    POLL_NS,
    AgreeMin,
    BroadcastBytes,
    GatherSlices,
    Requests,
    Wait,
)
from mend.engine.state.published_state import PublishedState
from mend.engine.trainer.trainer import Trainer
from mend.errors import (
    CheckpointError,
    Diverged,
    Evicted,
    JobLost,
    MendError,
    PayloadGone,
    WireError,
)
from mend.events.base import LoggedEvent, log_text
from mend.fragment.moments import Moment
from mend.fragment.shards import put_together, take
from mend.trace.format import Entry, Gap, read_record, record_of_entry
from mend.transport.growth import Growth
from mend.types import MS, SECOND, Address, Extent, Member, Meter, Peer
from mend_lab.sim.agreement import Agreement
from mend_lab.sim.faults import target
from mend_lab.sim.loop import Loop
from mend_lab.sim.moments import Adam, Moments
from mend_lab.sim.network import Network
from mend_lab.sim.scenario import Scenario

P = ParamSpec("P")
T = TypeVar("T")

THREAD_HOP_NS = MS // 20

LINGER_NS = 5 * SECOND
"""How long a process that coordinates stays after its script, as `LiveRank.close` does."""

START_NS = 30 * SECOND
BYTES_NS = 3 * SECOND
"""A wait for bytes that is past its limit ends after this long without any."""
CUT_NS = 20 * SECOND
"""How long a simulated script waits for the others in a checkpoint."""


class MemoryTape:
    """The tape of a process as encoded records, so that reading it parses them."""

    def __init__(self, parts: ProcessSpec) -> None:
        self.parts = parts
        self.records: list[bytes] = []

    def put(
        self, machine: str, now_ns: int, event: Event, effects: Sequence[Effect], error: str = ""
    ) -> None:
        self.records.append(record_of_entry(machine, now_ns, event, effects, error))

    def entries(self) -> Iterator[Entry | Gap]:
        for number, record in enumerate(self.records, start=1):
            entry = read_record(record, number)
            assert isinstance(entry, Entry | Gap)
            yield entry


class Process:
    """HostInterface under a virtual clock.

    Each process has a clock of its own: `clock_ns` ahead of the world's, and `drift_ppm` too fast
    since `drifts_ns`.
    """

    def __init__(
        self, me: Peer, member: Member, network: Network, loop: Loop, rng: random.Random
    ) -> None:
        self.me, self.member, self.network, self.loop, self.rng = me, member, network, loop, rng
        self.broken = network.broken
        self.streams = Streams(member) if network.streams else None
        self.clock_ns = rng.randint(0, 10**12)
        self.drift_ppm = self.drifts_ns = 0
        self.address = f"tcp://sim:{me.rack}-{me.rank}"
        self.lane = Address("sim", me.rack * 1000 + me.rank)
        self.served: dict[bytes, memoryview] = {}
        self.peers: dict[Peer, str] = {}
        self.host: Host | None = None
        self.dead = False
        self.stopped = False
        self.frozen_until_ns = 0
        self.notes: list[LoggedEvent] = []
        self.noted_ns: list[int] = []
        """Times of the notes by the world's clock; `notes` itself is compared between runs."""
        self.tape: MemoryTape | None = None
        self.tell: Callable[[str], None] | None = None
        self.on_note: Callable[[Process, LoggedEvent], None] | None = None
        self.trainer: Training | None = None
        self.on_event: Callable[[Process], None] | None = None
        self._alarm_ns: int | None = None
        self._worker_free_ns = 0

    # -------------------------------------------------------------- the world does this to us

    def start(self, host: Host) -> None:
        self.host = host
        self.network.enter(self)
        self._arm()

    def crash(self) -> None:
        self.dead = True
        self.network.leave(self)

    def jump(self, ahead_ns: int) -> None:
        """The clock jumps ahead, which wakes a sleeping process if its timer is due."""
        self.clock_ns += ahead_ns
        self._alarm_ns = None
        self._arm()

    def drift(self, ppm: int) -> None:
        """From now on the clock runs `ppm` millionths too fast."""
        self.clock_ns = self.now_ns() - self.loop.now_ns
        self.drifts_ns, self.drift_ppm = self.loop.now_ns, ppm

    def on_loop(self, job: Callable[P, None]) -> Callable[P, None]:
        """A function with which the training thread has the loop do `job`."""
        return lambda *args, **options: self.later(THREAD_HOP_NS, partial(job, *args, **options))

    def stop(self) -> None:
        """The script has ended: say farewell and close."""
        if self.trainer is not None:
            self.trainer.rank.say_farewell()
        self.stopped = True
        self.network.leave(self)

    def give_up(self) -> None:
        """The script has failed: say farewell and die."""
        self.stop()
        self.crash()

    def frozen(self) -> bool:
        return self.loop.now_ns < self.frozen_until_ns

    def later(self, delay_ns: int, job: Callable[[], None]) -> None:
        """Run a job in this process after a delay, or when it thaws; a dead one never runs it."""
        self.loop.at(self.loop.now_ns + delay_ns, partial(self._run, job))

    def _ended(self) -> bool:
        return self.dead or self.stopped

    def _run(self, job: Callable[[], None]) -> None:
        if self._ended():
            return
        if self.frozen():
            self.broken.felt["freeze"] += 1
            self.loop.at(self.frozen_until_ns, partial(self._run, job))
            return
        job()
        if self._ended():
            return
        self._arm()
        if self.trainer is not None:
            self.trainer.look()
        if self.on_event is not None:
            self.on_event(self)

    def receive(self, envelope: Envelope) -> None:
        self._run(partial(self._hear, envelope))

    def _hear(self, envelope: Envelope) -> None:
        assert self.host is not None
        try:
            body = self.streams.read(envelope) if self.streams is not None else envelope.body
        except WireError:
            self.network.unread += 1
            return
        assert not isinstance(body, Patch), "only who keeps streams sends patches"
        self.host.heard(Peer(envelope.rack, envelope.rank), envelope.incarnation, body)

    def _arm(self) -> None:
        due_ns = self.host.deadline_ns() if self.host is not None else None
        if due_ns is None or self._ended():
            return
        alarm_ns = due_ns - self.clock_ns
        if self.drift_ppm:
            ran_ns = alarm_ns - self.drifts_ns  # by its own clock; rounded up, or it rings too soon
            alarm_ns = self.drifts_ns + -(-ran_ns * 1_000_000 // (1_000_000 + self.drift_ppm))
        if self._alarm_ns is not None and self.loop.now_ns < self._alarm_ns <= alarm_ns:
            return
        self._alarm_ns = armed_ns = max(alarm_ns, self.loop.now_ns)

        def ring() -> None:
            if self._alarm_ns == armed_ns and self.host is not None:
                self._alarm_ns = None
                self.host.tick()

        self.later(armed_ns - self.loop.now_ns, ring)

    # -------------------------------------------------------------- HostInterface

    def now_ns(self) -> int:
        now_ns = self.loop.now_ns + self.clock_ns
        if self.drift_ppm:
            now_ns += (self.loop.now_ns - self.drifts_ns) * self.drift_ppm // 1_000_000
        return now_ns

    def connect(self, peer: Peer, address: str) -> None:
        self.peers[peer] = address

    def send(self, to: Peer, body: Message) -> None:
        if to in self.peers and not self.dead:
            if self.streams is not None:
                envelope = self.streams.envelope("sim", self.me, to, body)
            else:
                envelope = Envelope("sim", *self.me, self.member.incarnation, body)
            self.network.send(self.me.rack, self.peers[to], envelope, type(body).__name__)

    def work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        takes_ns = self.rng.randint(MS // 10, 4 * MS) + self.broken.work_ns(target(self.me.rack))
        self._worker_free_ns = max(self._worker_free_ns, self.loop.now_ns) + takes_ns

        def finish() -> None:
            try:
                result: T | Exception = job()
            except Exception as error:
                result = error
            done(result)

        self.later(self._worker_free_ns - self.loop.now_ns, finish)

    def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        done: Callable[[Exception | None], None],
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.network.fetch(self, holders, key, checksum, into, done, extent, meter)

    def pull_ahead(
        self,
        holder: Address,
        key: bytes,
        into: memoryview,
        done: Callable[[Exception | None], None],
        meter: Meter,
    ) -> None:
        """Never in time: what is simulated is a rank whose pulls begin with the announcement."""
        done(PayloadGone("not simulated"))

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        self.served[key] = view.cast("B")

    def drop(self, key: bytes) -> None:
        self.served.pop(key, None)

    def note(self, event: LoggedEvent) -> None:
        if self.dead:
            return  # it died in the middle of what it was doing
        self.notes.append(event)
        self.noted_ns.append(self.loop.now_ns)
        if self.tell is not None:
            who = f"rack={self.me.rack} rank={self.me.rank}"
            self.tell(f"{self.loop.now_ns / SECOND:9.3f} s {who} {log_text(event)}")
        if self.on_note is not None:
            self.on_note(self, event)

    def finished(self) -> None:
        """A simulated process stops when its script has ended; see `Training`."""


class WatchedState(PublishedState):
    """Reports the records that the training thread is shown, in order, to the checks."""

    def __init__(self, fragments: int, process: Process, agreement: Agreement) -> None:
        super().__init__(fragments)
        self._process, self._agreement = process, agreement

    def on_decided(self, record: Record, outer: tuple[float, float] | None = (0.0, 0.0)) -> None:
        self._agreement.check_record(self._process, record)
        super().on_decided(record, outer)

    def restore(self, snapshot: Snapshot) -> None:
        self._agreement.check_snapshot(self._process, snapshot)
        super().restore(snapshot)


Asked = AgreeMin | GatherSlices | BroadcastBytes


def _slices(
    shares: list[GatherSlices], team: tuple[int, ...], slots: tuple[int, ...]
) -> list[Tensor]:
    return [take(shares[rank].slice_N, shares[rank].holding.owned, slots) for rank in team]


def _results(requests: Sequence[Asked]) -> Sequence[object]:
    """What each rank gets, in the order of ranks."""
    assert len(set(map(type, requests))) == 1, f"ranks of a rack are out of step: {requests}"
    if shares := [request for request in requests if isinstance(request, GatherSlices)]:
        return [put_together(s.holding, s.slice_N, partial(_slices, shares)) for s in shares]
    spread = [request.data_B for request in requests if isinstance(request, BroadcastBytes)]
    for data_B in spread:
        data_B.copy_(spread[0])
    lists = [request.values for request in requests if isinstance(request, AgreeMin)]
    assert len(set(map(len, lists))) <= 1, "ranks agree about different fragments"
    least = [min(column) for column in zip(*lists, strict=True)]
    return [least if lists else None] * len(requests)


class Collective:
    """The in-rack collectives: all ranks get their answers when all have asked."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.asked: dict[int, tuple[Asked, Callable[[object], None]]] = {}

    @cached_property
    def beside(self) -> Collective:
        """The collectives of the threads that write checkpoints."""
        return Collective(self.ranks)

    def ask(self, rank: int, request: Asked, answer: Callable[[object], None]) -> None:
        self.asked[rank] = (request, answer)
        if len(self.asked) < self.ranks:
            return
        requests, answers = zip(*(self.asked[rank] for rank in range(self.ranks)), strict=True)
        self.asked = {}
        # All before the first is given: a rank that goes on uses its slice's memory again.
        for give, result in zip(answers, _results(requests), strict=True):
            give(result)


class Training:
    """A training loop: begin, `steps` steps, close, anchor; as a user's script would do it."""

    def __init__(
        self,
        process: Process,
        rank: ConcurrentOuterStep,
        trainer: Trainer,
        collective: Collective,
        parameters: Sequence[nn.Parameter],
        scenario: Scenario,
        moments: Moments | None,
        *,
        update: Callable[[int], Sequence[Tensor]],
        tokens: Callable[[int], int],
        watch: Callable[[str, Training], None],
        begin_again: Callable[[Training], None],
    ) -> None:
        """`begin_again`: what `mend_init` does where the job is lost."""
        self.process, self.rank, self.trainer, self.collective = process, rank, trainer, collective
        self.parameters, self.scenario, number = parameters, scenario, process.me.rack
        self._update, self._tokens, self._watch = update, tokens, watch
        self._begin_again = begin_again
        self._steps, self._step_ns = scenario.steps[number], scenario.step_ns[number]
        self._pauses = {step: ns for rack, step, ns in scenario.pauses if rack == number}
        self._cut_step = scenario.cut_step
        self.requests: Requests | None = None
        self.began = False
        self.ended = False
        self.failure: Exception | Evicted | None = None
        self.trained_ns = 0
        """When the last step was done."""
        self.ended_ns = 0
        self.stalls: list[tuple[int, int]] = []
        self._wait: tuple[Wait, int, int] | None = None
        self._closing = False
        self._writing: Requests | None = None
        """What the thread that writes it is at."""
        trainer.life.writing = self
        self._barrier = CheckpointBarrier(
            trainer, post=process.on_loop(rank.tell), note=process.note, now_ns=process.now_ns
        )
        self.cut_of = ("", 0)
        """Lineage and number of the checkpoint that it makes."""
        self._taken = 0
        """Micro-batches of this step; 0: the script does not ask how many to take."""
        post = process.on_loop(rank.tell)
        self._feed = UnitFeed(trainer, post, process.now_ns) if scenario.units else None
        self.units: list[int] | None = None
        """Units of data that the next step takes; None: it has not asked yet."""
        self.moments = moments
        """The state of its optimizer, where ranks have one."""
        views = [state.moments for state in trainer.fragment_states if state.moments is not None]
        first = views[0].moments[0] if views else None
        self.inner: Adam | None = first.optimizer if isinstance(first, Moment) else None
        """That with moments which racks average."""

    def done(self) -> bool:
        """Whether its newest checkpoint is written."""
        return self._writing is None

    def look(self) -> None:
        """After each event of this process: let the training thread go on if it can."""
        published = self.rank.published
        if not self.began:
            self.began = True
            self._drive(self._begin())
        elif self._wait is not None:
            wait, _, _ = self._wait
            if published.failure is not None or wait.ready():
                self._wake()

    def _begin(self) -> Requests:
        yield from self.trainer.begin(2 * START_NS)
        state = self.trainer.states.state
        if self.moments is not None and state is not None and state.joins and not state.copied:
            self.moments.begin_fresh(self.trainer.step)

    def _wake(self) -> None:
        assert self._wait is not None
        wait, started_ns, _ = self._wait
        self._wait = None
        self.stalls.append((self.process.loop.now_ns - started_ns, wait.limit_ns))
        self._advance(wait.ready())

    def _drive(self, requests: Requests) -> None:
        self.requests = requests
        self._advance(None)

    def _advance(self, answer: object) -> None:
        assert self.requests is not None
        try:
            request = self.requests.send(answer)
        except StopIteration:
            self.requests = None
            self._next()
            return
        except (Exception, Evicted) as error:
            self._fail(error)
            return
        if isinstance(request, Wait):
            if request.ready():
                self._advance(True)
                return
            token = self.process.rng.getrandbits(62)
            self._wait = (request, self.process.loop.now_ns, token)
            self.process.later(request.limit_ns, lambda: self._time_is_up(token))
        else:
            self.collective.ask(
                self.process.me.rank,
                request,
                lambda got: self.process.later(THREAD_HOP_NS, lambda: self._advance(got)),
            )

    def _time_is_up(self, token: int) -> None:
        if self._wait is not None and self._wait[2] == token:
            self._wake()

    def _next(self) -> None:
        """The next action of the script after a call has returned."""
        if self._writing is not None and self.trainer.step >= self._steps:
            self.process.later(POLL_NS, self._next)  # the end waits for a checkpoint
        elif self._closing:
            self.ended, self.ended_ns = True, self.process.loop.now_ns
            coordinator = self.rank.coordinator
            coordinates = coordinator is not None and coordinator.proposer.leading
            self.process.later(LINGER_NS if coordinates else THREAD_HOP_NS, self.process.stop)
        elif pause_ns := self._pauses.pop(self.trainer.step, 0):
            self.process.later(pause_ns, self._next)
        elif 0 < self._cut_step <= self.trainer.step:
            self._cut_step = 0
            self._drive(self._cut())
        elif self._feed is not None and self.units is None and self.trainer.step < self._steps:
            self._drive(self._take_units(self._feed))
        elif self.trainer.step < self._steps and self.units != []:
            slower = self.process.broken.slower(target(self.process.me.rack))
            batch = self.trainer.clock.batch = self.scenario.batch
            self._taken = taken_of(batch, self.trainer.ladder.batch_pct)
            part_ns = self._step_ns * self._taken // batch if batch else self._step_ns
            self.process.later(slower * part_ns, self._step)
        else:
            self._closing, self.trained_ns = True, self.process.loop.now_ns
            self._drive(self.trainer.close())

    def _take_units(self, feed: UnitFeed) -> Requests:
        """Wait for the units of the next step; there may be fewer left, or none."""
        units = list[int]()
        for position in range(self.scenario.unit_batch):
            unit = yield from feed.take(self.trainer.units + position)
            if unit is None:
                break
            units.append(unit)
        self.units = units

    def _cut(self) -> Requests:
        """Make a checkpoint without its files. A failure does not stop the script."""
        try:
            mark = yield from self._barrier.cut("cut", CUT_NS)
            self.cut_of = (mark.lineage, mark.number)
            self._watch("cut", self)
            writing = self._write(mark)
            if self.scenario.cut_writes_ns:
                self._writing = writing
                self._write_on(None)
            else:
                yield from writing
        except CheckpointError:
            return

    def _write(self, mark: CheckpointRecord) -> Requests:
        offers = [state.offer for state in self.trainer.fragment_states if state.offer is not None]
        yield from self._barrier.await_encoded(mark, offers, CUT_NS)
        if self.scenario.cut_writes_ns:
            yield Wait(lambda: False, self.scenario.cut_writes_ns)
        yield from self._barrier.await_written(mark, CUT_NS)
        self._watch("written", self)

    def _write_on(self, answer: object) -> None:
        """Continue the checkpoint as `CheckpointWriter` does, beside the training thread."""
        assert self._writing is not None
        try:
            request = self._writing.send(answer)
        except (StopIteration, MendError):  # a failure is the next call's to raise
            self._writing = None
            return
        if isinstance(request, Wait):
            self._look_again(request, self.process.loop.now_ns + request.limit_ns)
        else:
            self.collective.beside.ask(
                self.process.me.rank,
                request,
                lambda got: self.process.later(THREAD_HOP_NS, lambda: self._write_on(got)),
            )

    def _look_again(self, wait: Wait, until_ns: int) -> None:
        now_ns = self.process.loop.now_ns
        if wait.ready() or now_ns >= until_ns or self.rank.published.failure is not None:
            self.process.later(THREAD_HOP_NS, lambda: self._write_on(wait.ready()))
            return
        rest_ns = min(until_ns - now_ns, POLL_NS)
        self.process.later(rest_ns, lambda: self._look_again(wait, until_ns))

    def _step(self) -> None:
        self.trainer.give_state()
        step = self.trainer.step + 1
        self._watch("before", self)
        if self.moments is not None:
            self.moments.step(step)
        changes = self._update(step)
        if self.inner is not None:
            self.inner.step(changes)
        with torch.no_grad():
            for parameter, change in zip(self.parameters, changes, strict=True):
                parameter.add_(change)
        self._watch("after", self)
        taken, self.units = len(self.units or ()), None
        if self.trainer.stepped(self._tokens(step) * (self._taken or 1), taken):
            self._drive(self.trainer.work())
        else:
            self._next()

    def _fail(self, error: Exception | Evicted) -> None:
        self.failure = error
        self.ended = True
        self.requests = None
        if isinstance(error, Diverged):  # the script ends
            self.process.later(THREAD_HOP_NS, self.process.give_up)
        elif isinstance(error, JobLost | Evicted):
            self._begin_again(self)
