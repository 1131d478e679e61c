"""Stops a training loop at the record of the log at which all racks make a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from mend.consensus.records import CheckpointRecord, Record, Snapshot
from mend.coordination.events import BarrierChanged, Event
from mend.engine.state.fragment_state import POLL_NS, OpenOffer, Requests, Wait
from mend.engine.state.published_state import PublishedSlice
from mend.engine.trainer.trainer_end import NOTE_NS
from mend.engine.trainer.trainer_rounds import TrainerRounds
from mend.errors import CheckpointError, require
from mend.events.base import Emit
from mend.events.kinds import StillWaiting
from mend.types import SECOND


class CheckpointRecords(PublishedSlice):
    """The newest checkpoints in the log."""

    begun: tuple[CheckpointRecord, tuple[int, ...]] | None = None
    """(the newest one, the decided version of every fragment before it)."""
    written: CheckpointRecord | None = None
    """The newest one that all its racks have written."""
    answered = 0
    """Number of the newest one that a call was about, or that was made before this rank trained. A
    later one without this rack was made while it was silent."""

    def training_begins(self) -> None:
        self.answered = self.begun[0].number if self.begun else 0

    def decided(self, record: Record) -> None:
        if isinstance(record, CheckpointRecord) and record.written:
            self.written = record
        elif isinstance(record, CheckpointRecord):
            self.begun = record, tuple(known.decided for known in self._published.fragments)

    def restored(self, snapshot: Snapshot) -> None:
        """Take the newest checkpoint of a snapshot; its first record may be known already."""
        if (newest := snapshot.checkpoint) is None:
            return
        if self.begun is None or self.begun[0].number != newest.number:
            self.begun = newest, snapshot.checkpoint_versions
        if newest.written:
            self.written = newest


class CheckpointBarrier:
    """Stops a training loop for a checkpoint. `post`, `note` and `now_ns` as of the trainer's."""

    def __init__(
        self,
        trainer: TrainerRounds,
        *,
        post: Callable[[Event], None],
        note: Emit,
        now_ns: Callable[[], int],
    ) -> None:
        self._trainer, self._post, self._note, self._now_ns = trainer, post, note, now_ns
        self._published, self._rack = trainer.published, trainer.member.rack
        self._records = trainer.published.of(CheckpointRecords)

    def cut(self, name: str, limit_ns: int) -> Generator[Any, Any, CheckpointRecord]:
        """Stop at the record of the log at which all racks make this checkpoint: apply what was
        decided before it, and nothing later. In lockstep stop at this step. Open offers stay open.
        Raises CheckpointError past the limit; training may go on then."""
        deadline_ns = self._now_ns() + limit_ns
        with self._published.changed:
            before = self._records.begun[0].number if self._records.begun else 0
        self._post(BarrierChanged(name))
        try:
            yield from self._until_all(
                lambda: self._mark(name, before) is not None, deadline_ns, name
            )
            mark, versions = require(self._mark(name, before), "a rank has not read the mark")
            self._records.answered = mark.number
            if self._rack not in mark.racks:
                raise CheckpointError(
                    f"checkpoint {name!r} was made without rack {self._rack}, which was silent then"
                )
            if not self._trainer.policy.lockstep:
                yield from self._until_all(
                    lambda: self._trainer.versions() == versions, deadline_ns, name, versions
                )
        except BaseException:
            self._post(BarrierChanged(""))
            raise
        return mark

    def await_encoded(
        self, mark: CheckpointRecord, offers: Sequence[OpenOffer], limit_ns: int
    ) -> Requests:
        """Wait until the offers that were open at the cut are encoded: only then do their tensors
        hold what was offered. Any thread. Raises CheckpointError for an offer that is not finite,
        or past the limit."""
        deadline_ns = self._now_ns() + limit_ns
        yield from self._until_all(
            lambda: all(offer.remainder.done() for offer in offers), deadline_ns, mark.name
        )
        declined = {offer.fragment for offer in offers if offer.remainder.exception(0)}
        finite = [
            int(fragment not in declined) for fragment in range(len(self._trainer.fragment_states))
        ]
        finite = yield from self._trainer.agree_and_apply([], finite)
        if not all(finite):
            raise CheckpointError(
                f"checkpoint {mark.name!r}: what rack {self._rack} has captured of fragment "
                f"{finite.index(0)} holds no finite numbers"
            )

    def await_written(self, mark: CheckpointRecord, limit_ns: int) -> Requests:
        """Report that this rank has written its part, and wait until all racks have. Any thread.
        Raises CheckpointError when a rack cannot write, or past the limit."""
        deadline_ns = self._now_ns() + limit_ns
        try:
            self._post(BarrierChanged(mark.name, written=True))
            yield from self._until_all(
                lambda: self._newest_mark() > (mark.number, False), deadline_ns, mark.name
            )
            done = self._records.written
            written = done.racks if done is not None and done.number == mark.number else None
            # One rank of the rack may have read a snapshot where another has read the record.
            known, complete = yield from self._trainer.agree_and_apply(
                [], [int(written is not None), int(written == mark.racks)]
            )
            if not known or written is None:
                raise CheckpointError(
                    f"checkpoint {mark.name!r} may be incomplete: the next one was begun before "
                    f"all ranks of rack {self._rack} heard that it was written"
                )
            if not complete:
                lost = ",".join(str(rack) for rack in mark.racks if rack not in written)
                raise CheckpointError(
                    f"checkpoint {mark.name!r} is incomplete: racks {lost} have not written it"
                )
        finally:
            self._post(BarrierChanged(""))

    def _mark(self, name: str, before: int) -> tuple[CheckpointRecord, tuple[int, ...]] | None:
        """The checkpoint of this name, if its number is above `before`, or it was made without this
        rack and no call has reported it."""
        mark = self._records.begun
        if mark is None or mark[0].name != name:
            return None
        missed = self._rack not in mark[0].racks and mark[0].number > self._records.answered
        return mark if missed or mark[0].number > before else None

    def _newest_mark(self) -> tuple[int, bool]:
        """(number of the newest checkpoint, whether all its racks have written it)."""
        records = self._records
        begun = records.begun[0].number if records.begun else 0
        return max((begun, False), (records.written.number if records.written else 0, True))

    def _passed(self, versions: Sequence[int]) -> bool:
        """Whether one of these versions will never arrive: a snapshot was taken after it, or this
        rank copied a newer version instead."""
        stand = zip(self._published.fragments, versions, self._trainer.versions(), strict=True)
        with self._published.changed:
            return any(
                mine < version and version not in known.anchors
                and (version < known.restored or version < max(known.anchors, default=-1))
                for known, version, mine in stand
            )  # fmt: skip

    def _until_all(
        self,
        ready: Callable[[], bool],
        deadline_ns: int,
        name: str,
        caps: Sequence[int] | None = None,
    ) -> Requests:
        """Wait for `ready` on all ranks of the rack; apply up to the versions `caps` meanwhile."""
        fragments = list(range(len(self._trainer.fragment_states))) if caps is not None else []
        begun_ns = noted_ns = self._now_ns()
        while True:
            now_ns = self._now_ns()
            if now_ns - noted_ns >= NOTE_NS:
                noted_ns = now_ns
                about = f"checkpoint {name!r} ({self._trainer.why()})"
                self._note(StillWaiting(about, (now_ns - begun_ns) // SECOND))
            late, over = now_ns > deadline_ns, self._published.finished
            passed = caps is not None and self._passed(caps)
            flags = yield from self._trainer.agree_and_apply(
                fragments,
                [int(ready()), -int(late), -int(over), -int(passed)],
                dict(enumerate(caps or ())),
            )
            if flags[0]:
                return
            if any(flags[1:]):
                why = "the job is over for this rack" if flags[2] else "it took too long"
                if flags[3]:
                    why = "later decisions overtook this rack"
                raise CheckpointError(
                    f"checkpoint {name!r} was not made: {why} ({self._trainer.why()})"
                )
            yield Wait(ready, POLL_NS)
