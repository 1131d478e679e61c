"""A rank of a job whose racks have different numbers of ranks: it hosts one or several parts, see
`fragment.parts`.

To the other racks each part is a rank: it has its own machines, sockets, fragments and digests, so
the protocol knows nothing of parts. Here each part has a trainer: the first one on the training
thread, every other on a thread of its own, which works only while the training thread waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mend.engine.checkpoint.checkpoint_writer import PendingCheckpoint, Save
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.threads import OWN, DaemonExecutor, from_outside
from mend.engine.hooks.step_hooks import FREED
from mend.engine.io.rack import RackGroup
from mend.engine.joining.training_state import LikeFirst, ReceivedState, TrainingState
from mend.engine.live_rank import LiveRank
from mend.engine.part_group import Broken, Meeting, PartGroup
from mend.engine.rank_config import Settings
from mend.engine.state.fragment_state import Request
from mend.engine.trainer.trainer import Trainer
from mend.errors import CheckpointError, GaveUp, InvariantError, require
from mend.events.base import Emit
from mend.fragment.model_plan import ModelPlan
from mend.fragment.parts import JobParts
from mend.types import SECOND

T = TypeVar("T")

CLOSE_S = 10.0
"""How long the end waits for the threads of the parts."""


class StateOfPart(TrainingState):
    """The training state of a part that is not the first one of its rank. `first`: returns that of
    the first part, which alone loads and registers."""

    def __init__(self, first: Callable[[], TrainingState], note: Emit, *, enabled: bool) -> None:
        super().__init__((), {}, note, enabled=enabled)
        self._first = first

    def take(self, step: int, room_B: Tensor | None = None, *_: Any) -> Tensor:
        return self._first().take(step, room_B)

    def room(self, step: int) -> int:
        return self._first().room(step)

    def digest(self, step: int) -> LikeFirst:
        return self._first().digest(step)

    def load(self, copied: ReceivedState) -> None:
        """Do nothing: the first part loads it."""

    def begins_fresh(self, reason: str) -> None:
        """Do nothing: the first part notes it."""

    def registered(self, step: int) -> None:
        """Return None: a checkpoint has it with the first part."""


class RankOfParts:
    """A rank that hosts several parts. It has the interface of `LiveRank` that `api` uses; its
    values are those of its first part. All ranks of the rack call its methods together."""

    exchanges = True

    def __init__(
        self,
        plan: ModelPlan,
        settings: Settings,
        numerics_of: Callable[[], Numerics],
        state_of: Callable[[Emit], TrainingState],
        ranks: RackGroup,
        parts: JobParts,
        *,
        copies_state: bool,
    ) -> None:
        """`numerics_of`: makes the numerics of a part. `ranks`: the ranks of the rack. `parts`: the
        parts of the job. `copies_state`: whether the rack gets a donor's training state if it
        joins. The other arguments are as of LiveRank."""
        self.of_ranks, hosts = ranks, parts.hosts(ranks.ranks)
        mine = [part for part, host in enumerate(hosts) if host == ranks.rank]
        limit_ns = settings.start_timeout_ns + settings.step.wait_timeout_ns
        self._meeting, self._ending = Meeting(len(mine), limit_ns / SECOND), threading.RLock()
        begin = partial(torch.cuda.set_device, plan.gpu) if plan.gpu is not None else None
        self._executors = [DaemonExecutor(1, f"{OWN}part-{part}", begin) for part in mine[1:]]
        self.parts: list[LiveRank] = []
        self._working: list[Future[None]] = []
        """The work of the other parts after a step, until it is done."""

        def state_of_part(note: Emit) -> TrainingState:
            return StateOfPart(self._first_state, note, enabled=copies_state)

        def make(part: int) -> None:
            group = PartGroup(ranks, hosts, part, self._meeting)
            of_part, first = plan.of_part(parts, ranks.ranks, part), part == mine[0]
            own = replace(settings, step=replace(settings.step, weighs=first))
            state = state_of if first else state_of_part
            self.parts.append(LiveRank(of_part, own, numerics_of(), state, group))

        try:
            self._spread([partial(make, part) for part in mine])
        except BaseException:
            self.abort()
            raise
        self.parts.sort(key=lambda part: part.me.rank)
        first = self._first
        self.me, self.settings, self.watch = first.me, first.settings, first.watch
        self.trainer, self.published, self.pace = first.trainer, first.published, first.pace
        self.recorder, self.metrics = first.recorder, first.metrics

    @property
    def _first(self) -> LiveRank:
        return self.parts[0]

    def _first_state(self) -> TrainingState:
        return require(self._first.trainer.states.state, "the first part has a training state")

    # -------------------------------------------------------------- all parts together

    def _spread(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do a job for each part, the first on this thread. Raises the first error of a job."""
        pairs = zip(self._executors, jobs[1:], strict=True)
        started = [executor.submit(partial(self._or_end, job)) for executor, job in pairs]
        own: Future[T] = Future()
        try:
            own.set_result(self._or_end(jobs[0]))
        except BaseException as error:
            own.set_exception(error)
        self._settle([own, *started])
        return [each.result() for each in (own, *started)]

    def _all(self, job: Callable[[LiveRank], T]) -> list[T]:
        return self._spread([partial(job, part) for part in self.parts])

    def _or_end(self, job: Callable[[], T]) -> T:
        """Do a part's share of a job. If it fails, the other parts stop waiting for this one."""
        try:
            return job()
        except BaseException as error:
            self._meeting.end(error)
            raise

    def _settle(self, jobs: Sequence[Future[Any]]) -> None:
        """Wait for the jobs of all parts. Raises the first error that is not the consequence of
        another part's error."""
        found = [error for error in map(_error_of, jobs) if error is not None]
        self._meeting.begin_again()
        if any(isinstance(error, InvariantError) for error in found):
            self.abort()
        if found:
            raise next((error for error in found if not isinstance(error, Broken)), found[0])

    # -------------------------------------------------------------- training thread

    def begin(self) -> None:
        self._all(LiveRank.begin)

    def each(self, requests_of: Callable[[Trainer], Generator[Request, Any, T]]) -> T:
        return self._all(lambda part: part.each(requests_of))[0]

    def before_capture(self) -> None:
        self._all(LiveRank.before_capture)

    def stepped(self, tokens: int, units: int) -> bool:
        due = [part.stepped(tokens, units) for part in self.parts]
        return any(due)

    def give_state(self) -> None:
        self._all(LiveRank.give_state)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.untimed())
            yield

    def after_step(self) -> None:
        """Do the work that is due after the step. If a signal's handler raises in a wait of the
        first part, `go_on` finishes the work of all parts."""
        pairs = zip(self._executors, self.parts[1:], strict=True)
        self._working = [
            executor.submit(partial(self._or_end, other.after_step)) for executor, other in pairs
        ]
        self._work(self._first.after_step)

    @property
    def unfinished(self) -> bool:
        return self._first.unfinished or bool(self._working)

    def go_on(self) -> None:
        if self.unfinished:
            self._work(self._first.go_on)

    def _work(self, of_first: Callable[[], None]) -> None:
        own: Future[None] = Future()
        try:
            of_first()
            own.set_result(None)
        except BaseException as error:
            if self._first.unfinished:
                raise
            self._meeting.end(error)
            own.set_exception(error)
        working, self._working = self._working, []
        self._settle([own, *working])

    def checkpoint(
        self, folder: Path, save: Save | None, limit_ns: int, *, wait: bool
    ) -> PendingCheckpoint:
        """See `Runtime.checkpoint`. The script saves once per rank, with the first part."""

        def make(part: LiveRank) -> PendingCheckpoint:
            saves = save is None or part is self._first
            return part.checkpoint(folder, save if saves else _save_nothing, limit_ns, wait=wait)

        return self._all(make)[0]

    def settle_checkpoint(self) -> CheckpointError | None:
        return self._all(LiveRank.settle_checkpoint)[0]

    # -------------------------------------------------------------- the end

    def close(self) -> None:
        self._all(LiveRank.await_end)
        self.abort()

    def abort(self) -> None:
        from_outside(self._end)

    def abort_freed(self) -> None:
        """See `LiveRank`."""
        from_outside(self._end_freed)

    def _end_freed(self) -> None:
        for part in self.parts:
            part.published.fail(GaveUp(FREED))
        self._end()

    def _end(self) -> None:
        with self._ending:
            self._meeting.end(GaveUp("this rack has left the job"))
            for part in reversed(self.parts):
                part.abort()
            for executor in self._executors:
                executor.close(CLOSE_S)
            self.of_ranks.close()


def _error_of(job: Future[Any]) -> BaseException | None:
    """Wait for the job and return its error. A job that never began, as the rack has left, counts
    as failed on account of another."""
    try:
        return job.exception()
    except CancelledError:
        return Broken("this rack has left the job")


def _save_nothing(_: Path) -> None:
    """The first part of the rank saves for all."""
