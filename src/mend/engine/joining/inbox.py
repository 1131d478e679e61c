"""What the loop publishes to the training thread about training state that travels between
racks."""

from __future__ import annotations

from torch import Tensor

from mend.engine.joining.training_state import Mirror, Mirrored, ReceivedState, StateUnavailable
from mend.engine.state.published_state import PublishedSlice, PublishedState
from mend.types import Member


class StateInbox(PublishedSlice):
    """Copies of the training state: those that this rank makes, and the one that it receives."""

    def __init__(self, published: PublishedState) -> None:
        super().__init__(published)
        self.room_B: Tensor | None = None
        """Memory for a copy of the training state, with every page touched."""
        self.asked: tuple[Member, ...] = ()
        """Joining racks that wait for a copy of this rack's training state."""
        self.given: set[Member] = set()
        """Those whose copy was made or refused; the loop removes a rack when it frees the copy."""
        self.copied: ReceivedState | StateUnavailable | None = None
        """A donor's copy for this rack, or the reason why there is none."""
        self.pulling = False
        """Whether the copy is being transferred."""

    def receive(self, found: ReceivedState | StateUnavailable) -> None:
        """Publish a donor's training state, or the reason why there is none."""
        with self.changed:
            self.copied, self.pulling = found, False
            self.changed.notify_all()

    def ask(self, racks: tuple[Member, ...]) -> None:
        """Publish the joining racks that wait for a copy of this rank's training state."""
        with self.changed:
            self.asked = racks

    def make_room(self, room_B: Tensor) -> None:
        """Publish memory for a copy of the training state."""
        with self.changed:
            self.room_B = room_B

    def free(self, to: Member) -> None:
        """Forget the copy for this rack; it is made again if the rack asks again."""
        with self.changed:
            self.given.discard(to)


class MirrorInbox(PublishedSlice):
    """Mirrors of this rack's state of scope rack, for a rack that returns."""

    def __init__(self, published: PublishedState) -> None:
        super().__init__(published)
        self.mirrors: tuple[Mirror, ...] = ()
        """Mirrors of this rack that other racks have listed so far."""
        self.unheard: tuple[int, ...] = ()
        """Racks that were asked for mirrors and have not answered, or cannot."""
        self.sought = False
        """Whether all answers have arrived."""
        self.wanted: Mirror | None = None
        """The mirror that this rank fetches."""
        self.mirrored: Mirrored | str | None = None
        """The wanted mirror with its bytes, or the reason why there is none."""
        self.kept_bytes = 0
        """Size of the mirrors kept for another rack; written by the loop alone."""

    def find(
        self, mirrors: tuple[Mirror, ...], unheard: tuple[int, ...] = (), *, complete: bool = True
    ) -> None:
        """Publish the answers so far of the racks that were asked for mirrors of this one."""
        with self.changed:
            self.mirrors, self.unheard, self.sought = mirrors, unheard, complete
            self.changed.notify_all()

    def want(self, mirror: Mirror) -> None:
        """Accept the bytes of this mirror from now on, and of no other. Call it before the fetch.
        Training thread."""
        with self.changed:
            self.wanted, self.mirrored = mirror, None

    def take_back(self, mirror: Mirror, found: Mirrored | str) -> None:
        """Publish a mirror's bytes, or the reason why there are none. A mirror that is no longer
        wanted is dropped: the ranks of this rack have agreed on another."""
        with self.changed:
            if mirror == self.wanted:
                self.mirrored = found
                self.changed.notify_all()
