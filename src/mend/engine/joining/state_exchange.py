"""The training thread's part of moving training state between racks: copies for racks that join, a
copy for this one, and mirrors of the state of scope rack.

The methods are generators where they wait, as in `trainer_rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor

from mend.coordination.events import Event, RackStateLoaded, Wanting
from mend.engine.compute.digest import digest_of_state
from mend.engine.compute.worker_pool import WorkerPool
from mend.engine.joining.inbox import MirrorInbox, StateInbox
from mend.engine.joining.training_state import (
    Lacks,
    LikeFirst,
    Mirror,
    Mirrored,
    ReceivedState,
    StateRoutes,
    StateUnavailable,
    TrainingState,
    copy_state,
    no_mirror,
    room_of,
)
from mend.engine.state.fragment_state import POLL_NS, BroadcastBytes, Requests, Wait, agree
from mend.engine.state.published_state import PublishedState
from mend.engine.state.step_clock import StepClock
from mend.engine.state.trainer_feature import TrainerFeature
from mend.errors import StateRefused, require
from mend.events.base import Emit
from mend.events.kinds import StateGiven
from mend.types import MS, SECOND, Member

MIRROR_NS = 20 * SECOND
"""How long a joining rack waits for the others to list their mirrors of it. The transfer of one has
no such limit: it fails when it stalls (`transfer_stall_s`)."""


class StateExchange(TrainerFeature):
    """The exchange of one rank, in a rack of `ranks`. `routes`: how the state reaches other
    racks."""

    def __init__(
        self,
        routes: StateRoutes,
        ranks: int,
        published: PublishedState,
        clock: StepClock,
        pool: WorkerPool,
        *,
        now_ns: Callable[[], int],
        post: Callable[[Event], None],
        note: Emit,
    ) -> None:
        self.state, self.give, self.reserve = routes.state, routes.give, routes.reserve
        self.replicas, self.mirrors = routes.replicas, routes.mirrors
        self.due: Member | None = None
        """The joining rack for which the training state is copied before the next step."""
        self._ranks, self._published, self._clock, self._pool = ranks, published, clock, pool
        self._now_ns, self._post, self._note = now_ns, post, note
        self._inbox, self._found = published.of(StateInbox), published.of(MirrorInbox)
        self._mirrored_step = -1
        self._looks = 0
        """How often `asks` was called; the same on all ranks."""
        self._to = Member(0, 0)
        """The joining rack that `asks` named last; (0, 0): there was none."""
        self._reserved = False
        """Whether `reserve` was called for the next copy."""

    # -------------------------------------------------------------- for racks that join

    @property
    def idle(self) -> bool:
        """Whether `asks` would find no joining rack and change nothing."""
        inbox = self._inbox
        kept = self._reserved or inbox.room_B is not None
        return self.state is None or not (inbox.asked or kept)

    def asks(self) -> list[int]:
        """A joining rack, and what this rank still has to do for it. Where one rank lacks the copy,
        all ranks copy again, at the same step. Several joining racks take turns."""
        if self.state is None:
            return []
        with self._inbox.changed:
            asked, given = self._inbox.asked, frozenset(self._inbox.given)
        self._looks += 1
        if not asked:
            self._inbox.room_B, self._reserved = None, False
        to = self._to = asked[self._looks % len(asked)] if asked else Member(0, 0)
        lacks = Lacks.COPY if self._has_room() else Lacks.ROOM
        return [to.incarnation, -to.incarnation, -(Lacks.NOTHING if to in given else lacks)]

    def agreed(self, least: Sequence[int], step: int) -> None:
        """Where all ranks know at this step that the rack joins: do what one of them still lacks.
        They compute the size of a copy together: a `state_dict` may be a collective."""
        life = self._to.incarnation
        if not (least and life and list(least[:2]) == [life, -life]):
            return
        lacks = -least[2]
        if lacks == Lacks.COPY:
            self.due = self._to
        elif lacks == Lacks.ROOM and self.state is not None:
            size = room_of(self.state, step)
            if self.reserve is not None and not self._reserved and not self._has_room():
                self._reserved = True
                self.reserve(size)

    def _has_room(self) -> bool:
        elsewhere = self.replicas is not None and not self.replicas.first
        return self.reserve is None or elsewhere or self._inbox.room_B is not None

    def give_due(self, step: int) -> None:
        """Between two steps: copy the training state to host memory for a joining rack, if one is
        due."""
        to, self.due = self.due, None
        if to is None or self.state is None:
            return
        with self._inbox.changed:
            self._inbox.given.add(to)
        begun_ns = self._now_ns()
        with self._clock.untimed():
            room_B, self._inbox.room_B, self._reserved = self._inbox.room_B, None, False
            given = copy_state(self.state, step, self.replicas, room_B, self._pool.each)
        self.give(to, step, given)
        size = given.numel() if isinstance(given, Tensor) else 0
        took_ms = (self._now_ns() - begun_ns) // MS
        kept_by = "the first rank" if isinstance(given, LikeFirst) else ""
        refused = given if isinstance(given, str) else ""
        self._note(StateGiven(to.rack, step, size, took_ms, kept_by, refused))

    def mirror(self, step: int) -> None:
        """Serve the state of scope rack, which other racks keep once this capture is merged."""
        if self.mirrors is None or self.state is None or self._mirrored_step == step:
            return
        self._mirrored_step = step
        data_B = self.state.rack_state(step)
        if data_B is not None:
            self.mirrors.serve(step, data_B)

    # -------------------------------------------------------------- of a rack that joins

    def copy(self, limit_ns: int) -> Generator[Any, Any, ReceivedState | StateUnavailable]:
        """For a rack that joins: load the newest mirror of its former life, and get a donor's
        training state. This comes before the weights, which would age meanwhile. Refused: this rack
        begins fresh, and has noted that. Waits up to `limit_ns` for a donor to copy, and longer
        while its bytes arrive."""
        state = require(self.state, "no state was asked for")
        yield from self._load_mirror(state)
        (enabled,) = yield from agree(self._ranks, [int(state.enabled)])
        copied: ReceivedState | StateUnavailable = StateUnavailable(state.why_not())
        if enabled:
            copied = yield from self._await_copy(limit_ns)
        if isinstance(copied, StateUnavailable):
            (step,) = yield from agree(self._ranks, [copied.step])
            copied = StateUnavailable(
                copied.reason + (f"; the job is at step {step}" if step else ""), step
            )
            state.begins_fresh(copied.reason)
        return copied

    def _load_mirror(self, state: TrainingState) -> Requests:
        """Load the newest mirror of a former life of this rack that all its ranks can fetch, or
        remember why there is none."""
        if self.mirrors is None:
            return
        found = self._found
        self.mirrors.seek()
        yield Wait(lambda: found.sought, MIRROR_NS)
        with found.changed:
            mirrors = {mirror.round: mirror for mirror in found.mirrors}
            reason = no_mirror(found.unheard)
        while True:
            (newest,) = yield from agree(self._ranks, [max(mirrors, default=0)])
            if not newest:
                state.rack_begins_fresh(reason)
                return
            mirror = mirrors.get(newest)
            mirrors = {number: older for number, older in mirrors.items() if number < newest}
            own = [mirror.owner.incarnation, mirror.step] if mirror else [-1, -1]
            agreed = yield from agree(self._ranks, [*own, *(-value for value in own)])
            if mirror is None or agreed[:2] != [-value for value in agreed[2:]]:
                continue
            fetched = yield from self._fetch_mirror(mirror)
            (everywhere,) = yield from agree(self._ranks, [int(isinstance(fetched, Mirrored))])
            if everywhere and isinstance(fetched, Mirrored):
                if state.load_rack(fetched):
                    self._post(RackStateLoaded(mirror.owner, mirror.step, mirror.digest))
                return
            why = fetched if isinstance(fetched, str) else "not by all ranks in time"
            reason = f"the mirror of step {mirror.step} could not be fetched: {why}"

    def _fetch_mirror(self, mirror: Mirror) -> Generator[Any, Any, Mirrored | str | None]:
        found, ended = self._found, False
        mirrors = require(self.mirrors, "no mirror was asked for")
        found.want(mirror)
        mirrors.fetch(mirror)
        while not ended and self._published.failure is None:  # a transfer that stalls ends itself
            ended = yield Wait(lambda: found.mirrored is not None, MIRROR_NS)
        return found.mirrored

    def load(self, copied: ReceivedState) -> Requests:
        """Load the copy. Raises StateRefused on all ranks of the rack if one of them cannot load
        it, such as where the racks make their optimizers in different ways."""
        state, refusal = require(self.state, "no state was asked for"), None
        if copied.shared:
            yield BroadcastBytes(copied.data_B)
        try:
            if copied.shared and digest_of_state(copied.data_B) != copied.digest:
                raise StateRefused(f"the copy of rack {copied.donor} was damaged inside this rack")
            state.load(copied)
        except StateRefused as error:
            refusal = error
        (loaded,) = yield from agree(self._ranks, [int(refusal is None)])
        if not loaded:
            raise refusal or StateRefused("another rank of this rack cannot take the copied state")

    def _await_copy(self, limit_ns: int) -> Generator[Any, Any, ReceivedState | StateUnavailable]:
        """A donor's copy, of the same step on all ranks; or the reason why there is none.

        The donor may change between the pulls of the ranks. Then they pull again, until the limit.
        The donor frees the copy when all ranks of this rack have it."""
        inbox, deadline_ns, again = self._inbox, self._now_ns() + limit_ns, True
        while again:
            self._post(Wanting(True))
            waits = True
            while waits:  # a pull that stalls ends by itself
                left_ns = max(deadline_ns - self._now_ns(), POLL_NS)
                ended: bool = yield Wait(lambda: inbox.copied is not None, left_ns)
                waits = not ended and inbox.pulling and self._published.failure is None
            copied, inbox.copied = inbox.copied, None
            own = [copied.donor, copied.step] if isinstance(copied, ReceivedState) else [-1, -1]
            early = isinstance(copied, ReceivedState) and self._now_ns() < deadline_ns
            agreed = yield from agree(self._ranks, [*own, *(-value for value in own), int(early)])
            same = agreed[:2] == [-value for value in agreed[2:4]]
            again = not same and bool(agreed[4])
        self._post(Wanting(False))
        if isinstance(copied, ReceivedState) and not same:
            return StateUnavailable(
                "the ranks of this rack got copies of different steps, or some got none"
            )
        return copied or StateUnavailable(f"no rack gave a copy within {limit_ns / SECOND:g} s")
