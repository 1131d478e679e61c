"""The begin of a training loop, and what checkpoints need of it.

`trainer_rounds` has the work after each step, `trainer_end` the end. The methods are generators, as
in those modules.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mend.coordination.events import Applied, StepReached, StillOpen
from mend.coordination.schedule import NEVER_CAPTURED
from mend.engine.compute.anchor import Anchor
from mend.engine.joining.training_state import ReceivedState, StateUnavailable
from mend.engine.state.fragment_state import (
    AgreeMin,
    FragmentProgress,
    OpenOffer,
    RankProgress,
    Requests,
    Wait,
)
from mend.engine.trainer.trainer_end import TrainerEnd
from mend.errors import CheckpointError, JobLost, StartTimeout, require
from mend.events.kinds import RackJoined, ResumeIgnored, WeightsReplaced


class Trainer(TrainerEnd):
    """The methods that `api` calls for a training script. One per rank, on its training thread."""

    def begin(self, limit_ns: int) -> Requests:
        """Wait until every rack holds the first versions of the job, and train on them.

        Version 0 is the lowest rack's weights. A job that resumes a checkpoint begins with its
        versions, and the weights stay as the script has loaded them. All racks begin together, so
        that their capture steps fall into the same rounds. A rack that joins a running job begins
        with the newest decided versions, as soon as it has copied them. Raises the error that stops
        the start.
        """
        copied = yield from self._copy_state(limit_ns // 2)
        anchors = yield from self._await_anchors(limit_ns)
        self.published.begin_to_train()
        if isinstance(copied, ReceivedState):
            yield from self.states.load(copied)
        own = self.resumes
        if own:
            yield from self._check_begun(anchors)
        yield from self._train_on(anchors, own=own)
        if own:
            self._offer_again()
        elif self.parts.resumed is not None:
            self._forget_progress()
        self._go_on_from(copied)
        self._stand()
        if self._joins():
            self._tell_joined([anchor.version for anchor in anchors])

    def _await_anchors(self, limit_ns: int) -> Generator[Any, Any, list[Anchor]]:
        """Wait until all ranks of the rack may begin; returns the anchors to begin with. Until then
        the script has received nothing from the job, so a rack whose job is lost can begin
        again."""
        anchors, patience = list[Anchor](), self._patience(limit_ns, stall_ns=self.options.stall_ns)
        looked = 0

        def may_look() -> bool:
            return self.published.looks > looked or self._may_begin()

        while not anchors:
            yield Wait(may_look, patience.look_ns(self._now_ns()))
            ready, looked = self._may_begin(), self.published.looks
            failure, late = self.published.failure, patience.over(self._now_ns())
            lost, ends = isinstance(failure, JobLost), bool(failure) or late
            all_ready, none_lost, none_ends = yield from self._all_ranks(
                [int(ready), int(ready or not lost), int(ready or not ends)]
            )
            if not none_lost:
                raise JobLost(str(self.published.failure or "another rank of this rack says so"))
            if all_ready:
                anchors = yield from self._first_anchors()
            elif not none_ends:
                what = "the newest version" if self._joins() else "the first version"
                raise failure or StartTimeout(
                    f"not every rack held {what} after {patience} ({self.why()})"
                )
        return anchors

    def _train_on(self, anchors: Sequence[Anchor], *, own: bool = False) -> Requests:
        """Begin with these anchors. `own`: the weights stay as the script has loaded them."""
        compares = self.parts.compares and not (own or self._joins())
        replaced = self.model.distance(self.fragment_states, anchors) if compares else 0.0
        if replaced:
            self._note(WeightsReplaced(round(100 * replaced, 3)))
        for fragment, (state, anchor) in enumerate(zip(self.fragment_states, anchors, strict=True)):
            foreign = anchor.digest != state.anchor.digest or state.shared
            if not own and foreign and state.in_model:
                yield from self.model.write(fragment, state, anchor.values)
            state.anchor = anchor
            if anchor.version:
                self.published.applied(fragment, anchor.version)
                self._post(Applied(fragment, anchor.version, 0))

    def _copy_state(
        self, limit_ns: int
    ) -> Generator[Any, Any, ReceivedState | StateUnavailable | None]:
        """Get a donor's training state, if this rack joins a running job. None: it does not."""
        if self.states.state is None:
            return None
        yield Wait(lambda: self.member in self.published.job.members, limit_ns)
        (joins,) = yield from self._all_ranks([int(self._joins())])
        return (yield from self.states.copy(limit_ns)) if joins else None

    def _tell_joined(self, versions: list[int]) -> None:
        state = self.states.state
        if state is not None and not state.joins:  # `_copy_state` did not see that it joins
            missed = "missed the first version" if self.life.missed_first else ""
            state.begins_fresh(f"this rack {missed or 'was not in the roster in time'}")
        self._note(RackJoined(tuple(versions)))

    def _go_on_from(self, copied: ReceivedState | StateUnavailable | None) -> None:
        """Go on from the donor's step; without a donor, from the step of the job, as the script
        would train all of it again otherwise. Fragments are due as the schedule says; nothing is
        trained yet."""
        if copied is None or (isinstance(copied, StateUnavailable) and copied.step <= self.step):
            return
        self.step = step = copied.step
        schedule = self.calendar.schedule
        for fragment, state in enumerate(self.fragment_states):
            state.tokens_mark, state.steps_mark = self.tokens, step
            first, period = schedule.first(fragment), schedule.period(fragment)
            last = first + (step - first) // period * period
            self.calendar.mark(fragment, max(0, last), NEVER_CAPTURED)
        self.calendar.past(step)
        self.clock.measured_step = step
        self._post(StepReached(step, 0))

    @property
    def resumes(self) -> bool:
        """Whether this rank begins with the weights of a checkpoint, which hold more than the
        anchor."""
        return self.parts.resumed is not None and not self._joins()

    def _check_begun(self, anchors: Sequence[Anchor]) -> Requests:
        """Raise CheckpointError unless the job began with this rack's checkpoint: otherwise the
        rack's progress since its own anchor would be taken for progress since another one."""
        pairs = zip(self.fragment_states, anchors, strict=True)
        same = [int(state.anchor.digest == anchor.digest) for state, anchor in pairs]
        same = yield from self._all_ranks(same)
        if not all(same):
            raise CheckpointError(
                f"the job has begun with other bits of fragment {same.index(0)} than rack "
                f"{self.member.rack} has in its checkpoint"
            )

    def _offer_again(self) -> None:
        """Reopen the offers that were open at the checkpoint."""
        _, offers = require(self.parts.resumed, "nothing is resumed")
        self._post(StepReached(self.step, 0))
        for offer in offers:
            state = self.fragment_states[offer.fragment]
            state.offer = offer
            self.parts.captured(offer)
            if state.anchor.version > offer.anchor.version:
                self._post(StillOpen(offer.fragment, state.anchor.version))

    def _forget_progress(self) -> None:
        """The job ran on without this rack. Work that was unmerged at the checkpoint may be merged
        since, so the rack begins with the merged weights and owes nothing."""
        progress, _ = require(self.parts.resumed, "nothing is resumed")
        self.units = 0  # a new member has got none
        for state in self.fragment_states:
            state.residual_N = None
            if state.moments is None:
                self.ledger.discarded += self.tokens - state.tokens_mark
            state.tokens_mark, state.steps_mark = self.tokens, self.step
        given_up = (self.ledger.discarded - progress.discarded) / (len(self.weights) or 1)
        reason = "the job runs: its newest weights take the place of the checkpoint's"
        self._note(ResumeIgnored(reason, given_up))

    def state(self) -> tuple[RankProgress, list[OpenOffer]]:
        """This rank's progress and its open offers, for a checkpoint. Call it after
        `CheckpointBarrier.cut`."""
        calendar = self.calendar
        offers = [t.offer for t in self.fragment_states if t.offer is not None]
        fragments = tuple(
            FragmentProgress(
                t.anchor.version, t.anchor.rounds, t.anchor.digest, t.seq, t.tokens_mark,
                t.steps_mark, calendar.marks[p], calendar.versions[p], self.model.digest(t),
            )
            for p, t in enumerate(self.fragment_states)
        )  # fmt: skip
        ledger = self.ledger
        counts = (self.step, self.tokens, ledger.merged, ledger.discarded)
        missed = tuple(ledger.missed.items())
        return RankProgress(*counts, missed, fragments, self.units), offers

    def _may_begin(self) -> bool:
        published = self.published
        if self.member not in published.job.members:
            return False
        if self._joins() or self._has_missed_first():
            return all(known.decided in known.anchors for known in published.fragments)
        first, settled = published.job.first, published.orders.settled
        held = all(v in known.anchors for v, known in zip(first, published.fragments, strict=True))
        return (
            held
            and len(settled) == len(first)
            and all(has >= v for has, v in zip(settled, first, strict=True))
        )

    def _has_missed_first(self) -> bool:
        """Whether this rank will never hold the first versions of the job: the others took this
        rack for silent, began without it, and have replaced a version that it had not copied."""
        pairs = zip(self.published.fragments, self.published.job.first, strict=False)
        with self.published.changed:
            return any(v not in known.anchors and known.decided > v for known, v in pairs)

    def _first_anchors(self) -> Generator[Any, Any, list[Anchor]]:
        """The anchors that all ranks of the rack begin with; empty: a rank has dropped the version
        that is the newest of another, so look again."""
        (missed,) = yield from self._all_ranks([-int(self._has_missed_first())])
        self.life.missed_first = self.life.missed_first or bool(missed)
        with self.published.changed:
            held = [dict(known.anchors) for known in self.published.fragments]
            newest = [known.decided for known in self.published.fragments]
        if not self._joins():
            newest = list(self.published.job.first)
        if self.policy.ranks > 1:
            newest = yield AgreeMin(newest)
            pairs = zip(newest, held, strict=True)
            if not all((yield AgreeMin([int(version in anchors) for version, anchors in pairs]))):
                return []
        return [anchors[version] for version, anchors in zip(newest, held, strict=True)]
