"""The end of a training loop: it drains, leaves the job, fills the model, and has an outcome. An
evicted rack leaves with all its work merged, or not at all. The methods are generators, as in
`trainer_rounds`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mend.consensus.records import EVICTED
from mend.coordination.events import Idle, Leaving, Started, StillOpen
from mend.engine.state.fragment_state import POLL_NS, Requests, Wait
from mend.engine.state.outcome import Outcome, RankEnd, late_steps
from mend.engine.state.pulls import Patience
from mend.engine.trainer.trainer_rounds import TrainerRounds
from mend.errors import EVICTED_EXIT, Evicted, GaveUp, SeatLost
from mend.events.kinds import (
    DrainGaveUp,
    EndAwaited,
    EvictionFailed,
    LeftAlone,
    RankEvicted,
    StepsLate,
    WeightsKept,
)
from mend.types import SECOND

LEAVE_NS = 5 * SECOND
"""How long a rack waits for the end of the job after it has asked to leave at once; and for a copy
of what it has missed of it, where pulls fail."""

NOTE_NS = 5 * SECOND
"""How often a rack that waits for the others notes it."""


class TrainerEnd(TrainerRounds):
    """The end of `Trainer`."""

    def open_tokens(self) -> int:
        """Tokens trained and not merged yet, summed over fragments."""
        return sum(self.tokens - state.tokens_mark for state in self.weights)

    def drain(self, limit_ns: int) -> Requests:
        """Wait until no own offer is open and everything decided is applied. Raises GaveUp after
        `limit_ns`."""
        yield from self._drain(self._patience(limit_ns, stall_ns=0))

    def _patience(self, limit_ns: int, *, stall_ns: int) -> Patience:
        return Patience(limit_ns, stall_ns, self._now_ns(), self._arrived)

    def _arrived(self) -> dict[int, int]:
        """The counts of bytes that extend a wait. A rack that joins waits for no other rack."""
        return self.published.arrived(of_all=not self._joins() or self.published.trains)

    def _joins(self) -> bool:
        """Whether the job already ran when this rack said hello, or when it could begin."""
        founds = self.member in self.published.job.founders and not self.life.missed_first
        return self.published.job.begun and not founds

    def _at_the_end(self) -> Patience:
        limit_ns = (
            self.options.wait_timeout_ns if self.policy.lockstep else self.options.shutdown_ns
        )
        return self._patience(limit_ns, stall_ns=self.options.stall_ns)

    def _drain(self, patience: Patience) -> Requests:
        everything = list(range(len(self.fragment_states)))
        for fragment, state in enumerate(self.fragment_states):
            if state.offer is not None:
                self._post(StillOpen(fragment, state.anchor.version))
        while True:
            versions = self.versions()
            open_ = any(state.offer is not None for state in self.fragment_states)
            pairs = zip(self.published.fragments, versions, strict=True)
            done = not open_ and all(known.decided <= version for known, version in pairs)
            late, over = patience.over(self._now_ns()), self.published.finished
            values = [int(done), -int(late), -int(over)]
            done_everywhere, any_late, any_over = yield from self.agree_and_apply(
                everything, values
            )
            if done_everywhere:
                return
            if any_late or any_over:
                why = f"after {patience}"
                if any_over:
                    why = "the job is over for this rack"
                count = sum(state.offer is not None for state in self.fragment_states)
                raise GaveUp(f"drain: {count} offers are still open: {why} ({self.why()})")
            for fragment, state in enumerate(self.fragment_states):
                if state.offer is not None and state.anchor.version > versions[fragment]:
                    self._post(StillOpen(fragment, state.anchor.version))
            yield Wait(self._news, POLL_NS)

    # -------------------------------------------------------------- evicted

    def work(self) -> Requests:
        """As `TrainerRounds.work`. Raises Evicted on all ranks of an evicted rack, once its work is
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

    # -------------------------------------------------------------- at the end of the script

    def close(self, *, keep_local: bool = False, refusal: Outcome | None = None) -> Requests:
        """Merge the tail of every fragment, leave the job, and put the anchor into the model.

        The rack leaves together with the others, or alone after shutdown_timeout_s; as long as
        bytes of the last exchange arrive, it waits longer. A rack that has to leave with unmerged
        work keeps its own weights instead: the anchor does not have that work, and overwriting the
        weights would lose it. So does a rack whose weights may not be overwritten; `refusal` is the
        reason. `keep_local`: leave the model as it is. Sets `outcome`. Raises Diverged if the
        weights contain NaN or Inf.
        """
        patience = self._at_the_end()
        refused = yield from self.agree_and_apply([], [-int(refusal is not None)])
        kept = self.local_weights() if refused[0] else []
        if refused[0]:
            self.model.carry_from_here()
            yield from self._try_drain(patience)
        else:
            yield from self._merge_tails(patience)
        self._post(Leaving())
        yield from self._leave(patience)
        if refused[0]:
            # The saved weights have to be its own, without a merge that is applied meanwhile.
            self.put_back(kept)
            self.outcome = refusal or Outcome(
                "kept-local", "see the other ranks of this rack for the reason"
            )
            self._stand()
            return
        yield from self._end(keep_local)

    def _merge_tails(self, patience: Patience) -> Requests:
        """Merge what was trained since the last captures. A tail that was dropped, as the others
        merged theirs meanwhile, is captured again on the newest version."""
        if not self.policy.lockstep:
            # At once, so that the racks' tails meet in one round; open offers go first.
            self._capture_tails()
            self._post(Leaving())
        with contextlib.suppress(GaveUp):  # the drain below gives up as well, and notes it
            yield from self._drain(patience)
        again = True
        while again:
            before = self.versions()
            self._capture_tails()
            yield from self._try_drain(patience)
            again = yield from self._may_try_again(before, patience)

    def _may_try_again(
        self, before: tuple[int, ...], patience: Patience
    ) -> Generator[Any, Any, bool]:
        """Whether unmerged work is left that can be captured again on a newer version, and there is
        time for it."""
        pairs = zip(self.weights, before, strict=False)
        left = any(
            state.offer is None and self.tokens > state.tokens_mark and state.anchor.version > base
            for state, base in pairs
        )
        stops = self.policy.lockstep or self.published.finished or patience.over(self._now_ns())
        minus_left, may = yield from self._all_ranks([-int(left), int(not stops)])
        return bool(minus_left and may)

    def _end(self, keep_local: bool) -> Requests:
        """The rack has left: put the anchor into the model, unless its own weights hold more."""
        unsound = [self.model.unsound(state) for state in self.weights]
        sound = yield from self.agree_and_apply([], [int(not why) for why in unsound])
        if not all(sound):
            fragment = sound.index(0)
            raise self._diverged(fragment, unsound[fragment])
        unmerged = self.open_tokens()
        steps = [state.unweighed_steps(self.step, self.tokens) for state in self.weights]
        idle = max(steps, default=0) if self._weighs else 0  # of several parts one counts tokens
        behind = self.published.job.over and not self._reached()
        minus_most, minus_behind = yield from self.agree_and_apply(
            [], [-unmerged - idle, -int(behind)]
        )
        if not self.published.finished:
            self._note(LeftAlone(tuple(self.published.orders.why), self.open_per_fragment()))
        if minus_most or minus_behind:
            reason = "unmerged work is only in these weights"
            if minus_behind:
                reason = "the job ended with newer merged weights than this rack has"
            self._note(WeightsKept(self.open_per_fragment(), reason))
            self.outcome = Outcome("kept-local", self._why_kept(idle, behind=bool(minus_behind)))
        else:
            if not keep_local:
                yield from self.publish_anchor()
            self.outcome = self._outcome_of_leaving()
        self._stand()

    def ended(self, rank: int) -> RankEnd:
        """How this rank, which trains no more, has left the job."""
        outcome = self.outcome if self.outcome.word != "running" else Outcome("aborted")
        merged = self.ledger.merged / (len(self.weights) or 1)
        how = outcome.word, outcome.detail, self.step, self.tokens, merged
        return RankEnd(self.member.rack, rank, *how)

    def open_per_fragment(self) -> float:
        """Tokens trained and not merged yet, averaged over fragments, as in the ledger."""
        return self.open_tokens() / (len(self.weights) or 1)

    def _why_kept(self, idle: int, *, behind: bool) -> str:
        """Why this rack keeps its own weights, in words. `idle`: steps without tokens. `behind`:
        whether the job ended with newer versions."""
        if idle:
            return f"{idle} steps count no token, so nobody merges them: runtime.count_tokens"
        why = []
        if behind:
            ended = [known.decided for known in self.published.fragments]
            why = [
                f"the job ended at versions {_listed(ended)}, this rack has "
                f"{_listed(self.versions())}: it was silent then, and the rest can be copied from "
                "no rack"
            ]
            why += sorted({p.copy_failed for p in self.published.fragments if p.copy_failed})
            if named := self._named_ahead():
                words = f"fragments {_listed(named)}" if named[1:] else f"fragment {named[0]}"
                why.append(f"its last offers of {words} are merged there")
        open_ = self.open_per_fragment()
        if open_:
            missed = max(self.ledger.missed, key=self.ledger.missed.__getitem__, default="")
            most = f" (most often it was not merged because: {missed})" if missed else ""
            words = f"{open_:.10g} of its {self.tokens} tokens are in no merged weights here{most}"
            why += [words, *self.published.orders.why, *self.parts.troubles()]
        return "; ".join(dict.fromkeys(why))

    def _named_ahead(self) -> list[int]:
        """Fragments whose open offer is merged in a version that this rack does not have."""
        newest = [known.decided for known in self.published.fragments]
        fates = [self._open_fate(p, version)[0] for p, version in enumerate(newest)]
        return [p for p, fate in enumerate(fates) if fate == "named"]

    def _reached(self) -> bool:
        """Whether everything that is decided is applied."""
        pairs = zip(self.published.fragments, self.versions(), strict=True)
        return all(known.decided <= version for known, version in pairs)

    def _outcome_of_leaving(self) -> Outcome:
        """The outcome of a rack whose work is all merged."""
        if not self.fragment_states:
            return Outcome("local")
        if not self.published.finished:
            why = "; ".join(self.published.orders.why)
            return Outcome("left-alone", why or "no rack has confirmed the end")
        others = sorted(member.rack for member in self.published.job.members - {self.member})
        if others and self.member not in self.published.job.members:
            return Outcome("left-early", f"racks {', '.join(map(str, others))} train on")
        with self.published.changed:
            alone = self.published.last_rounds.in_words()
        steps = max(state.late_steps for state in self.weights)
        late = late_steps(self.member.rack, steps, self.policy.period_steps)
        if late:
            self._note(StepsLate(steps, late))
        details = filter(None, (self._without(), self._dropped(), alone, late))
        return Outcome("merged", "; ".join(details))

    def _without(self) -> str:
        """The racks whose newest work may be missing in the merged weights, in words."""
        racks = [rack for rack in self.published.job.missing if rack != self.member.rack]
        if not racks:
            return ""
        missing = "what it had not merged is missing here"
        return f"without {_racks(racks)}, silent or gone at the end: {missing}"

    def _dropped(self) -> str:
        """The racks that were present at the end but whose last offer was dropped, in words."""
        with self.published.changed:
            of_weights = self.published.fragments[: self.policy.of_weights]
            dropped = set[int]().union(*(known.tails_dropped for known in of_weights))
        racks = sorted(dropped - {self.member.rack, *self.published.job.missing})
        return f"the last offer of {_racks(racks)} was dropped: it is missing here" if racks else ""

    def _capture_tails(self) -> None:
        """Capture the steps since the last capture, for every fragment without an open offer."""
        for fragment, state in self.of_model:
            if state.offer is None:
                self._capture(fragment, closing=True)
        for state in self.weights:
            if state.offer is not None:
                state.late_steps = max(state.late_steps, state.behind_until - state.steps_mark)

    def _leave(self, patience: Patience) -> Requests:
        """Apply what is still being decided, until the log says that this rack has left.

        Past the deadline the rack asks to leave alone, and LEAVE_NS later it leaves without an
        answer.
        """
        hurried, posted, noted_ns, last = False, None, self._now_ns(), self.versions()
        patience.deadline_ns = max(patience.deadline_ns, noted_ns)
        everything = list(range(len(self.fragment_states)))
        while True:
            over = patience.over(self._now_ns(), extends=self._are_last(last))
            values = [int(self.published.finished), -int(over)]
            finished, late = yield from self.agree_and_apply(everything, values)
            if finished:
                yield from self._catch_up(patience)
            if finished or (late and hurried):
                return
            if late:
                # With an open offer the rack cannot leave in order: no further wait for an answer.
                grace_ns = 0 if any(state.offer for state in self.fragment_states) else LEAVE_NS
                hurried, patience = True, self._patience(grace_ns, stall_ns=0)
                self._post(Leaving(now=True))
            if (versions := self.versions()) != posted:
                posted = versions
                self._post(Idle(versions))
            if self._now_ns() - noted_ns > NOTE_NS:
                noted_ns = self._now_ns()
                left_s = max(0, patience.deadline_ns - noted_ns) // SECOND
                self._note(EndAwaited("the other racks to finish", left_s))
            yield Wait(self._news, POLL_NS)

    def _are_last(self, versions: tuple[int, ...]) -> bool:
        """Whether the bytes that arrive are of the last exchange: of another rack that ends, or of
        `versions`, which this rack has ended with. Bytes of racks that train on extend no wait."""
        orders = self.published.orders
        behind = (has < mine for has, mine in zip(orders.settled, versions, strict=False))
        return bool(orders.ending - {self.member.rack}) or any(behind)

    def _catch_up(self, patience: Patience) -> Requests:
        """Apply what was decided before the end of the job and is not here yet, as long as some
        rack serves it: until the deadline, or until copies fail."""
        everything, enough_ns = list(range(len(self.fragment_states))), self._now_ns() + LEAVE_NS
        patience.deadline_ns = max(patience.deadline_ns, enough_ns)
        while True:
            failed = any(known.copy_failed for known in self.published.fragments)
            now_ns = self._now_ns()
            stops = not self.published.job.over or (failed and now_ns > enough_ns)
            values = [int(self._reached()), -int(stops or patience.over(now_ns))]
            reached, minus_stops = yield from self.agree_and_apply(everything, values)
            if reached or minus_stops:
                return
            yield Wait(self._may_apply, POLL_NS)

    def _may_apply(self) -> bool:
        """Whether this rank holds a version that is newer than the applied one."""
        with self.published.changed:
            newest = [max(known.anchors, default=-1) for known in self.published.fragments]
        return any(new > has for new, has in zip(newest, self.versions(), strict=True))

    def _try_drain(self, patience: Patience) -> Requests:
        """Drain, but go on with the shutdown if offers cannot be merged; see `close`."""
        try:
            yield from self._drain(patience)
        except GaveUp as error:
            self._note(DrainGaveUp(str(error), self.open_per_fragment()))

    def _news(self) -> bool:
        return self.published.finished or any(
            self._resolved(p) for p in range(len(self.fragment_states))
        )

    def publish_anchor(self) -> Requests:
        """Write the anchor into the model."""
        for fragment, state in self.of_model:
            yield from self.model.write(fragment, state, state.anchor.values)

    def local_weights(self) -> list[Tensor]:
        """A copy on the host of this rank's part of the live model, in its dtypes."""
        return [live.to("cpu", copy=True) for live in self._held()]

    @torch.no_grad()
    def put_back(self, weights: list[Tensor]) -> None:
        """Write what `local_weights` returned."""
        for live, kept in zip(self._held(), weights, strict=True):
            live.copy_(kept)

    def _held(self) -> list[Tensor]:
        return [live for _, state in self.of_model for live in state.view.held()]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _racks(racks: Sequence[int]) -> str:
    return ", ".join(f"rack {rack}" for rack in racks)
