"""A rank of a rack that trains alone (exchange=False): it counts and records, opens no socket and
copies no weights.

It is the baseline for measurements of the exchange: the same script, hooks and events. It has the
methods of `LiveRank` that `api` calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from msgspec import structs

from mend.codec import CODECS
from mend.coordination.events import Event
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.threads import from_outside
from mend.engine.features.served_metrics import ServedMetrics
from mend.engine.joining.training_state import StateRoutes, TrainingState
from mend.engine.one_trainer import OneTrainer
from mend.engine.rank_config import Settings
from mend.engine.state.fragment_state import OpenOffer, Requests
from mend.engine.state.outcome import report_end
from mend.engine.state.published_state import PublishedState
from mend.engine.state.training_progress import PERIOD_S, TrainingProgress
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.errors import InvariantError
from mend.events.base import Emit
from mend.events.kinds import ProcessStarted
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.status.event_log import EventLog
from mend.types import Member, Peer

NEVER = 1 << 62
"""A period longer than any run: nothing is ever due."""


@dataclass(frozen=True, slots=True)
class NoWire:
    """Replaces the I/O loop: nothing is sent or received."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_relayed: int = 0
    frames_refused: int = 0


class LocalOnlyRank(OneTrainer):
    """One rank of a rack that exchanges nothing. Ranks of the rack need not call anything
    together, and the model is never touched."""

    exchanges = False

    def __init__(self, settings: Settings, state_of: Callable[[Emit], TrainingState]) -> None:
        rank = _rank_in(settings.members)
        self.me = Peer(settings.rack, rank)
        self.settings, self.io_loop = settings, NoWire()
        self.recorder = EventLog({"rack": settings.rack, "rank": rank}, settings.diagnostics)
        self.pace = TrainingProgress(self.recorder.note, lambda: (0, 0))
        self.metrics = ServedMetrics(self.recorder.note)
        if rank == 0 and settings.metrics.port:
            self.metrics.open(
                settings.metrics, {"job_id": settings.job, "rack": str(settings.rack)}
            )
        self._over, self._ending = threading.Event(), threading.RLock()
        self._reported = False
        self._ticker = threading.Thread(target=self._tick, name="mend-alone", daemon=True)
        self.numerics = Numerics(
            CODECS["float32"](), MERGES["mean"](), OUTERS["nesterov"](1.0, 0.0, 0)
        )
        self.published = PublishedState(0)
        self.published.finish()  # there is nobody to wait for at the end
        policy = structs.replace(settings.policy, fragments=1, period_steps=NEVER, overlap_steps=0)
        parts = TrainerParts(
            member=Member(settings.rack, 0), policy=policy, options=settings.step,
            fragment_states=[], published=self.published, numerics=self.numerics,
            now_ns=time.monotonic_ns, post=_drop, captured=_drop, note=self.recorder.note,
            routes=StateRoutes(state_of(self.recorder.note)),
        )  # fmt: skip
        self.trainer = Trainer(parts)

    def begin(self) -> None:
        """Begin at once."""
        member = (self.me.rack, 0)
        self.recorder.note(ProcessStarted(member, "", self.settings.job, exchange=False))
        self._ticker.start()

    def watch(self, look: Callable[[], None]) -> None:
        """Do nothing: no weights are overwritten here."""

    def _tick(self) -> None:
        """Write the progress once a second, as a live rank's loop does."""
        while not self._over.wait(PERIOD_S):
            self.pace.write()

    def drive(self, requests: Requests) -> None:
        """Drive a generator of the trainer, which yields no request without fragments and other
        ranks."""
        for request in requests:
            raise InvariantError("a rank alone was asked to wait", {"request": request})

    def each(self, requests_of: Callable[[Trainer], Requests]) -> None:
        """As `drive`, for the trainer."""
        self.drive(requests_of(self.trainer))

    def after_step(self) -> None:
        self.drive(self.trainer.work())

    unfinished = False
    """No work waits."""

    def go_on(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Write the rest of the events and stop. Idempotent; any thread, see `LiveRank.abort`."""
        self._over.set()
        from_outside(self._end)

    close = abort
    """There are no other racks."""
    abort_freed = abort
    """A script that trains on with parts of a freed model loses nothing here."""

    def _end(self) -> None:
        with self._ending:
            if self._ticker.ident is not None:
                self._ticker.join()
            if not self._reported:
                self._reported = True
                ended = self.trainer.ended(self.me.rank)
                report_end(ended, self.settings.outcomes, self.recorder.note)
            self.metrics.close()
            self.numerics.close()
            self.pace.end()
            self.recorder.close()


def _drop(_: Event | OpenOffer) -> None:
    """There is no loop to tell."""


def _rank_in(members: tuple[int, ...] | None) -> int:
    """This process's number in its rack; `members`: the rack's global ranks, None: all."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    mine = dist.get_rank()
    return mine if members is None else members.index(mine)
