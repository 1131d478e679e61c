"""The training thread's state per fragment, the requests that it yields, and its form in a
checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from torch import Tensor

from mend.codec import CLOSING
from mend.coordination.events import Captured
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.offers import EncodedOffer, Read
from mend.fragment.apply import ApplyMode
from mend.fragment.device import Landed
from mend.fragment.model_plan import ModelPlan, PlannedFragment
from mend.fragment.moments import MomentsView
from mend.fragment.running_statistics import StatisticsView
from mend.fragment.shards import Holding
from mend.fragment.view import FragmentView
from mend.transport.growth import Growth
from mend.types import MS, Owned

T = TypeVar("T")

POLL_NS = 50 * MS
"""How often a rank that waits looks again; what is published wakes it at once."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `ready()`, for at most `limit_ns`. The answer is whether it was ready."""

    ready: Callable[[], bool]
    limit_ns: int


@dataclass(frozen=True, slots=True)
class AgreeMin:
    """The answer is the element-wise minimum over the ranks of the rack."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class GatherSlices:
    """The answer is this rank's part of a fragment: its slice and those of its replicas."""

    fragment: int
    slice_N: Tensor
    holding: Holding


@dataclass(frozen=True, slots=True)
class BroadcastBytes:
    """Fill `data_B` (bytes, of one size on all ranks of the rack) with the first rank's bytes. The
    answer is None."""

    data_B: Tensor


Request = Wait | AgreeMin | GatherSlices | BroadcastBytes
Requests = Generator[Request, Any, None]


def agree(ranks: int, values: list[int]) -> Generator[Any, Any, list[int]]:
    """The element-wise minimum over the ranks of a rack of `ranks`."""
    return values if ranks == 1 else (yield AgreeMin(values))


class Resumable(Generic[T]):
    """A generator of the trainer that may be interrupted in a wait and run on later."""

    def __init__(self, requests: Generator[Request, Any, T]) -> None:
        self._requests = requests
        self._request: Request | None = None
        self._ended = False

    @property
    def waits(self) -> bool:
        """Whether `run` can go on: an exception has ended a wait, but not the generator."""
        return isinstance(self._request, Wait) and not self._ended

    def run(self, answer: Callable[[Request], object]) -> T:
        """Run the generator to its end on this thread and return its value. `answer` answers the
        requests that it yields."""
        while True:
            reply = answer(self._request) if self._request is not None else None
            self._ended = True  # until it yields a further request
            try:
                self._request = self._requests.send(reply)
            except StopIteration as end:
                value: T = end.value
                return value
            self._ended = False


def drive(requests: Generator[Request, Any, T], answer: Callable[[Request], object]) -> T:
    """Run a generator to its end on this thread and return its value. Close it on an exception of
    `answer`."""
    with contextlib.closing(requests):
        return Resumable(requests).run(answer)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of steps that a rack may choose for itself; the shared ones are in `Policy`."""

    overlapped: bool
    apply_mode: ApplyMode
    blend_alpha: float
    wait_timeout_ns: int
    shutdown_ns: int
    stall_ns: int
    """A wait for bytes that is past its limit ends once none has arrived for this long."""
    weighs: bool = True
    """Whether this trainer counts tokens. Of the parts of one rank only the first one does."""


class Remainder(NamedTuple):
    """What the encoding of an offer leaves: the residual once a commit names the offer (`pend_N`);
    with feedback in the weights, the decoded payload if it is not the delta (`sent_N`)."""

    pend_N: Tensor | None
    sent_N: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class OpenOffer:
    """An offer of this rank, from its capture until the log names or drops it.

    `delta_N` (fp32 N) begins as the snapshot. Who encodes the offer turns it into the delta. Where
    that is the GPU, the delta and the pending residual stay there.
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
    units_total: int = 0
    """Units of data that this rank had taken by then."""
    closing: bool = False
    """The last offer of its fragment. With feedback in the weights it is sent as fp32."""
    landed: Landed | None = None
    """Waits for the snapshot, which may still be copied from a GPU. Call it before reading
    `delta_N`."""
    encoding: Callable[[], EncodedOffer] | None = None
    """Waits for the offer that the GPU or the training thread encodes; None: a worker encodes it.
    Raises NonFinite."""
    saved: bool = False
    """Whether it is of a checkpoint, where `delta_N` is the delta from the beginning."""
    remainder: Future[Remainder] = field(default_factory=Future)
    """Set once, when the offer is encoded. Has a NonFinite if the offer is not sent."""

    @property
    def captured(self) -> Captured:
        """The event of its capture."""
        about = self.fragment, self.seq, self.anchor.version, self.capture_step
        return Captured(*about, self.tokens, self.steps, self.closing, self.units_total)

    def encode(
        self,
        numerics: Numerics,
        read: Read | None = None,
        grows: Callable[[Tensor], Growth] | None = None,
    ) -> EncodedOffer:
        """See Numerics.encode."""
        anchor_N = None if self.saved or numerics.of_values else self.anchor.values
        codec = CLOSING if self.closing and numerics.in_weights else self.anchor.codec
        return numerics.encode(self.delta_N, self.residual_N, anchor_N, codec, read, grows)

    @property
    def pend_N(self) -> Tensor | None:
        """See `Remainder`."""
        return self.remainder.result(0).pend_N

    @property
    def sent_N(self) -> Tensor | None:
        """See `Remainder`."""
        return self.remainder.result(0).sent_N

    @property
    def merged_N(self) -> Tensor:
        """The part of the rack's own weights that is merged once a commit names the offer: the
        delta, or with feedback in the weights the decoded payload."""
        return self.delta_N if self.sent_N is None else self.sent_N


@dataclass
class FragmentState:
    """One fragment on the training thread: its anchor, its open offer, and the marks
    (`tokens_mark`, `steps_mark`) up to which its tokens and steps are merged or given up."""

    view: FragmentView
    holding: Holding
    anchor: Anchor
    seq: int = 0
    tokens_mark: int = 0
    steps_mark: int = 0
    offer: OpenOffer | None = None
    residual_N: Tensor | None = None
    behind_until: int = 0
    """Step at which this rank last applied a version more than `staleness_max_rounds` newer that
    did not merge its offer: the steps from the mark to there were made while the others merged
    theirs."""
    late_steps: int = 0
    """Maximum number of such steps in a closing offer."""

    @property
    def owned(self) -> Owned:
        """The elements that this rank owns."""
        return self.holding.owned

    @property
    def moments(self) -> MomentsView | None:
        """The view of a fragment of moments or running statistics; None: it is of weights."""
        return self.view if isinstance(self.view, MomentsView) else None

    @property
    def in_model(self) -> bool:
        """Whether it is a part of the model, which begins and ends with the anchor: weights, or
        running statistics."""
        return self.moments is None or isinstance(self.view, StatisticsView)

    @property
    def shared(self) -> bool:
        """Whether other ranks hold some of the same elements. Then writing is collective."""
        return bool(self.holding.teams)

    def unweighed_steps(self, step: int, tokens: int) -> int:
        """Steps since the mark, if they counted no token: an offer of them would have no weight."""
        return step - self.steps_mark if tokens == self.tokens_mark else 0


@dataclass
class Ledger:
    """Tokens of this rank, summed over fragments: merged, and discarded by overwrite."""

    merged: int = 0
    discarded: int = 0
    missed: dict[str, int] = field(default_factory=dict)

    def miss(self, reason: str) -> None:
        self.missed[reason] = self.missed.get(reason, 0) + 1


class Unfinished(Protocol):
    """Work that another thread does; see `Life.writing`."""

    def done(self) -> bool: ...


@dataclass
class Life:
    """The life of a rank's process."""

    started_ns: int
    missed_first: bool = False
    """Whether a rank of this rack, which founded the job, has missed its first versions."""
    lost: bool = False
    """Whether all ranks know that their rack lost its seat while it trained."""
    writing: Unfinished | None = None
    """The newest checkpoint of this rank."""

    @property
    def writes(self) -> bool:
        """Whether this rank is writing a checkpoint, which no rack can complete without it."""
        return self.writing is not None and not self.writing.done()


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The part of a rank's progress that only rounds change; steps do not."""

    versions: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...] = ()
    """Per fragment the decided digests of all rails; empty before the job begins."""
    marked: int = 0
    """Tokens that no offer will count again, summed over fragments, like `merged`, `discarded`."""
    merged: int = 0
    discarded: int = 0
    missed: tuple[tuple[str, int], ...] = ()
    stall_ns_total: int = 0
    stall_ns_last: int = 0


Standing = tuple[int, int, RankPosition]
"""(step, tokens, position), all of one moment. The training thread replaces it; any thread may read
it."""


def tracks_of(
    plan: ModelPlan, numerics: Numerics, holding_of: Callable[[PlannedFragment], Holding]
) -> list[FragmentState]:
    """The fragments at version 0: the model's weights and running statistics, and moments of
    zero."""
    fragment_states, holdings = [], [holding_of(cut) for cut in plan.planned]
    numerics.expect([held.owned for held in holdings])
    for cut, held in zip(plan.planned, holdings, strict=True):
        view = plan.view_of(cut)
        rules = numerics.of(moments=cut.averaged)
        read = Tensor.zero_ if cut.moments else partial(view.read, held.owned)
        fragment_states.append(FragmentState(view, held, rules.begun(read, held.owned)))
    return fragment_states


def unbroken_run(anchors: dict[int, Anchor], base: int) -> tuple[int, int]:
    """(newest, oldest) version of the run without a gap that ends at the newest version after
    `base`; (base, base) if there is none after it."""
    newest = max((version for version in anchors if version > base), default=base)
    oldest = newest
    while oldest - 1 > base and oldest - 1 in anchors:
        oldest -= 1
    return newest, oldest


# ------------------------------------------------------------------ in a checkpoint


class FragmentProgress(msgspec.Struct, frozen=True):
    """One fragment on one rank. `digest`: of anchor and outer state; `weights`: of the model's
    weights (xxh3 by blocks, sha256 over these)."""

    version: int
    rounds: int
    """Rounds merged so far, in parts of `weights.WHOLE`."""
    digest: str
    seq: int
    tokens_mark: int
    steps_mark: int
    captured_step: int
    """Step of the newest capture point; 0: there was none."""
    captured_version: int
    weights: str


class OfferProgress(msgspec.Struct, frozen=True):
    """An open offer."""

    fragment: int
    seq: int
    base: int
    capture_step: int
    tokens: int
    steps: int
    tokens_total: int
    steps_total: int
    units_total: int = 0


class RankProgress(msgspec.Struct, frozen=True):
    """One rank. Tokens of the ledger are summed over fragments."""

    step: int
    tokens: int
    merged: int
    discarded: int
    missed: tuple[tuple[str, int], ...]
    fragments: tuple[FragmentProgress, ...]
    units: int = 0
    """Units of data taken."""
