"""What the training thread keeps of each fragment, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from mend.engine.numerics import Anchor, Numerics
from mend.engine.offers import Encoded
from mend.fragment.apply import Alignment
from mend.fragment.device import Landed
from mend.fragment.model_plan import Cut, ModelPlan
from mend.fragment.moments import MomentsView
from mend.fragment.shards import Holding
from mend.fragment.view import FragmentView
from mend.types import Owned

T = TypeVar("T")


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
    """Answered with all that this rank holds of a fragment: its slice and those of its
    replicas."""

    fragment: int
    slice_N: Tensor
    holding: Holding


@dataclass(frozen=True, slots=True)
class Spread:
    """Answered when `data_B` (bytes, of one size on all ranks of the rack) holds those of the
    first rank."""

    data_B: Tensor


Request = Wait | AgreeMin | Share | Spread
Doing = Generator[Request, Any, None]


def drive(doing: Generator[Request, Any, T], answer: Callable[[Request], object]) -> T:
    """Run a generator to its end on this thread and return its value. `answer` answers what it
    yields."""
    reply: object = None
    while True:
        try:
            request = doing.send(reply)
        except StopIteration as end:
            value: T = end.value
            return value
        reply = answer(request)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a rack decides for itself of its steps; the rest is in the `Policy`."""

    overlapped: bool
    alignment: Alignment
    blend_alpha: float
    give_up_ns: int
    shutdown_ns: int


@dataclass
class OpenOffer:
    """An own contribution until the log ends it.

    `delta_N` begins as the snapshot; a worker turns it into the delta, or the GPU, where it then
    lies with what is pending.
    """

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
    sent_N: Tensor | None = None
    """With feedback in the weights: what the others decode, if that is not the delta."""
    closing: bool = False
    """The last one of its fragment. With feedback in the weights it goes as fp32."""
    landed: Landed | None = None
    """To be called before `delta_N` is read: the snapshot may still be on its way from a GPU."""
    encoding: Callable[[], Encoded] | None = None
    """Waits for the GPU that encodes it; None: a worker is to do so. Raises NonFinite."""
    encoded: bool = False
    """Whether `delta_N` is the delta by now."""
    declined: str = ""
    """Why it is none that can be offered."""

    @property
    def merged_N(self) -> Tensor:
        """What the rack's own weights give up once a commit names it: the delta, or with feedback
        in the weights only what the others have decoded."""
        return self.delta_N if self.sent_N is None else self.sent_N


@dataclass
class FragmentState:
    """One fragment for the training thread: the anchor it trains on, its marks, its open offer."""

    view: FragmentView
    holding: Holding
    anchor: Anchor
    seq: int = 0
    tokens_mark: int = 0
    steps_mark: int = 0
    offer: OpenOffer | None = None
    residual_N: Tensor | None = None

    @property
    def owned(self) -> Owned:
        """What the vectors of this fragment hold."""
        return self.holding.owned

    @property
    def moments(self) -> MomentsView | None:
        """The view, of a fragment of moments; None: it is of weights."""
        return self.view if isinstance(self.view, MomentsView) else None

    @property
    def shared(self) -> bool:
        """Whether other ranks hold some of the same elements; then writing is collective."""
        return bool(self.holding.teams)

    def unweighed_steps(self, step: int, tokens: int) -> int:
        """Steps since the mark that counted no token: without a weight no offer can carry them."""
        return step - self.steps_mark if tokens == self.tokens_mark else 0


@dataclass
class Ledger:
    """Tokens of this rank, summed over fragments: merged, given up by alignment (open: derived)."""

    merged: int = 0
    discarded: int = 0
    missed: dict[str, int] = field(default_factory=dict)

    def miss(self, reason: str) -> None:
        self.missed[reason] = self.missed.get(reason, 0) + 1


@dataclass
class Life:
    """What a rank knows of its process's life."""

    started_ns: int
    ends: str = ""
    """Why its rack is evicted, once all its ranks have heard of it; empty: it is not."""
    stays: bool = False
    """It has tried to leave, and its work could not be merged."""
    writes: Callable[[], bool] = lambda: False
    """Whether this rank is writing a checkpoint. No rack could complete it without this one."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What only a round changes of where a rank stands."""

    versions: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...] = ()
    """Per fragment those of all rails, as decided; empty before the begin."""
    marked: int = 0
    """Tokens that no offer will count again, summed over fragments, as `merged`, `discarded`."""
    merged: int = 0
    discarded: int = 0
    missed: tuple[tuple[str, int], ...] = ()
    stall_ns_total: int = 0
    stall_ns_last: int = 0


Standing = tuple[int, int, Marks]
"""(step, tokens, marks), all of one moment. The training thread puts a new one in its place; any
thread may read it."""


def tracks_of(
    plan: ModelPlan, numerics: Numerics, holding_of: Callable[[Cut], Holding]
) -> list[FragmentState]:
    """By fragment. The anchor is version 0: what the model holds, and moments that are zero."""
    tracks = []
    for cut in plan.cuts:
        view, held = plan.view_of(cut), holding_of(cut)
        rules = numerics.of(moments=bool(cut.moments))
        read = Tensor.zero_ if cut.moments else partial(view.read, held.owned)
        tracks.append(FragmentState(view, held, rules.begun(read, held.owned)))
    return tracks


def unbroken_run(anchors: dict[int, Anchor], base: int) -> tuple[int, int]:
    """(newest, oldest) of the unbroken run of versions behind `base` that ends at the newest.

    (base, base) if there is none.
    """
    newest = max((version for version in anchors if version > base), default=base)
    oldest = newest
    while oldest - 1 > base and oldest - 1 in anchors:
        oldest -= 1
    return newest, oldest


# ------------------------------------------------------------------ in a checkpoint


class FragmentProgress(msgspec.Struct, frozen=True):
    """Of one fragment on one rank. `digest`: of anchor and outer state; `weights`: of the model's
    weights (xxh3 by blocks, sha256 over these)."""

    version: int
    rounds: int
    """Merged so far, in parts of `weights.WHOLE`."""
    digest: str
    seq: int
    tokens_mark: int
    steps_mark: int
    captured_step: int
    """Of the newest capture point; 0: there was none."""
    captured_version: int
    weights: str


class OfferProgress(msgspec.Struct, frozen=True):
    """An offer that was open."""

    fragment: int
    seq: int
    base: int
    capture_step: int
    tokens: int
    steps: int
    tokens_total: int
    steps_total: int


class Progress(msgspec.Struct, frozen=True):
    """Of one rank. Tokens of the ledger are summed over fragments."""

    step: int
    tokens: int
    merged: int
    discarded: int
    missed: tuple[tuple[str, int], ...]
    fragments: tuple[FragmentProgress, ...]
