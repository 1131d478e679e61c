"""The work of the training thread after a step: count it, apply, capture.

The methods are generators that yield requests, so that the simulator can drive them under its own
clock: `Wait` for something published, `AgreeMin` for the rack's one small collective,
`GatherSlices` for the slices of its other ranks. A rack of one rank answers the last two itself.

Order inside one step: applies that are due, then captures, fragments ascending, then at a poll
point at most one capture of a fragment for which another rack has opened a round (overlap 0:
capture, then apply).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mend.coordination.events import (
    Applied,
    Discarded,
    Started,
    StepReached,
    StillOpen,
    Timed,
)
from mend.coordination.schedule import Calendar, schedule_of
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.offers import EncodedOffer, Read
from mend.engine.joining.state_exchange import StateExchange
from mend.engine.state.fragment_state import (
    FragmentState,
    Ledger,
    Life,
    OpenOffer,
    RankPosition,
    RankProgress,
    Requests,
    Standing,
    Wait,
    agree,
    unbroken_run,
)
from mend.engine.state.outcome import Outcome
from mend.engine.state.published_state import OfferFate
from mend.engine.state.stall_budget import StallBudget
from mend.engine.state.step_clock import StepClock
from mend.engine.state.trainer_feature import TrainerFeature
from mend.engine.trainer.ladder import RackLadder
from mend.engine.trainer.model_access import ModelAccess
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.errors import Diverged, GaveUp, NonFinite, require
from mend.events.kinds import (
    FragmentCaptured,
    OfferDiscarded,
    OfferStillOpen,
    RackDiverged,
    StallOver,
    StatisticsReset,
    VersionApplied,
)
from mend.fragment.statistics import in_few_words
from mend.types import MS, SECOND

ASLEEP_NS = 250 * MS
"""A wait that exceeds its limit by more than this shows that the process stood still."""


def _watches_steps(feature: TrainerFeature) -> bool:
    return type(feature).stepped is not TrainerFeature.stepped


class TrainerRounds:
    """One rank on its training thread: its fragments, its counts, the work between two steps."""

    def __init__(self, parts: TrainerParts) -> None:
        self.parts, published = parts, parts.published
        self.member, self.policy, self.options = parts.member, parts.policy, parts.options
        self.fragment_states, self.published = parts.fragment_states, published
        self.weights = [state for state in parts.fragment_states if state.moments is None]
        """The fragments of weights, the first ones. Tokens are counted for them."""
        self.calendar, self.clock = Calendar(schedule_of(parts.policy)), StepClock(parts.now_ns)
        self._now_ns, self._post, self._note = parts.now_ns, parts.post, parts.note
        self._numerics, self._weighs = parts.numerics, parts.options.weighs
        self.model = ModelAccess(
            parts.numerics, parts.side, parts.options.apply_mode, parts.options.blend_alpha
        )
        self.outcome = Outcome("running")
        """How this rank left the job; "running" until then."""
        self.states = StateExchange(
            parts.routes, parts.policy.ranks, published, self.clock, parts.numerics.pool,
            now_ns=parts.now_ns, post=parts.post, note=parts.note,
        )  # fmt: skip
        self.life = Life(parts.now_ns() if parts.started_ns is None else parts.started_ns)
        self.ladder = RackLadder(
            parts.member.rack, published, self.life, post=parts.post, note=parts.note
        )
        self.features = (self.states, self.ladder, *parts.features)
        self._watching = [each for each in self.features if _watches_steps(each)]
        self.step = self.tokens = self.units = 0
        self._before = (0, 0, 0)
        """(tokens, steps, units) before the last step."""
        self.ledger, self.stalls = Ledger(), StallBudget(parts.policy.stall_max_ns)
        self._position = RankPosition(
            tuple(state.anchor.version for state in parts.fragment_states)
        )
        self.standing: Standing = (0, 0, self._position)
        published.on_anchor(self._prefetch)
        if parts.resumed is not None:
            self._go_on_after(parts.resumed[0])

    def _go_on_after(self, progress: RankProgress) -> None:
        """Go on from a checkpoint."""
        self.step, self.tokens, self.units = progress.step, progress.tokens, progress.units
        self.ledger = Ledger(progress.merged, progress.discarded, dict(progress.missed))
        for fragment, (state, saved) in enumerate(
            zip(self.fragment_states, progress.fragments, strict=True)
        ):
            state.seq, state.tokens_mark = saved.seq, saved.tokens_mark
            state.steps_mark = saved.steps_mark
            self.calendar.mark(fragment, saved.captured_step, saved.captured_version)
        self.calendar.past(self.step)
        self.clock.measured_step = self.step

    @property
    def of_model(self) -> list[tuple[int, FragmentState]]:
        """The fragments that begin and end with the anchor, with their numbers."""
        return [(p, state) for p, state in enumerate(self.fragment_states) if state.in_model]

    # -------------------------------------------------------------- a step

    def stepped(self, tokens: int, units: int = 0) -> bool:
        """Count one step of the inner optimizer; returns whether `work` is due. `units`: units of
        data that it took."""
        self._before = (self.tokens, self.step, self.units)
        self.step += 1
        self.tokens += tokens if self._weighs else 0
        self.units += units
        self.standing = (self.step, self.tokens, self._position)
        begun_ns = self.clock.begun_ns
        if not begun_ns:
            self._post(Started(self._now_ns() - self.life.started_ns))
        if (sample := self.clock.stepped(tokens)) is not None:
            self._post(Timed(self.step, *sample))
        for feature in self._watching:
            feature.stepped(self.step, begun_ns, self.clock.untimed)
        return self.due(self.step)

    def due(self, step: int) -> bool:
        """Whether `work` is due after `step`, which is the current or the next one. A poll that
        would find nothing is not due: it costs ten times as much as finding that out."""
        calendar = self.calendar
        if step < calendar.next_step:
            return False
        if step < calendar.event_step and self._finds_nothing():
            calendar.polled(step)
            return False
        return True

    def _finds_nothing(self) -> bool:
        """Whether a poll now would change nothing. A rack of several ranks cannot tell: they
        agree. The loop may write meanwhile; the next poll sees it."""
        published = self.published
        if published.finished or published.failure is not None or self.life.lost:
            return False
        if self.policy.ranks > 1:
            return False
        opened = published.orders.opened  # replaced whole, never changed
        if any(version > self.calendar.versions[p] for p, version in opened.items()):
            return False
        for feature in self.features:
            if not feature.idle:
                return False
        return all(
            known.decided == state.anchor.version
            and ((offer := state.offer) is None or offer.seq not in known.discarded)
            for state, known in zip(self.fragment_states, published.fragments, strict=True)
        )

    def _prefetch(self, fragment: int) -> None:
        """Start the upload of the newest anchor. The loop calls this as soon as it has published
        one: the next step may be too late. The training thread may change what is read here at the
        same time; the upload is then not of the move that it makes, and is dropped."""
        state = self.fragment_states[fragment]
        if self.model.staging is None or state.moments is not None:
            return
        with self.published.changed:
            # Read under the lock: commits up to the applied version are deleted under it.
            old, offer = state.anchor, state.offer
            anchors = dict(self.published.fragments[fragment].anchors)
            newest, _ = unbroken_run(anchors, old.version)
            if newest <= old.version:
                return
            _, delta_N = self._fate(fragment, offer, old.version, newest)
        steps = max(0, self.calendar.last(fragment) - self.step - 1)
        left_s = steps * self.clock.step_ns / SECOND
        seq = offer.seq if delta_N is not None and offer is not None else 0
        # Without memory on the device, the apply tries again, in the script's own thread.
        with contextlib.suppress(torch.OutOfMemoryError):
            self.model.staging.prefetch(fragment, old, seq, delta_N, anchors[newest], left_s)

    def work(self) -> Requests:
        """Everything that is due after the current step."""
        step, calendar = self.step, self.calendar
        captures, begun_ns = calendar.captures(step), self._now_ns()
        if captures or calendar.lasts(step):
            self._measure()
        yield from self._points(captures, calendar.is_poll(step))
        calendar.past(step)
        if self.clock.measured_step == step:  # else it was a poll without news
            self._stand()
        self.clock.worked(step, begun_ns)

    def _points(self, captures: tuple[int, ...], polls: bool) -> Requests:
        """The apply, capture and poll points of this step, in their order."""
        tau, opened = self.policy.overlap_steps, list[int]()
        if captures:
            self.parts.before_capture()
        if tau == 0:
            for fragment in captures:
                self._reach(fragment)
        lasts = self.calendar.lasts(self.step)
        if lasts or polls or (captures and tau > 0 and not self.policy.lockstep):
            # Also before a capture: a slow rack must first apply what the fast ones merged since
            # its last poll, or its offer is too old when it arrives.
            opened = yield from self._apply_point(lasts, polls)
        if tau > 0:
            for fragment in captures:
                self._reach(fragment)
        joined = self._join(opened)
        if tau > 0 and not self.options.overlapped and (captures or joined):
            yield from self._await_results((*captures, *joined))
        elif tau == 0 and joined:
            yield from self._apply_point(joined, False)

    def _reach(self, fragment: int) -> None:
        """Pass a capture point, whether or not there is something to capture."""
        self._capture(fragment)
        self.calendar.mark(fragment, self.step, self.fragment_states[fragment].anchor.version)

    def _join(self, opened: list[int]) -> tuple[int, ...]:
        """At a poll point: capture one fragment for which a round is open, so that the offers of
        all racks are of about the same moment. Where an own offer is open already, that one
        counts. Returns the fragment that was captured, if any."""
        joined: tuple[int, ...] = ()
        for fragment in self.calendar.joins(opened):
            state = self.fragment_states[fragment]
            if opened[fragment] != state.anchor.version:
                continue
            if state.offer is not None:
                self._reach(fragment)
            elif not joined and self._countable(False)[1] > state.steps_mark:
                self.parts.before_capture()
                if self.clock.measured_step < self.step:
                    self._measure()
                self._reach(fragment)
                joined = (fragment,)
        return joined

    def _stand(self) -> None:
        """Publish this rank's position, for any thread."""
        versions, ledger = self.versions(), self.ledger
        self._position = RankPosition(
            versions=versions,
            digests=tuple(self.published.digest(p, version) for p, version in enumerate(versions)),
            marked=sum(state.tokens_mark for state in self.weights),
            merged=ledger.merged,
            discarded=ledger.discarded,
            missed=tuple(ledger.missed.items()),
            stall_ns_total=self.stalls.total_ns,
            stall_ns_last=self.stalls.last_ns,
        )
        self.standing = (self.step, self.tokens, self._position)

    def _measure(self) -> None:
        """Post the step number, and the time per step without mend's own waits."""
        self.clock.measure(self.step)
        self._post(StepReached(self.step, self.clock.step_ns))

    # -------------------------------------------------------------- capture

    def _countable(self, closing: bool) -> tuple[int, int, int]:
        """(tokens, steps, units) up to which an offer that is captured now counts. With feedback in
        the weights a part of the work stays there until the closing offer, which must have a
        weight: so every other offer leaves the last step to the next offer."""
        whole = not self._numerics.in_weights or closing
        return (self.tokens, self.step, self.units) if whole else self._before

    def _capture(self, fragment: int, closing: bool = False) -> None:
        state = self.fragment_states[fragment]
        if state.offer is not None:
            self._post(StillOpen(fragment, state.anchor.version))
            self.ledger.miss("previous offer still open")
            self._note(OfferStillOpen(self.step, fragment, state.offer.seq))
            return
        tokens_total, steps_total, units = self._countable(closing)
        tokens, steps = tokens_total - state.tokens_mark, steps_total - state.steps_mark
        if steps < 1:
            return
        self._repair(state)
        waits = self._waits_for_result()
        found = self.model.snapshot(fragment, state, closing=closing, waits=waits)
        encoded = Future[EncodedOffer]()
        if state.moments is not None:
            state.moments.captured()
        state.seq += 1
        state.offer = offer = OpenOffer(
            fragment, state.seq, self.step, tokens, steps, tokens_total, steps_total, state.anchor,
            found.values_N, state.residual_N, units_total=units, closing=closing,
            landed=found.landed, encoding=encoded.result if found.read else found.encoding,
        )  # fmt: skip
        returns = not closing or self.ladder.evicted_for
        if state.moments is None and returns:
            self.mirror()  # before the offer: a rack that reads its commit fetches this at once
        self.parts.captured(offer)
        if found.read is not None:
            self._encode(offer, found.read, encoded)
        about = (self.step, fragment, offer.seq, state.anchor.version, tokens, steps)
        self._note(FragmentCaptured(*about, closing))

    def _repair(self, state: FragmentState) -> None:
        if state.moments is not None and (names := state.moments.repair()):
            self._note(StatisticsReset(self.step, in_few_words(names)))

    def mirror(self) -> None:
        """Serve the state of scope rack, which other racks keep once this capture is merged. Called
        at each capture of weights, before its offer; a trainer outside a job may override it."""
        self.states.mirror(self.step)

    def give_state(self) -> None:
        """Between two steps: copy the training state to host memory for a joining rack, if one is
        due."""
        self.states.give_due(self.step)

    def _waits_for_result(self) -> bool:
        """Whether training waits right after a capture."""
        blocking = self.policy.overlap_steps == 0 or not self.options.overlapped
        return blocking and (self.policy.lockstep or self.stalls.left_ns > 0)

    def _encode(self, offer: OpenOffer, read: Read, encoded: Future[EncodedOffer]) -> None:
        """Read the model and encode the offer, on this thread and the pool."""
        grows = partial(self.parts.grows, offer)
        try:
            encoded.set_result(offer.encode(self._numerics, read, grows))
        except BaseException as error:
            encoded.set_exception(error)  # a worker waits
            if not isinstance(error, NonFinite):
                raise

    # -------------------------------------------------------------- apply

    def _apply_point(self, lasts: tuple[int, ...], polls: bool) -> Generator[Any, Any, list[int]]:
        """Wait for the results of the fragments `lasts`. Then the ranks agree by one MIN on what is
        decided, and all apply the same or nothing. At a poll point, return per fragment the version
        whose round all ranks know to be open, or -1."""
        yield from self._await_results(lasts)
        eligible = [
            p for p in range(len(self.fragment_states)) if self.calendar.applies(p, self.step)
        ]
        flags = self._opened() if polls else []
        asked = [feature.asks() for feature in self.features]
        lost = int(self.published.lost_seat(self.member))
        values = [*flags, *(-v for v in flags), *itertools.chain(*asked), lost]
        *agreed, gone = yield from self.agree_and_apply(eligible, values, self._uploading())
        self.life.lost = bool(gone)
        least, greatest = agreed[: len(flags)], agreed[len(flags) : 2 * len(flags)]
        left = iter(agreed[2 * len(flags) :])
        for feature, own in zip(self.features, asked, strict=True):
            feature.agreed(list(itertools.islice(left, len(own))), self.step)
        for fragment in lasts:
            state = self.fragment_states[fragment]
            offer = state.offer if state.moments is None else None
            if offer is not None and offer.capture_step == self.calendar.marks[fragment]:
                self.ledger.miss("result not there at the apply point")
        return [v if v == -w else -1 for v, w in zip(least, greatest, strict=True)]

    def _uploading(self) -> dict[int, int]:
        """The applied version of the fragment whose next anchor is in transfer to the device, while
        there is time: an apply now would stop the steps until it is there."""
        staging = self.model.staging
        p = staging.uploading() if staging is not None else None
        if p is None or self.step >= self.calendar.last(p):
            return {}
        return {p: self.fragment_states[p].anchor.version}

    def versions(self) -> tuple[int, ...]:
        return tuple(state.anchor.version for state in self.fragment_states)

    def _opened(self) -> list[int]:
        """Per fragment the version whose round is open, as far as this rank knows; else -1."""
        published = self.published
        with published.changed:
            known = [published.orders.opened.get(p, -1) for p in range(len(self.fragment_states))]
            return [v if v == published.fragments[p].decided else -1 for p, v in enumerate(known)]

    def _await_results(self, fragments: tuple[int, ...]) -> Requests:
        """Wait for the outcome of open offers, within the stall budget of this outage."""
        limit_ns = self.options.wait_timeout_ns if self.policy.lockstep else self.stalls.left_ns
        waiting = [p for p in fragments if self._is_awaited(p)]
        if not waiting or limit_ns <= 0:
            return
        published = self.published  # once it is finished, nothing more is merged
        wait = Wait(lambda: published.finished or all(map(self._resolved, waiting)), limit_ns)
        started_ns = begun_ns = self._now_ns()
        ready = yield wait
        late_ns = self._now_ns() - begun_ns - limit_ns
        if not ready and late_ns > ASLEEP_NS and not self.policy.lockstep:
            # This process stood still meanwhile, and had no time to pull what others decided.
            begun_ns = self._now_ns()
            ready = yield replace(wait)
        now_ns = self._now_ns()
        self.stalls.waited(now_ns - started_ns)
        if self.policy.lockstep and not ready:
            raise self.published.failure or GaveUp(
                f"step {self.step}: no decision on fragment {waiting[0]} within wait_timeout_s="
                f"{self.options.wait_timeout_ns / SECOND:g} s in lockstep ({self.why()}): if "
                "a rack is lost, restart all racks, with resume= from a checkpoint; otherwise "
                "raise wait_timeout_s"
            )
        if not self.policy.lockstep:
            self.stalls.spend(now_ns - begun_ns)
        if not ready:
            why, ms = tuple(self._why_not(waiting)), self.stalls.last_ns // MS
            self._note(StallOver(self.step, tuple(waiting), ms, why))

    def _is_awaited(self, fragment: int) -> bool:
        """Whether to wait for the result of a fragment. For moments only in lockstep: a mean that
        arrives late counts less, and does no harm."""
        state = self.fragment_states[fragment]
        if state.offer is None or self._resolved(fragment):
            return False
        return self.policy.lockstep or state.moments is None

    def _why_not(self, fragments: Sequence[int]) -> list[str]:
        """Why the results of these fragments are not here. The coordinator gives no reason for a
        round that is decided, nor for one that it has not heard of."""
        why = list(self.published.orders.why)
        for fragment in fragments:
            version = self.fragment_states[fragment].anchor.version
            decided = self.published.fragments[fragment].decided
            if decided > version:
                why.append(f"fragment {fragment}: version {decided} is decided and not here yet")
        return why or ["the coordinator has not answered the offers yet"]

    def why(self) -> str:
        why = [*self.published.orders.why, *self.published.transfers.sentences()]
        return "; ".join(why) or "no reason known"

    def _resolved(self, fragment: int) -> bool:
        state, known = self.fragment_states[fragment], self.published.fragments[fragment]
        with self.published.changed:
            if max(known.anchors, default=-1) > state.anchor.version:
                return True
            # A discarded offer of a rack that is behind was too old. What the rack trains before it
            # holds the newest version would be too old as well, so it goes on waiting.
            behind = not self.policy.lockstep and known.decided > state.anchor.version
            return not behind and state.offer is not None and state.offer.seq in known.discarded

    def agree_and_apply(
        self,
        fragments: list[int],
        flags: list[int] | None = None,
        caps: Mapping[int, int] | None = None,
    ) -> Generator[Any, Any, list[int]]:
        """Of `fragments`, apply what every rank of the rack can apply; return the minimum of the
        flags over the ranks. `caps`: by fragment the newest version that may be applied; any of
        the others."""
        most = caps or {}
        with self.published.changed:
            if self.published.failure is not None:
                raise self.published.failure
            known = {p: self.published.fragments[p].anchors for p in fragments}
            anchors = {
                p: {v: a for v, a in of.items() if v <= most.get(p, v)} for p, of in known.items()
            }
            dead = {p: self.published.fragments[p].discarded for p in fragments}
        values = list(flags or [])
        for fragment in fragments:
            state = self.fragment_states[fragment]
            newest, oldest = unbroken_run(anchors[fragment], state.anchor.version)
            discarded = state.offer is not None and state.offer.seq in dead[fragment]
            values += [newest, -oldest, int(discarded)]
        agreed = yield from agree(self.policy.ranks, values)
        count = len(flags or [])
        for position, fragment in enumerate(fragments):
            version, minus_oldest, discarded_everywhere = agreed[count + 3 * position :][:3]
            state = self.fragment_states[fragment]
            if discarded_everywhere and state.offer is not None:
                yield from self._discard(fragment, dead[fragment][state.offer.seq])
            if version > state.anchor.version and version >= -minus_oldest:
                yield from self._apply(fragment, anchors[fragment][version])
                self.stalls.renew()
        return agreed[:count]

    def _all_ranks(self, values: list[int]) -> Generator[Any, Any, list[int]]:
        return agree(self.policy.ranks, values)

    def _discard(self, fragment: int, bad: str) -> Requests:
        """End an own offer that was not merged. Raises Diverged where the weights contain NaN or
        Inf: the rack would train on and never be merged again."""
        state = self.fragment_states[fragment]
        seq = require(state.offer, "no offer is open", fragment=fragment).seq
        self._post(Discarded(fragment, seq, self.step))
        self._note(OfferDiscarded(self.step, fragment, seq))
        self.ledger.miss("declined or too old")
        state.offer = None
        wrong = self.model.unsound(state)
        (sound,) = yield from self._all_ranks([int(not wrong)])
        if bad or not sound:
            raise self._diverged(fragment, bad or wrong)

    def _diverged(self, fragment: int, why: str) -> Diverged:
        """Note and return the error to raise. `why`: empty where another rank of this rack has the
        bad weights."""
        why = why or "the weights of another rank of this rack contain NaN or Inf"
        error = Diverged(
            f"rack {self.member.rack}, fragment {fragment}, step {self.step}: {why}. The other "
            "racks go on without this one if they are a quorum. Start it again, and it joins with "
            "the merged weights (mend launch --max-restarts 1); look for a loss that is NaN, lower "
            "the learning rate, or load a checkpoint into all racks."
        )
        self._note(RackDiverged(self.step, fragment, why))
        self.published.erred(str(error))
        self.outcome = Outcome("diverged", why)
        return error

    def _apply(self, fragment: int, anchor: Anchor) -> Requests:
        """Apply an anchor: read the fate of the own offer in the commits, realign the model, set
        the marks (docs/internals/protocol.md#applying)."""
        state, offer = self.fragment_states[fragment], self.fragment_states[fragment].offer
        fate, delta_N = self._open_fate(fragment, anchor.version)
        if state.moments is None:
            yield from self.model.realign(fragment, state, delta_N, anchor)
        elif delta_N is not None and offer is not None:
            self._repair(state)
            steps = self.step - offer.capture_step
            yield from self.model.average(state, state.moments, offer, anchor, steps)
        ended = 0
        if (
            fate != "named"
            and anchor.version - state.anchor.version > self.policy.staleness_max_rounds
        ):
            state.behind_until = self.step
        if offer is not None and fate:
            ended, state.offer = offer.seq, None
            if fate == "named":
                self._settle(state, offer)
            else:
                self.ledger.miss("offer dropped: too old")
        state.anchor = anchor
        self.published.applied(fragment, anchor.version)
        self._stand()
        self._post(Applied(fragment, anchor.version, ended, self.step))
        self._note(VersionApplied(self.step, fragment, anchor.version, fate or "none", ended))
        if offer is not None and not fate:
            self.ledger.miss("offer was late")

    def _open_fate(self, fragment: int, version: int) -> tuple[OfferFate, Tensor | None]:
        """The fate of the open offer in the commits (base, version]: "named", "dropped" or "" (also
        without an offer). For a named offer also its merged part, for `realign`."""
        state = self.fragment_states[fragment]
        return self._fate(fragment, state.offer, state.anchor.version, version)

    def _fate(
        self, fragment: int, offer: OpenOffer | None, base: int, version: int
    ) -> tuple[OfferFate, Tensor | None]:
        """`_open_fate` of this offer, from this applied version on."""
        if offer is None:
            return "", None
        with self.published.changed:
            fate = self.published.fragments[fragment].fate((self.member, offer.seq), base, version)
        return fate, offer.merged_N if fate == "named" else None

    def _settle(self, state: FragmentState, offer: OpenOffer) -> None:
        """The offer is merged: keep its residual for the next one, and count its tokens as
        merged."""
        state.residual_N = offer.pend_N
        weights = state.moments is None
        if weights:
            self.ledger.merged += offer.tokens
        if weights and self.model.apply_mode == "overwrite":
            self.ledger.discarded += self.tokens - offer.tokens_total
            state.tokens_mark, state.steps_mark = self.tokens, self.step
        else:
            state.tokens_mark, state.steps_mark = offer.tokens_total, offer.steps_total
