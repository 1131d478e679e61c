"""Carries out the mitigation that the log has decided for a slow rack: a smaller batch, or its
eviction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mend.consensus.log import mitigations_after
from mend.consensus.records import AWAITED, EVICTED, Mitigation, Record, Snapshot
from mend.coordination.events import BatchSet, Event
from mend.engine.state.fragment_state import Life
from mend.engine.state.published_state import PublishedSlice, PublishedState
from mend.engine.state.trainer_feature import TrainerFeature
from mend.events.base import Emit
from mend.events.kinds import LocalBatchChanged


class Mitigations(PublishedSlice):
    """The mitigations of slow racks in the log. A rack that leaves loses its mitigation."""

    def __init__(self, published: PublishedState) -> None:
        super().__init__(published)
        self.by_rack: Mapping[int, Mitigation] = {}
        self._members = published.job.members

    def decided(self, record: Record) -> None:
        if isinstance(record, Mitigation):
            self.by_rack = mitigations_after(self.by_rack, record)
        elif (members := self._published.job.members) != self._members:
            stay = {member.rack for member in members & self._members}
            self.by_rack = {rack: one for rack, one in self.by_rack.items() if rack in stay}
            self._members = members

    def restored(self, snapshot: Snapshot) -> None:
        self.by_rack = {one.rack: one for one in snapshot.mitigations}
        self._members = self._published.job.members


class RackLadder(TrainerFeature):
    """The mitigation of one rack, on which all its ranks agree."""

    def __init__(
        self,
        rack: int,
        published: PublishedState,
        life: Life,
        *,
        post: Callable[[Event], None],
        note: Emit,
    ) -> None:
        self._rack, self._log, self._life = rack, published.of(Mitigations), life
        self._post, self._note = post, note
        self._asked = self.mitigation()
        self.batch_pct = 100
        """Percentage of the micro-batches that the rack takes."""
        self.evicted_for = ""
        """Why the rack is evicted, once all its ranks know of it; empty: it is not."""
        self.stays = False
        """Whether the rack ignores evictions, as it tried to leave and its work could not be
        merged."""

    @property
    def idle(self) -> bool:
        return self.batch_pct == 100 and self._rack not in self._log.by_rack

    def mitigation(self) -> Mitigation:
        """The mitigation of this rack that the log has, as far as this rank knows."""
        none = Mitigation(self._rack, AWAITED, "nothing is done about it any more")
        return self._log.by_rack.get(self._rack, none)

    def asks(self) -> list[int]:
        done = self._asked = self.mitigation()
        evicted = done.stage == EVICTED and not (self.stays or self._life.writes)
        return [done.batch_pct, -done.batch_pct, int(evicted)]

    def agreed(self, least: Sequence[int], step: int) -> None:
        least_pct, minus_pct, leaves = least
        if least_pct == -minus_pct != self.batch_pct:
            self.batch_pct = least_pct
            self._post(BatchSet(step, least_pct))
            self._note(LocalBatchChanged(step, least_pct, self._asked.reason))
        if leaves:
            self.evicted_for = self._asked.reason
