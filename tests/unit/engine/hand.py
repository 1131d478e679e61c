"""One rank's training thread, driven by hand: the test is the worker, the loop, the log and the
clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mend.codec import CLOSING, CODECS
from mend.codec.on_device import DeviceEncoder
from mend.consensus.records import Commit, Ended, MergeMember
from mend.coordination.events import Event
from mend.coordination.schedule import Calendar, schedule_of
from mend.engine.checkpoint.checkpoint_barrier import CheckpointBarrier
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.joining.inbox import MirrorInbox, StateInbox
from mend.engine.state.fragment_state import (
    AgreeMin,
    BroadcastBytes,
    FragmentState,
    GatherSlices,
    OpenOffer,
    Remainder,
    Request,
    Requests,
    StepOptions,
    Wait,
    drive,
    tracks_of,
)
from mend.engine.state.published_state import NewestOrders, PublishedState
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.errors import NonFinite
from mend.events.base import LoggedEvent
from mend.events.kinds import FragmentCaptured
from mend.fragment.device import Side
from mend.fragment.model_plan import ModelPlan
from mend.fragment.shards import replicated
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.types import SECOND, Member
from tests.noted import pair
from tests.unit.coordination.nouns import policy

MINE, THEIRS = Member(0, 7), Member(1, 8)
NUMEL = 4
MOVE = 0.25
"""What one step adds to every parameter; a power of two, so that sums are exact."""

TOKENS = 10
STALL_NS, WAIT_TIMEOUT_NS, SHUTDOWN_NS = SECOND, 60 * SECOND, 5 * SECOND

E = TypeVar("E")


class Hand:
    """All parameters are equal, so that one number describes a fragment. Version 0 is 0."""

    def __init__(
        self, *, ranks: int = 1, rank: int = 0, fragments: int = 1, numel: int = NUMEL,
        period: int = 4, overlap: int = 2, ramp: int = 0, polls: int = 0, payload: str = "float32",
        in_weights: bool = False, side: Side | None = None,
        on_device: DeviceEncoder | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.ranks, self.now_ns = ranks, 5 * SECOND
        rules = CODECS[payload](), MERGES["mean"](), OUTERS["nesterov"](1.0, 0.0)
        self.numerics = Numerics(*rules, in_weights=in_weights, on_device=on_device)
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(fragments)])
        self.published = PublishedState(fragments)
        self.inbox, self.found = self.published.of(StateInbox), self.published.of(MirrorInbox)
        self.events: list[Event] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[Request] = []
        self.given: list[tuple[Member, int, Tensor | str]] = []
        """Copies of the training state, for racks that join."""
        self.offers: list[OpenOffer] = []
        self.during: Callable[[], object] = lambda: None
        """What happens while the thread waits."""
        self.agree: Callable[[list[int]], list[int]] = lambda values: values
        """The element-wise minimum with what the rack's other ranks say."""
        own = {name: options.pop(name) for name in StepOptions.__slots__ if name in options}
        usual: dict[str, Any] = {
            "overlapped": True, "apply_mode": "carry", "blend_alpha": 0.5,
            "wait_timeout_ns": WAIT_TIMEOUT_NS, "shutdown_ns": SHUTDOWN_NS, "stall_ns": STALL_NS,
        }  # fmt: skip
        agreed = policy(
            ranks=ranks, fragments=fragments, period_steps=period, overlap_steps=overlap,
            overlap_ramp=ramp, **{"stall_max_ns": STALL_NS, **options},
        )  # fmt: skip
        plan = ModelPlan(self.model, fragments)
        fragment_states = tracks_of(
            plan, self.numerics, lambda cut: replicated(cut.layout, ranks, rank)
        )
        parts = TrainerParts(
            member=MINE, policy=agreed, options=StepOptions(**{**usual, **own}),
            fragment_states=fragment_states, published=self.published, numerics=self.numerics,
            now_ns=lambda: self.now_ns, post=self.events.append, captured=self._captured,
            note=self._note, side=side,
        )  # fmt: skip
        self.trainer = Trainer(parts)
        self.barrier = CheckpointBarrier(
            self.trainer,
            post=self.events.append,
            note=lambda event: self.notes.append(pair(event)),
            now_ns=lambda: self.now_ns,
        )
        self.trainer.calendar = Calendar(replace(schedule_of(agreed), polls=polls))
        self.trainer.states.give = lambda *given: self.given.append(given)

    def replace_parts(self, **parts: Any) -> None:
        """Other parts of the trainer."""
        self.trainer.parts = replace(self.trainer.parts, **parts)

    def _captured(self, offer: OpenOffer) -> None:
        self.offers.append(offer)
        self.events.append(offer.captured)

    def _note(self, event: LoggedEvent) -> None:
        self.notes.append(pair(event))
        if isinstance(event, FragmentCaptured):  # the training thread has done its share
            self.encode()

    def encode(self) -> None:
        """The worker is fast: the snapshot is a delta, its payload is made, or all ranks have heard
        that there can be none."""
        offer = self.offers[-1]
        if offer.landed is not None:
            offer.landed()
        try:
            codec = CLOSING if offer.closing else None
            given = offer.delta_N, offer.residual_N, offer.anchor.values
            made = offer.encoding() if offer.encoding else self.numerics.encode(*given, codec)
        except NonFinite:
            self.published.discard(offer.fragment, offer.seq)
        else:
            offer.remainder.set_result(Remainder(made.pend, made.sent))

    # -------------------------------------------------------------- the training script

    def step(self, count: int = 1, tokens: int = TOKENS, move: float = MOVE) -> None:
        for _ in range(count):
            self.update(move)
            self.counted(tokens)

    def step_and_give(self, count: int = 1) -> None:
        """And begin the next step, before which a donor copies its state."""
        self.step(count)
        self.trainer.give_state()

    def update(self, move: float) -> None:
        """The inner optimizer."""
        with torch.no_grad():
            for parameter in self.model:
                parameter.add_(move)

    def counted(self, tokens: int = TOKENS) -> None:
        """What its hook does behind it."""
        if self.trainer.stepped(tokens):
            self.run(self.trainer.work())

    def run(self, doing: Requests) -> None:
        """Until it returns or raises. `asked` is what it asked for on the way."""
        self.asked = []
        drive(doing, self._answer)

    def _answer(self, request: Request) -> object:
        self.asked.append(request)
        assert len(self.asked) < 1000, "it waits for ever"
        if isinstance(request, AgreeMin):
            return [
                min(pair) for pair in zip(request.values, self.agree(request.values), strict=True)
            ]
        if isinstance(request, BroadcastBytes):
            return None
        if isinstance(request, GatherSlices):
            return torch.cat([request.slice_N] * self.ranks)
        if not request.ready():
            self.during()
        if not request.ready() and self.published.failure is None:
            self.now_ns += request.limit_ns + 1
        return request.ready()

    @property
    def waits(self) -> list[int]:
        """Limits of the waits of the last call."""
        return [request.limit_ns for request in self.asked if isinstance(request, Wait)]

    @property
    def agreements(self) -> list[list[int]]:
        return [request.values for request in self.asked if isinstance(request, AgreeMin)]

    def opened(self, *versions: int) -> None:
        """Of each fragment that of an open round, or -1."""
        self.published.heard(
            NewestOrders((0, 1), (), (0,) * len(versions), dict(enumerate(versions)))
        )

    # -------------------------------------------------------------- the log

    def decide(
        self, to: float = 0.0, fragment: int = 0, *, names: bool = False, drops: bool = False,
        publish: bool = True,
    ) -> Anchor:  # fmt: skip
        """The next version, all of whose elements are `to`. `names`, `drops`: the own offer."""
        state, known = self.trainer.fragment_states[fragment], self.published.fragments[fragment]
        version, mine = known.decided + 1, state.offer
        assert mine is not None or not (names or drops)
        members = [MergeMember(THEIRS, version, version - 1, 4, TOKENS, 1)]
        if names and mine is not None:
            members.insert(
                0,
                MergeMember(MINE, mine.seq, mine.anchor.version, mine.capture_step, mine.tokens, 1),
            )
        dropped = (Ended(MINE, mine.seq),) if drops and mine is not None else ()
        numel = state.owned.numel
        anchor = self.numerics.adopt(torch.full((numel,), to), numel, version)
        self.published.on_decided(
            Commit(
                fragment, version, tuple(members), dropped, (anchor.digest,) * self.ranks, "all-in"
            )
        )
        if publish:
            self.published.publish(fragment, anchor)
        return anchor

    # -------------------------------------------------------------- what is seen

    def theta(self, fragment: int = 0) -> float:
        """The one number that the fragment's parameters all are."""
        values: Tensor = self.model[fragment].detach()
        assert bool((values == values[0]).all()), values
        return float(values[0])

    def fragment_state(self, fragment: int = 0) -> FragmentState:
        return self.trainer.fragment_states[fragment]

    def posted(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def noted(self, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
        return [note for note in self.notes if note[0] in kinds]
