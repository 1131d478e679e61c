"""runtime.steps: what the training thread does after a step: count, apply what is decided, capture
what is due.

Written as generators that yield what they wait for, so that the simulator can drive them under its
own clock: `Wait` for something on the board, `AgreeMin` for the rack's one tiny collective, `Share`
for the slices of the rack's other ranks. In a rack of one rank the last two are answered without
anybody.

Order inside one step: applies that are due, then captures, fragments ascending (overlap 0: capture,
then apply).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mend.errors import GaveUp, StartTimeout
from mend.fragment.apply import Alignment, realign
from mend.fragment.view import FragmentView
from mend.protocol.events import (
    Applied,
    Captured,
    Discarded,
    Event,
    Idle,
    Leaving,
    Progress,
    StillOpen,
)
from mend.protocol.messages import Commit
from mend.protocol.schedule import Schedule
from mend.runtime.handoff import Board
from mend.runtime.numerics import Anchor
from mend.terms import MS, SECOND, Member, Span

POLL_NS = 50 * MS
"""How often a draining rank looks again; news on the board wakes it at once."""

LEAVE_NS = 5 * SECOND
"""How long the end of the job is awaited after this rack has asked to leave at once."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Until ready() or limit_ns later. Answered with whether it was ready."""

    ready: Callable[[], bool]
    limit_ns: int


@dataclass(frozen=True, slots=True)
class AgreeMin:
    """Answered with the element-wise minimum over the ranks of the rack."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Share:
    """Answered with the full fragment: every rank's slice, in rank order."""

    fragment: int
    slice_N: Tensor


Doing = Generator[Wait | AgreeMin | Share, Any, None]


@dataclass(frozen=True, slots=True)
class StepOptions:
    ranks: int
    overlapped: bool
    lockstep: bool
    alignment: Alignment
    blend_alpha: float
    stall_max_ns: int
    give_up_ns: int
    shutdown_ns: int


@dataclass
class OpenOffer:
    """An own contribution until the log ends it. `delta_N` begins as the snapshot; a worker turns
    it into the delta."""

    fragment: int
    seq: int
    capture_step: int
    tokens: int
    steps: int
    tokens_total: int
    steps_total: int
    anchor: Anchor
    delta_N: Tensor
    residual_N: Tensor | None
    pend_N: Tensor | None = None


@dataclass
class Track:
    """One fragment as the training thread sees it: the anchor it trains on, its marks, its open
    offer."""

    view: FragmentView
    span: Span
    anchor: Anchor
    seq: int = 0
    tokens_mark: int = 0
    steps_mark: int = 0
    offer: OpenOffer | None = None
    residual_N: Tensor | None = None


@dataclass
class Ledger:
    """Tokens of this rank per fragment, summed over fragments: merged, given up by alignment; open
    is derived."""

    merged: int = 0
    discarded: int = 0
    missed: dict[str, int] = field(default_factory=dict)

    def miss(self, reason: str) -> None:
        self.missed[reason] = self.missed.get(reason, 0) + 1


class Trainer:
    """State of the training thread. `post` hands events to the loop, `own` registers an offer's
    tensors there."""

    def __init__(
        self,
        member: Member,
        schedule: Schedule,
        options: StepOptions,
        tracks: list[Track],
        board: Board,
        *,
        now_ns: Callable[[], int],
        post: Callable[[Event], None],
        own: Callable[[OpenOffer], None],
        note: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.member, self.schedule, self.options, self.tracks, self.board = (
            member,
            schedule,
            options,
            tracks,
            board,
        )
        self._now_ns, self._post, self._own, self._note = now_ns, post, own, note
        self.step = 0
        self.tokens = 0
        self.ledger = Ledger()
        self.stall_ns_total = 0
        self.stall_ns_last = 0
        self.applied = 0
        self._budget_ns = options.stall_max_ns
        self._marked_ns, self._marked_step, self.step_ns = now_ns(), 0, 0
        self._scratch_N = torch.empty(
            max(track.span.numel for track in tracks), dtype=torch.float32
        )

    # -------------------------------------------------------------- a step

    def stepped(self, tokens: int) -> bool:
        """Count one step of the inner optimizer; returns whether `work` is due."""
        self.step += 1
        self.tokens += tokens
        return self.schedule.busy(self.step)

    def work(self) -> Doing:
        """Everything that is due after the current step."""
        step, tau = self.step, self.schedule.overlap_steps
        self._measure()
        captures = self.schedule.captures(step)
        if tau == 0:
            for fragment in captures:
                self._capture(fragment)
        ends = self.schedule.ends(step)
        if ends:
            yield from self._apply_point(ends)
        if tau > 0:
            for fragment in captures:
                self._capture(fragment)
            if captures and not self.options.overlapped:
                yield from self._await_results(captures)
        self._marked_ns = self._now_ns()

    def _measure(self) -> None:
        """Time per step without our own waits, for the adaptive grace window."""
        now_ns, steps = self._now_ns(), self.step - self._marked_step
        if steps > 0:
            sample_ns = (now_ns - self._marked_ns) // steps
            self.step_ns = (
                sample_ns if self.step_ns == 0 else self.step_ns + (sample_ns - self.step_ns) // 10
            )
        self._marked_step = self.step
        self._post(Progress(self.step, self.step_ns))

    # -------------------------------------------------------------- capture

    def _capture(self, fragment: int) -> None:
        track = self.tracks[fragment]
        if track.offer is not None:
            self._post(StillOpen(fragment, track.anchor.version))
            self.ledger.miss("previous offer still open")
            self._note(
                "still-open", {"step": self.step, "fragment": fragment, "seq": track.offer.seq}
            )
            return
        steps = self.step - track.steps_mark
        if steps < 1:
            return
        snapshot_N = torch.empty(track.span.numel, dtype=torch.float32)
        track.view.read(track.span, snapshot_N)
        track.seq += 1
        tokens = self.tokens - track.tokens_mark
        offer = OpenOffer(
            fragment,
            track.seq,
            self.step,
            tokens,
            steps,
            self.tokens,
            self.step,
            track.anchor,
            snapshot_N,
            track.residual_N,
        )
        track.offer = offer
        self._own(offer)
        base = track.anchor.version
        self._post(Captured(fragment, offer.seq, base, self.step, tokens, steps))
        self._note(
            "captured",
            {
                "step": self.step,
                "fragment": fragment,
                "seq": offer.seq,
                "base": base,
                "tokens": tokens,
                "steps": steps,
            },
        )

    # -------------------------------------------------------------- apply

    def _apply_point(self, ends: tuple[int, ...]) -> Doing:
        """All ranks of the rack look at what is decided, agree by one MIN, and apply the same or
        nothing."""
        yield from self._await_results(ends)
        tau = self.schedule.overlap_steps
        newest_capture = self.step if tau == 0 else self.step - 1
        eligible = [
            p
            for p in range(len(self.tracks))
            if self.step >= self.schedule.last_capture(p, newest_capture) + tau
        ]
        yield from self._agree_and_apply(eligible)
        for fragment in ends:
            offer = self.tracks[fragment].offer
            if offer is not None and offer.capture_step == self.step - tau:
                self.ledger.miss("result not there at the apply point")

    def _await_results(self, fragments: tuple[int, ...]) -> Doing:
        """Wait for the outcome of open offers, within the stall budget of this outage."""
        limit_ns = self.options.give_up_ns if self.options.lockstep else self._budget_ns
        waiting = [
            p for p in fragments if self.tracks[p].offer is not None and not self._resolved(p)
        ]
        if not waiting or limit_ns <= 0:
            return
        started_ns = self._now_ns()
        ready = yield Wait(lambda: all(self._resolved(p) for p in waiting), limit_ns)
        self.stall_ns_last = self._now_ns() - started_ns
        self.stall_ns_total += self.stall_ns_last
        if self.options.lockstep and not ready:
            raise self.board.failure or GaveUp(
                f"step {self.step}: no decision on fragment {waiting[0]} within give_up_s="
                f"{self.options.give_up_ns / SECOND:g} s in lockstep ({self._why()})"
            )
        if not self.options.lockstep:
            self._budget_ns = max(0, self._budget_ns - self.stall_ns_last)
        if not ready:
            self._note(
                "stall-over",
                {
                    "step": self.step,
                    "fragments": waiting,
                    "ms": self.stall_ns_last // MS,
                    "why": list(self.board.why),
                },
            )

    def _resolved(self, fragment: int) -> bool:
        track, panel = self.tracks[fragment], self.board.panels[fragment]
        with self.board.changed:
            if any(version > track.anchor.version for version in panel.anchors):
                return True
            return track.offer is not None and track.offer.seq in panel.discarded

    def _agree_and_apply(
        self, fragments: list[int], flags: list[int] | None = None
    ) -> Generator[Any, Any, list[int]]:
        """Apply what every rank can; returns the flags' minimum over the ranks."""
        with self.board.changed:
            if self.board.failure is not None:
                raise self.board.failure
            anchors = {p: dict(self.board.panels[p].anchors) for p in fragments}
            dead = {p: set(self.board.panels[p].discarded) for p in fragments}
        values = list(flags or [])
        for fragment in fragments:
            track = self.tracks[fragment]
            newest, oldest = _run(anchors[fragment], track.anchor.version)
            discarded = track.offer is not None and track.offer.seq in dead[fragment]
            values += [newest, -oldest, int(discarded)]
        agreed: list[int] = values if self.options.ranks == 1 else (yield AgreeMin(values))
        count = len(flags or [])
        for position, fragment in enumerate(fragments):
            version, minus_oldest, discarded_everywhere = agreed[count + 3 * position :][:3]
            track = self.tracks[fragment]
            if discarded_everywhere and track.offer is not None:
                self._post(Discarded(fragment, track.offer.seq))
                self._note(
                    "discarded", {"step": self.step, "fragment": fragment, "seq": track.offer.seq}
                )
                self.ledger.miss("declined or too old")
                self.board.panels[fragment].discarded.clear()
                track.offer = None
            if version > track.anchor.version and version >= -minus_oldest:
                yield from self._apply(fragment, anchors[fragment][version])
                self._budget_ns = self.options.stall_max_ns
        return agreed[:count]

    def _apply(self, fragment: int, anchor: Anchor) -> Doing:
        """Protocol section 7: read the own offer's fate from the commits between, realign, move the
        marks."""
        track, offer = self.tracks[fragment], self.tracks[fragment].offer
        fate = self._fate(fragment, anchor.version) if offer is not None else ""
        named = offer is not None and fate == "named"
        options = self.options
        theta_N = self._scratch_N[: track.span.numel]
        track.view.read(track.span, theta_N)
        delta_N = offer.delta_N if named and offer is not None else None
        realign(
            theta_N,
            track.anchor.values,
            delta_N,
            anchor.values,
            options.alignment,
            options.blend_alpha,
            theta_N,
        )
        yield from self._write(track, fragment, theta_N)
        ended = 0
        if offer is not None and fate:
            ended, track.offer = offer.seq, None
            if named:
                self._settle(track, offer)
            else:
                self.ledger.miss("offer dropped: too old")
        track.anchor = anchor
        self.board.applied(fragment, anchor.version)
        self.applied += 1
        self._post(Applied(fragment, anchor.version, ended))
        self._note(
            "applied",
            {
                "step": self.step,
                "fragment": fragment,
                "version": anchor.version,
                "fate": fate or "none",
                "seq": ended,
            },
        )
        if offer is not None and not fate:
            self.ledger.miss("offer was late")

    def _write(self, track: Track, fragment: int, slice_N: Tensor) -> Doing:
        if self.options.ranks == 1:
            track.view.write(track.span, slice_N)
        else:
            full = yield Share(fragment, slice_N)
            track.view.write(Span(0, track.view.layout.numel), full)

    def _fate(self, fragment: int, version: int) -> str:
        """What the commits in (base, version] say of the open offer: "named", "dropped" or ""."""
        track = self.tracks[fragment]
        assert track.offer is not None
        mine = (self.member, track.offer.seq)
        with self.board.changed:
            panel = self.board.panels[fragment]
            stretch = [panel.commits[v] for v in range(track.anchor.version + 1, version + 1)]
        return next((fate for commit in stretch if (fate := _fate_in(commit, mine))), "")

    def _settle(self, track: Track, offer: OpenOffer) -> None:
        """The offer is merged: its residual is owed now, its tokens are done."""
        track.residual_N = offer.pend_N
        self.ledger.merged += offer.tokens
        if self.options.alignment == "overwrite":
            self.ledger.discarded += self.tokens - offer.tokens_total
            track.tokens_mark, track.steps_mark = self.tokens, self.step
        else:
            track.tokens_mark, track.steps_mark = offer.tokens_total, offer.steps_total

    # -------------------------------------------------------------- drain and close

    def open_tokens(self) -> int:
        """Tokens trained and not merged yet, summed over fragments."""
        return sum(self.tokens - track.tokens_mark for track in self.tracks)

    def drain(self, limit_ns: int) -> Doing:
        """Until no own offer is open and everything decided is applied. Raises GaveUp after
        limit_ns."""
        everything = list(range(len(self.tracks)))
        deadline_ns = self._now_ns() + limit_ns
        for fragment, track in enumerate(self.tracks):
            if track.offer is not None:
                self._post(StillOpen(fragment, track.anchor.version))
        while True:
            versions = self._versions()
            open_ = any(track.offer is not None for track in self.tracks)
            done = not open_ and all(
                p.decided <= v for p, v in zip(self.board.panels, versions, strict=True)
            )
            late, over = self._now_ns() > deadline_ns, self.board.finished
            flags = yield from self._agree_and_apply(
                everything, [int(done), -int(late), -int(over)]
            )
            if flags[0]:
                return
            if flags[1] or flags[2]:
                why = (
                    "the job is over for this rack"
                    if flags[2]
                    else f"after {limit_ns / SECOND:g} s"
                )
                count = sum(track.offer is not None for track in self.tracks)
                raise GaveUp(f"drain: {count} offers are still open: {why} ({self._why()})")
            for fragment, track in enumerate(self.tracks):
                if track.offer is not None and track.anchor.version > versions[fragment]:
                    self._post(StillOpen(fragment, track.anchor.version))
            yield Wait(self._news, POLL_NS)

    def close(self, *, keep_local: bool = False) -> Doing:
        """Merge the tail of every fragment, leave together with the other racks (or alone after
        shutdown_timeout_s), and put the anchor into the model.

        A rack that has to leave with work that nobody merged keeps its own weights instead: the
        anchor has not seen that work, and throwing it away would lose it without a trace.
        """
        limit_ns = self.options.give_up_ns if self.options.lockstep else self.options.shutdown_ns
        yield from self._try_drain(limit_ns)
        for fragment, track in enumerate(self.tracks):
            if track.offer is None:
                self._capture(fragment)
        yield from self._try_drain(limit_ns)
        self._post(Leaving())
        deadline_ns, hurried = self._now_ns() + self.options.shutdown_ns, False
        everything = list(range(len(self.tracks)))
        told = None
        while True:
            late = self._now_ns() > deadline_ns
            flags = yield from self._agree_and_apply(
                everything, [int(self.board.finished), -int(late)]
            )
            if flags[0] or (flags[1] and hurried):
                break
            if flags[1]:
                hurried, deadline_ns = True, self._now_ns() + LEAVE_NS
                self._post(Leaving(now=True))
            if (versions := self._versions()) != told:
                told = versions
                self._post(Idle(versions))
            yield Wait(self._news, POLL_NS)
        unmerged = min((yield from self._agree_and_apply([], [-self.open_tokens()])))
        if not self.board.finished:
            self._note(
                "left-alone", {"why": list(self.board.why), "open_tokens": self.open_tokens()}
            )
        if unmerged:
            self._note(
                "kept-local",
                {
                    "open_tokens": self.open_tokens(),
                    "reason": "unmerged work is only in these weights",
                },
            )
        elif not keep_local:
            yield from self.publish_anchor()

    def _try_drain(self, limit_ns: int) -> Doing:
        """A shutdown is not stopped by offers that cannot be merged: they are reported as lost."""
        try:
            yield from self.drain(limit_ns)
        except GaveUp as error:
            self._note("drain-gave-up", {"detail": str(error), "open_tokens": self.open_tokens()})

    def _why(self) -> str:
        return "; ".join(self.board.why) or "no reason known"

    def _versions(self) -> tuple[int, ...]:
        return tuple(track.anchor.version for track in self.tracks)

    def _news(self) -> bool:
        return self.board.finished or any(self._resolved(p) for p in range(len(self.tracks)))

    def begin(self, limit_ns: int) -> Doing:
        """Wait until every rack holds version 0 (the lowest rack's weights, which may be our own),
        and train on it.

        All racks begin together, so that their capture steps fall into the same rounds. Raises what
        stopped the start.
        """
        board = self.board

        def ready() -> bool:
            held = all(0 in panel.anchors for panel in board.panels)
            return (
                board.begun
                and held
                and len(board.settled) == len(board.panels)
                and min(board.settled) >= 0
            )

        fine = yield Wait(ready, limit_ns)
        everywhere = [int(fine)] if self.options.ranks == 1 else (yield AgreeMin([int(fine)]))
        if not everywhere[0]:
            raise board.failure or StartTimeout(
                f"not every rack held version 0 within {limit_ns / SECOND:g} s ({self._why()})"
            )
        for fragment, track in enumerate(self.tracks):
            with self.board.changed:
                anchor = self.board.panels[fragment].anchors[0]
            if anchor.digest != track.anchor.digest or self.options.ranks > 1:
                yield from self._write(track, fragment, anchor.values)
            track.anchor = anchor

    def publish_anchor(self) -> Doing:
        """The model becomes the anchor."""
        for fragment, track in enumerate(self.tracks):
            yield from self._write(track, fragment, track.anchor.values)

    def local_weights(self) -> list[Tensor]:
        """A copy of the live model, one full vector (fp32) per fragment."""
        found = []
        for track in self.tracks:
            full_N = torch.empty(track.view.layout.numel, dtype=torch.float32)
            track.view.read(Span(0, track.view.layout.numel), full_N)
            found.append(full_N)
        return found

    def put_back(self, weights: list[Tensor]) -> None:
        for track, full_N in zip(self.tracks, weights, strict=True):
            track.view.write(Span(0, track.view.layout.numel), full_N)


def _run(anchors: dict[int, Anchor], base: int) -> tuple[int, int]:
    """(newest, oldest) of the unbroken run of versions behind `base` that ends at the newest;
    (base, base) if none."""
    newest = max((version for version in anchors if version > base), default=base)
    oldest = newest
    while oldest - 1 > base and oldest - 1 in anchors:
        oldest -= 1
    return newest, oldest


def _fate_in(commit: Commit, mine: tuple[Member, int]) -> str:
    if any((share.member, share.seq) == mine for share in commit.members):
        return "named"
    return "dropped" if any((ended.member, ended.seq) == mine for ended in commit.dropped) else ""
