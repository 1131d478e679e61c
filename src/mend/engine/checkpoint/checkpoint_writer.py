"""Makes checkpoints: takes a rank's state at the cut, and writes it in a thread of its own while
the rack trains on. Only one at a time, so that memory stays bounded.

While a checkpoint is written, these stay in memory: the anchors of the cut (at most one more
version of each fragment), its open offers, the registered objects, and the rest of the script's
`save`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mend.consensus.records import CheckpointRecord
from mend.coordination.events import BarrierChanged, Event
from mend.engine.checkpoint.checkpoint import Facts, Taken, take, together, write_part
from mend.engine.checkpoint.checkpoint_barrier import CheckpointBarrier
from mend.engine.checkpoint.checkpoint_files import begin_part, complete_part
from mend.engine.checkpoint.saved_state import saved_state
from mend.engine.compute.threads import OWN, DaemonExecutor
from mend.engine.io.rack import RackGroup
from mend.engine.state.fragment_state import AgreeMin, Request, Requests, Wait, drive
from mend.engine.trainer.trainer import Trainer
from mend.errors import CheckpointError, InvariantError, MendError, format_error, require
from mend.events.base import Emit
from mend.events.kinds import CheckpointMoved, CheckpointWritten, StateDictTaken
from mend.types import MS, SECOND

CLOSE_S = 10.0
"""How long a rack that leaves at once waits for the checkpoint that is being written."""

Save = Callable[[Path], object]
Rest = Callable[[], object]


class PendingCheckpoint:
    """A checkpoint that is being written while the rack trains on. Any thread."""

    def __init__(self, path: Path, written: Future[None]) -> None:
        self._path, self._written, self._asked = path, written, False

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self._path

    def done(self) -> bool:
        """Whether the checkpoint is complete or has failed; `result` does not wait then."""
        return self._written.done()

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait until all racks have written; returns the folder. Raises CheckpointError when the
        checkpoint is not complete, TimeoutError after `timeout_s` (None: there is no limit)."""
        error = self._error(timeout_s)
        self._asked = True
        if error is not None:
            raise error
        return self._path

    def unasked(self) -> CheckpointError | None:
        """Wait until it is complete or has failed. Returns its error; None: it is complete, or
        `result` has already given the error to the script."""
        error = self._error(None)
        return None if self._asked else error

    def late_error(self, state: str) -> CheckpointError:
        """The error to raise from the call that makes the next checkpoint, which is in `state`."""
        cause = require(self._cause(None), "the checkpoint is complete")
        error = CheckpointError(
            f"the checkpoint before this one, {self._path.name!r}, is not complete: "
            f"{_why(cause)}. {state}"
        )
        error.__cause__ = cause
        return error

    def _error(self, timeout_s: float | None) -> CheckpointError | None:
        error = self._cause(timeout_s)
        if error is None or isinstance(error, CheckpointError):
            return error
        wrapped = CheckpointError(f"checkpoint {self._path.name!r} is not complete: {_why(error)}")
        wrapped.__cause__ = error
        return wrapped

    def _cause(self, timeout_s: float | None) -> BaseException | None:
        try:
            return self._written.exception(timeout_s)
        except CancelledError:
            return MendError("this rack has left the job")
        except TimeoutError:
            late = f"checkpoint {self._path.name!r} is not complete after {timeout_s} s"
            raise TimeoutError(late) from None


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, MendError) else format_error(error)


def rest_of(saved: object) -> Rest:
    """The rest of a script's `save`, from its return value: a function to call, an object whose
    `result` to wait for, or nothing. For torch's AsyncSaveResponse this waits for the copy."""
    staged = getattr(saved, "staging_completion", None)
    if staged is not None:
        staged.result()
        saved = getattr(saved, "upload_completion", None)
    wait = getattr(saved, "result", saved)
    return wait if callable(wait) else lambda: None


class CheckpointWriter:
    """Makes one rank's checkpoints. All ranks of a rack call its methods together, from their
    training threads.

    `facts`: of the plan. `drive` runs a generator of the trainer on the training thread.
    """

    def __init__(
        self,
        group: RackGroup,
        rack: int,
        facts: Facts,
        trainer: Trainer,
        *,
        drive: Callable[[Any], Any],
        post: Callable[[Event], None],
        note: Emit,
        now_ns: Callable[[], int],
    ) -> None:
        self._group, self._rack, self._facts, self._trainer = group, rack, facts, trainer
        self._drive, self._post, self._note, self._now_ns = drive, post, note, now_ns
        self._barrier = CheckpointBarrier(trainer, post=post, note=note, now_ns=now_ns)
        self._executor = DaemonExecutor(1, f"{OWN}checkpoint")
        self._beside: RackGroup | None = None
        """The collectives of the writing thread; made when first needed."""
        self._pending: PendingCheckpoint | None = None

    def checkpoint(
        self, folder: Path, save: Save | None, limit_ns: int, *, wait: bool
    ) -> PendingCheckpoint:
        """Cut, and have the state written; `wait`: return only when all racks have written. A
        former checkpoint is waited for first. Its error, if `result` was not called, is raised only
        after the new one has begun: another rack may not have seen the error, and would wait in
        vain."""
        before, former = self._pending, self.settle()
        try:
            self._pending = self._trainer.life.writing = self._begin(folder, save, limit_ns)
            if wait:
                self._pending.result()
        except Exception as error:
            if former is not None:
                error.add_note(f"The one before it was not completed either: {former}")
            raise
        if before is not None and former is not None:
            state = "is complete" if wait else "is being written"
            raise before.late_error(f"{folder.name!r} {state}")
        return self._pending

    def saved_state(self, limit_ns: int) -> dict[str, Any]:
        """Cut, and return this rank's state, for DCP to write."""
        name = "checkpoint_state"
        if self._pending is not None:  # its error stays for `settle`
            self._pending.unasked()
        mark: CheckpointRecord = self._drive(self._barrier.cut(name, limit_ns))
        try:
            taken = together(self._group, lambda: take(self._trainer))
            self._drive(self._barrier.await_encoded(mark, taken.offers, limit_ns))
            state = saved_state(self._group, self._rack, self._facts, mark, taken)
        finally:
            self._post(BarrierChanged(""))
        self._note(StateDictTaken(self._trainer.step, mark.number, taken.versions))
        return state

    def settle(self) -> CheckpointError | None:
        """Wait for the checkpoint that is being written. Returns its error, unless its `result` was
        called."""
        pending, self._pending = self._pending, None
        return pending.unasked() if pending is not None else None

    def close(self) -> list[str]:
        """Wait CLOSE_S for the writing thread; any thread may call it. Returns the names of threads
        that still write: their checkpoint is never complete."""
        return self._executor.close(CLOSE_S)

    # -------------------------------------------------------------- training thread

    def _begin(self, folder: Path, save: Save | None, limit_ns: int) -> PendingCheckpoint:
        begun_ns, before = self._now_ns(), self._trainer.versions()
        mark: CheckpointRecord = self._drive(self._barrier.cut(folder.name, limit_ns))
        cut_ns = self._now_ns()
        if save is None and self._trainer.versions() != before:
            self._note(CheckpointMoved(str(folder)))
        part, rest = folder / f".rack-{self._rack}.part", None
        try:
            if self._beside is None:
                self._beside = self._group.for_thread("checkpoint")
            leads = self._group.rank == 0
            together(self._group, lambda: begin_part(part) if leads else None)
            taken = together(self._group, lambda: take(self._trainer))
            if save is not None:
                rest = together(self._group, lambda: rest_of(save(part)), f"save({part}): ")
        except BaseException:
            self._give_up(part)
            raise
        about = CheckpointWritten(
            folder=str(folder),
            step=self._trainer.step,
            number=mark.number,
            versions=taken.versions,
            cut_ms=(cut_ns - begun_ns) // MS,
            taken_ms=(self._now_ns() - cut_ns) // MS,
            written_ms=0,
        )
        write = partial(self._write, self._beside, folder, mark, taken, rest, limit_ns, about)
        return PendingCheckpoint(folder, self._executor.submit(write))

    # -------------------------------------------------------------- its own thread

    def _write(
        self,
        group: RackGroup,
        folder: Path,
        mark: CheckpointRecord,
        taken: Taken,
        rest: Rest | None,
        limit_ns: int,
        about: CheckpointWritten,
    ) -> None:
        part, begun_ns = folder / f".rack-{self._rack}.part", self._now_ns()
        try:
            if rest is not None:
                together(group, rest, f"save({part}): ")
            self._follow(group, self._barrier.await_encoded(mark, taken.offers, limit_ns))
            write_part(group, self._rack, self._facts, part, mark, taken)
        except BaseException:
            self._give_up(part)
            raise
        self._follow(group, self._barrier.await_written(mark, limit_ns))
        leads = group.rank == 0
        together(group, lambda: complete_part(folder, self._rack) if leads else None)
        self._note(replace(about, written_ms=(self._now_ns() - begun_ns) // MS))

    def _give_up(self, part: Path) -> None:
        self._post(BarrierChanged(""))
        if self._group.rank == 0:
            shutil.rmtree(part, ignore_errors=True)

    def _follow(self, group: RackGroup, requests: Requests) -> None:
        """Drive a generator that only waits and agrees, on this thread."""

        def answer(request: Request) -> object:
            if isinstance(request, Wait):
                return self._trainer.published.wait(request.ready, request.limit_ns / SECOND)
            if not isinstance(request, AgreeMin):
                raise InvariantError("only waits and agreements run here", {"request": request})
            return group.minimum(request.values)

        drive(requests, answer)
