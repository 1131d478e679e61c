"""Lets an evicted rack leave in order, with all its work merged, or not at all."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

from mend.consensus.records import EVICTED
from mend.coordination.events import Started
from mend.engine.state.fragment_state import Requests
from mend.engine.state.outcome import Outcome
from mend.engine.trainer.trainer import Trainer
from mend.errors import EVICTED_EXIT, Evicted, GaveUp, SeatLost
from mend.events.kinds import EvictionFailed, RankEvicted

_loaded_ns = time.monotonic_ns()


def process_age_ns() -> int:
    """Time since this process was started; where the system does not provide it, since mend was
    imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_ns = int(fields[19]) * 10**9 // os.sysconf("SC_CLK_TCK")
        return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic_ns() - _loaded_ns


@cache
def startup_ns() -> int:
    """Time from the start of this process until the first call. It is fixed by then: a later life
    of the rack in the same process takes no longer to start."""
    return process_age_ns()


class EvictableTrainer(Trainer):
    """A trainer that leaves the job when the log evicts its rack."""

    def work(self) -> Requests:
        """As `Trainer.work`. Raises Evicted on all ranks of an evicted rack, once its work is
        merged and it has left; and SeatLost on those of a rack that the job goes on without."""
        yield from super().work()
        if self.life.lost:
            raise self._seat_lost()
        if self.ladder.evicted_for:
            with self.clock.untimed():
                yield from self._leave_evicted()

    def _seat_lost(self) -> SeatLost:
        why = self.published.job.why_out(self.member)
        self.outcome = Outcome("seat-lost", why)
        self._stand()
        error = SeatLost(
            f"{why}. The job goes on without it; {self.open_per_fragment():.10g} of its "
            f"{self.tokens} tokens were not merged. Start it again, and it joins with the merged "
            f"weights (mend launch does; the process ends with status {EVICTED_EXIT})"
        )
        self.published.fail(error)
        return error

    def _leave_evicted(self) -> Requests:
        """Leave. Train on instead if the eviction was taken back meanwhile, or if the work cannot
        be merged in time and would be lost."""
        reason = self.ladder.evicted_for
        try:
            for _ in range(2):  # offers that are open already go first
                self._capture_tails()
                yield from self._drain(self._at_the_end())
        except GaveUp as late:
            self._stays(reason, str(late), for_good=True)
            return
        still, open_ = self.ladder.mitigation().stage == EVICTED, self.open_tokens()
        stands, minus_open = yield from self._all_ranks([int(still), -open_])
        if not stands or minus_open:
            why = "not all its work was merged" if minus_open else "it was taken back meanwhile"
            self._stays(reason, why, for_good=bool(minus_open))
            return
        yield from self._leave(self._patience(0, stall_ns=0))
        self.outcome = Outcome("evicted", reason)
        self._stand()
        self._note(RankEvicted(self.step, reason))
        error = Evicted(
            f"rack {self.member.rack} was evicted after step {self.step}: {reason}. All "
            "its work is merged. Start it again, and it joins with the state of another rack "
            f"(mend launch does; the process ends with status {EVICTED_EXIT})"
        )
        self.published.fail(error)
        raise error

    def _stays(self, reason: str, detail: str, *, for_good: bool) -> None:
        """Train on. `for_good`: also tell the coordinator, which takes the eviction back and does
        not try again."""
        self._note(EvictionFailed(self.step, reason, detail))
        self.ladder.evicted_for, self.ladder.stays = "", for_good
        if for_good:
            self._post(Started(0))
