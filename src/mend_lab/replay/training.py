"""The training thread of a replay, which captures and applies at the steps of the tape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mend.coordination.events import Discarded, Event, Leaving
from mend.coordination.machines import Machines, ProcessSpec, machines_of
from mend.engine.checkpoint.checkpoint_writer import CheckpointWriter, PendingCheckpoint, Save
from mend.engine.compute.digest import digest_of_state
from mend.engine.joining.training_state import Mirror, Mirrored, ReceivedState, TrainingState
from mend.engine.loop.feature import LoopFeature, LoopParts
from mend.engine.rank_factory import RankFactory
from mend.engine.state.fragment_state import POLL_NS, OpenOffer, Requests, Wait
from mend.engine.state.outcome import Outcome
from mend.engine.state.published_state import PublishedState
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.errors import GaveUp, LeftJob, ReplayDiffers, TapeError, require
from mend.trace.writer import Tape
from mend.types import SECOND, Layout, Member, Peer
from mend_lab.replay.comparison import (
    START,
    TRAINING,
    Finding,
    ReplayComparison,
    ReplayReport,
    StateFiles,
)
from mend_lab.replay.coordinator import ReplayCoordinator
from mend_lab.replay.script import APPLIED, DISCARDED, Act, GivenState, ReplayScript, act_of

_LABELS = ("base", "tokens", "steps")


class ReplayedState(PublishedState):
    """Keeps the versions that this rank still has to apply: the log may run ahead of it."""

    def __init__(self, fragments: int, needed: Collection[tuple[int, int]]) -> None:
        super().__init__(fragments)
        self._needed, self._late = set(needed), set[tuple[int, int]]()

    def on_anchor(self, call: Callable[[int], None]) -> None:
        """Never called: no upload ahead, as the newest version may not be the one to apply."""

    def forget(self, fragment: int, version: int) -> None:
        with self.changed:
            if (fragment, version) in self._needed:
                self._late.add((fragment, version))
                return
        super().forget(fragment, version)

    def applied(self, fragment: int, version: int) -> None:
        super().applied(fragment, version)
        with self.changed:
            self._needed = {k for k in self._needed if k[0] != fragment or k[1] > version}
            done = {k for k in self._late if k[0] == fragment and k[1] < version}
            self._late -= done
        for each in done:
            super().forget(*each)


class TapeEnded(LeftJob):
    """The tape of this rack is at its end, and so is the script."""


class NoCheckpoints(CheckpointWriter):
    """Writes nothing: the recorded run wrote it."""

    def checkpoint(
        self, folder: Path, save: Save | None, limit_ns: int, *, wait: bool
    ) -> PendingCheckpoint:
        written: Future[None] = Future()
        written.set_result(None)
        return PendingCheckpoint(folder, written)

    def saved_state(self, limit_ns: int) -> dict[str, Any]:
        return {}


class ReplayFactory(RankFactory):
    """Makes the parts of a rank in a replay. `folder`: for the findings. Raises TapeError."""

    def __init__(
        self, script: ReplayScript, folder: Path, me: Peer, layouts: Sequence[Layout]
    ) -> None:
        super().__init__(me, layouts)
        self._script = script
        part = script.part(me.rack)
        if part is None or me.rank >= len(part.acts):
            raise TapeError(f"there is no rank {me.rank} of rack {me.rack} on the tapes")
        self._report, self._states = ReplayReport(folder, me), StateFiles(folder)
        acts = part.acts[me.rank]
        needed = {(act.fragment, act.number) for act in acts if act.kind == APPLIED}
        needed |= set(enumerate(part.first))
        self._published = ReplayedState(len(layouts), needed)
        names = [[slot.name for slot in layout.slots] for layout in layouts]
        self._comparer = ReplayComparison(script, me, names, self._report, self._published.fail)

    def published(self) -> PublishedState:
        return self._published

    def trainer(self, parts: TrainerParts) -> Trainer:
        return ReplayTrainer(
            parts, script=self._script, rank=self.me.rank, report=self._report,
            comparer=self._comparer, states=self._states,
        )  # fmt: skip

    def checkpoints(self, *args: Any, **options: Any) -> CheckpointWriter:
        return NoCheckpoints(*args, **options)

    def machines(self, parts: ProcessSpec) -> Machines:
        """The leader of rack 0 decides the records of the script again, and no process takes over.
        Raises ReplayDiffers."""
        if parts.leader is not None:
            self.check(parts.leader.hello.facts)
        machines, it = machines_of(replace(parts, coordinator=None)), parts.coordinator
        if it is None or not it.options.first or (leader := machines.leader) is None:
            return machines
        coordinator = ReplayCoordinator(
            self.me, parts.member, it.job, it.options, leader.acceptor,
            script=self._script.records, clock=leader.sleep.clock,
        )  # fmt: skip
        return replace(machines, coordinator=coordinator)

    def tape(self, tape: Tape | None) -> Tape | None:
        return self._comparer

    def features(self, parts: LoopParts, *, mirrored: bool) -> list[LoopFeature]:
        """Without mirrors: `ReplayTrainer` passes the state on in files."""
        return super().features(parts, mirrored=False)

    def check(self, facts: Sequence[tuple[str, str]]) -> None:
        """Compare the model and the settings with those of the tape. Raises ReplayDiffers."""
        then, now = dict(self._script.facts), dict(facts)
        free = {"mend version", "torch version", "encrypt_payloads", "seat_timeout_s"}
        for name in [*then, *now]:
            if name not in free and then.get(name) != now.get(name):
                was, is_ = then.get(name, "absent"), now.get(name, "absent")
                text = f"before the first step: {name} is {was} on the tape, {is_} now"
                self._comparer.differs(text, START, (0, 0))
                raise ReplayDiffers(text)


class ReplayTrainer(Trainer):
    """A `Trainer` that does what the tape says."""

    def __init__(
        self,
        parts: TrainerParts,
        *,
        script: ReplayScript,
        rank: int,
        report: ReplayReport,
        comparer: ReplayComparison,
        states: StateFiles,
    ) -> None:

        def checked(event: Event) -> None:
            self._check(event)
            parts.post(event)

        def captured(offer: OpenOffer) -> None:
            self._check(offer.captured)
            parts.captured(offer)

        super().__init__(replace(parts, post=checked, captured=captured))
        seat = self.member.rack
        part = script.part(seat)
        if part is None:
            raise TapeError(f"rack {seat} is not on the tapes")
        self._title, self._acts, self._ends = part.title, part.acts[rank], part.ends
        self._first, self._states = part.first, states
        self._batches = list(part.batches)
        """Changes of the local batch still to come, as (step, percent), oldest first."""
        self._gives = sorted(
            (given for given in script.given if given.donor == seat), key=lambda it: it.step
        )
        """The states that other lives begin with and that are not written yet, oldest first."""
        self._copies = next((given for given in script.given if given.to == seat), None)
        self._mirrors = [each for each in script.mirrors if seat in (each.donor, each.to)]
        self._place, self._rank = 0, rank
        self._report, self._comparer = report, comparer
        self._rounds = len(script.commits)
        last = dict(sorted(script.commits))  # of each fragment the highest version stays
        self._last = [last.get(fragment, 0) for fragment in range(len(self.fragment_states))]

    @property
    def _next(self) -> Act | None:
        return self._acts[self._place] if self._place < len(self._acts) else None

    # -------------------------------------------------------------- lives that joined

    def begin(self, limit_ns: int) -> Requests:
        """As `Trainer.begin`. A life that joined waits for the state and the versions that it began
        with, which other processes of this replay make."""
        if not self._first:
            yield from super().begin(limit_ns)
            return
        copied = yield from self._load_copied()
        fragments = self.published.fragments
        yield from self._until(
            lambda: all(v in p.anchors for v, p in zip(self._first, fragments, strict=True)),
            "the versions that it began with",
        )
        with self.published.changed:
            anchors = [p.anchors[v] for v, p in zip(self._first, fragments, strict=True)]
        yield from self._train_on(anchors)
        self._go_on_from(copied)
        self._stand()

    def _load_copied(self) -> Generator[Any, Any, ReceivedState | None]:
        state, copied = self.states.state, self._copies
        if state is None:
            return None
        yield from self._load_mirrored(state)
        if copied is None:
            state.begins_fresh("no rack had given it a copy")
            return None
        yield from self._await_state(self._states, copied)
        data_B, then = self._states.read(copied, self._rank), copied.digests[self._rank]
        received = ReceivedState(copied.rack, copied.step, then, data_B)
        state.load(received)
        return received

    def _load_mirrored(self, state: TrainingState) -> Requests:
        """Load the state of scope rack that a former life had in this replay."""
        files = self._states.of_mirrors()
        for given in self._mirrors:
            if given.to == self.member.rack:
                yield from self._await_state(files, given)
                data_B = files.read(given, self._rank)
                owner, digest = Member(given.rack, 0), given.digests[self._rank]
                mirror = Mirror(1, owner, given.step, data_B.numel(), digest, given.rack)
                state.load_rack(Mirrored(mirror, data_B))

    def mirror(self) -> None:
        """After a capture: write the state that another life of this rack began with. Raises
        ReplayDiffers if it differs from the tape."""
        files = self._states.of_mirrors()
        for given in self._mirrors:
            if (given.donor, given.step) == (self.member.rack, self.step):
                state = require(self.states.state, "a script that registers has a state")
                data_B = state.rack_state(self.step)
                self._keep(files, given, data_B, "what it has registered with scope rack")

    def _await_state(self, files: StateFiles, copied: GivenState) -> Requests:
        """Wait for a file of another process, at most wait_timeout_s after the last round."""
        commits, since_ns = self.published.rounds.count, self._now_ns()
        while not files.has(copied, self._rank):
            if self.published.failure is not None:
                raise self.published.failure
            if self.published.rounds.count != commits:
                commits, since_ns = self.published.rounds.count, self._now_ns()
            if self._now_ns() - since_ns > self.options.wait_timeout_ns:
                raise GaveUp(
                    f"replay: {self._title} waited {self.options.wait_timeout_ns / SECOND:g} s "
                    f"(wait_timeout_s) for the state of rack {copied.rack} at step {copied.step}"
                )
            yield Wait(lambda: files.has(copied, self._rank), POLL_NS)

    def give_state(self) -> None:
        """Write the state that another life begins with. Raises ReplayDiffers if it differs from
        the tape."""
        self.states.due, given = None, self._gives.pop(0)
        state = require(self.states.state, "a script that gave a state has one")
        what = "what it trains with besides the weights (optimizer, registered objects)"
        self._keep(self._states, given, state.take(self.step), what)
        if self._gives and self._gives[0].step == self.step:
            self.give_state()

    def _keep(self, files: StateFiles, given: GivenState, data_B: Tensor | None, what: str) -> None:
        """Compare the state with the tape and write it. Raises ReplayDiffers."""
        then, now = given.digests[self._rank], digest_of_state(data_B) if data_B is not None else ""
        if data_B is None or now != then:
            text = (
                f"{self._title} rank {self._rank}, after step {self.step}: {what} has digest "
                f"{then[:16]} on the tape, {now[:16] or 'none'} now; another life began with it"
            )
            due = self._next
            place = self._comparer.place_of(due) if due is not None else (self._rounds + 1, 0)
            self._comparer.differs(text, TRAINING, place)
            raise ReplayDiffers(text)
        files.write(given, self._rank, data_B)

    # -------------------------------------------------------------- a step

    def stepped(self, tokens: int, units: int = 0) -> bool:
        """Count a step; returns whether the tape has an act for it. Schedule and open rounds do not
        matter."""
        super().stepped(tokens, units)
        while self._batches and self._batches[0][0] <= self.step:
            self.ladder.batch_pct = self._batches.pop(0)[1]
        if self._gives and self._gives[0].step == self.step:
            self.states.due = self.member
        due = self._next
        return due.step <= self.step if due is not None else not self._ends or self._merged()

    def _merged(self) -> bool:
        return all(state.offer is None for state in self.fragment_states)

    def work(self) -> Requests:
        due = self._next
        if (due is None and self._ends) or (due is not None and due.step < self.step):
            # A rack that left in order captured its last steps; training after the last act of the
            # tape is possible only if it could not leave in order.
            raise self._differs("it has gone on", due)
        self._measure()
        begun_ns = self._now_ns()
        yield from self._follow()
        self._stand()
        self.clock.worked(self.step, begun_ns)
        yield from self._stop_if_over()

    def _follow(self) -> Requests:
        """Apply, discard and capture what the tape has for this step, in its order."""
        while (act := self._next) is not None and act.step == self.step:
            place = self._place
            if act.kind == APPLIED:
                yield from self._follow_apply(act)
            elif act.kind == DISCARDED:
                yield from self._follow_discard(act)
            else:
                self.parts.before_capture()
                self._capture(act.fragment, closing=act.closing)
            if self._place == place:
                raise self._differs("it cannot do that", act)

    def _follow_apply(self, act: Act) -> Requests:
        anchors = self.published.fragments[act.fragment].anchors
        yield from self._until(lambda: act.number in anchors, str(act))
        with self.published.changed:
            anchor = anchors[act.number]
        yield from self._apply(act.fragment, anchor)

    def _follow_discard(self, act: Act) -> Requests:
        known, state = self.published.fragments[act.fragment], self.fragment_states[act.fragment]
        yield from self._until(lambda: act.number in known.discarded, str(act))
        self._post(Discarded(act.fragment, act.number, self.step))
        state.offer = None

    def _until(self, ready: Callable[[], bool], what: str) -> Requests:
        """Wait for `ready`, at most wait_timeout_s after the last decided round. Raises GaveUp."""
        published, limit_ns = self.published, self.options.wait_timeout_ns
        while True:
            commits = published.rounds.count
            waited: bool = yield Wait(
                lambda commits=commits: ready() or published.rounds.count != commits,  # type: ignore[misc]
                limit_ns,
            )
            if published.failure is not None:
                raise published.failure
            if ready():
                return
            if not waited:
                raise GaveUp(
                    f"replay: {self._title} waited {limit_ns / SECOND:g} s (wait_timeout_s) "
                    f"for: {what} ({self.why()})"
                )

    # -------------------------------------------------------------- the end

    def drain(self, limit_ns: int) -> Requests:
        yield from self._follow()
        yield from self._stop_if_over()

    def close(self, *, keep_local: bool = False, refusal: Outcome | None = None) -> Requests:
        yield from self._follow()
        if (act := self._next) is not None:
            raise self._differs("it leaves the job", act)
        yield from self._stop_if_over()
        yield from self._finish()
        if not keep_local:
            yield from self.publish_anchor()
        self.outcome = Outcome("merged")

    def _stop_if_over(self) -> Requests:
        """End the script of a rack whose tape ends here. Raises TapeEnded."""
        if self._next is None and not self._ends and not self._gives:
            yield from self._finish()
            self.outcome = Outcome("abandoned", "its tape ends here")
            raise TapeEnded(0)

    def _finish(self) -> Requests:
        """Serve bytes until every round is decided, and leave with the others."""
        fragments = self.published.fragments
        yield from self._until(
            lambda: all(p.decided >= v for p, v in zip(fragments, self._last, strict=True)),
            "the last round",
        )
        self._post(Leaving())
        yield from self._until(lambda: self.published.finished, "the others to leave")
        self._report.tell(Finding("done", self._rounds))

    # -------------------------------------------------------------- comparing

    def _check(self, event: Event) -> None:
        """Compare an event with the next act of the tape. Raises ReplayDiffers."""
        act = act_of(event)
        if act is None:
            return
        then = self._next
        if then is None or act.key != then.key:
            raise self._differs(f"it has {act}", then)
        for label in _LABELS:
            if getattr(act, label) != getattr(then, label):
                was = f" with {label}={getattr(then, label)}"
                now = f"it has {act} with {label}={getattr(act, label)}"
                raise self._differs(now, then, was)
        self._place += 1

    def _differs(self, now: str, act: Act | None, more: str = "") -> ReplayDiffers:
        then = f"{act}{more}" if act is not None else "nothing more"
        text = (
            f"{self._title} rank {self._rank}, after step {self.step}: {now}; next on "
            f"its tape is: {then}"
        )
        place = self._comparer.place_of(act) if act is not None else (self._rounds + 1, 0)
        self._comparer.differs(text, TRAINING, place)
        return ReplayDiffers(text)
