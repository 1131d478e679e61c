"""The dependencies of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mend.consensus.records import Policy
from mend.coordination.events import Event
from mend.engine.compute.numerics import Numerics
from mend.engine.joining.training_state import StateRoutes
from mend.engine.state.fragment_state import FragmentState, OpenOffer, RankProgress, StepOptions
from mend.engine.state.published_state import PublishedState
from mend.engine.state.trainer_feature import TrainerFeature
from mend.events.base import Emit
from mend.fragment.device import Side
from mend.transport.growth import Growth
from mend.types import Member

NO_ROUTES = StateRoutes()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """What the trainer of one rank is made from. All calls but `before_capture` return at once."""

    member: Member
    policy: Policy
    options: StepOptions
    fragment_states: list[FragmentState]
    """All fragments, those of weights first."""
    published: PublishedState
    numerics: Numerics
    """Has the buffers and the worker pool."""
    now_ns: Callable[[], int]
    post: Callable[[Event], None]
    """Gives an event to the loop."""
    captured: Callable[[OpenOffer], None]
    """Gives a capture to the loop, which has it encoded and offered."""
    note: Emit
    grows: Callable[[OpenOffer, Tensor], Growth] = lambda *_: Growth()
    """Serves an offer while this thread encodes it."""
    side: Side | None = None
    """Set where the model is on a GPU."""
    routes: StateRoutes = NO_ROUTES
    """How the training state reaches racks that join."""
    before_capture: Callable[[], None] = lambda: None
    """Called before the captures of a step; may raise."""
    troubles: Callable[[], list[str]] = list
    """Returns the lanes over which no pull succeeds, in words."""
    resumed: tuple[RankProgress, Sequence[OpenOffer]] | None = None
    """The checkpoint to go on from; the fragments have its anchors and residuals."""
    compares: bool = False
    """Whether to note how far the script's weights were from those that the job begins with."""
    started_ns: int | None = None
    """When the process was started; None: now."""
    features: Sequence[TrainerFeature] = ()
    """Further features, besides `StateExchange` and `Ladder`, which every trainer has."""
