"""Accepts only frames of this job that come from the sender that they name. Loop thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mend.coordination import wire
from mend.coordination.messages import Envelope, Hello, Patch, Prepare, Retire, StateMessage
from mend.engine.io.connection_owners import ConnectionOwners
from mend.errors import MendError, OtherJob, OtherVersion, WireError
from mend.events.base import Emit
from mend.events.kinds import FrameRefused, StrangersRefused
from mend.transport.origins import Origins
from mend.transport.zmq import Received
from mend.types import PERSON, READER_RACK, Member, Peer

REFUSED_NOTES_MAX = 20
"""Refused frames that are reported one by one; further ones are only counted."""


class FrameGate:
    """The gate of one process. `peers`: addresses of other processes in the settings; a process
    without a key may name only them. `stands(route)`: whether a connection is still there."""

    def __init__(
        self,
        job: str,
        peers: Iterable[str],
        *,
        stands: Callable[[bytes], bool],
        now_ns: Callable[[], int],
        note: Emit,
    ) -> None:
        self.refused = 0
        """Number of frames, and of addresses in them, that were refused."""
        self._job, self._now_ns, self._note = job, now_ns, note
        self._origins, self._owners = Origins(peers), ConnectionOwners(stands)
        self._strangers = 0
        """Handshakes with keys of other jobs that are noted already."""

    def opened(self, received: Received) -> Envelope:
        """Decode a frame of this job and check its sender. Raises WireError."""
        try:
            envelope = wire.decode(received.frame)
        except OtherVersion as error:
            _check_key(received.sender, error.rack, 0)
            raise
        rack, rank = envelope.rack, envelope.rank
        _check_key(received.sender, rack, rank)
        if envelope.job != self._job:
            at = envelope.body.seat.address if isinstance(envelope.body, Hello) else ""
            if received.sender is None and not self._origins.fits(at, received.host()):
                at = ""  # a sender without a key must not direct answers to a third machine
            raise OtherJob(envelope.job, self._job, rack, at)
        if isinstance(envelope.body, Retire) != (rack == PERSON):
            raise WireError(f"{type(envelope.body).__name__} of rack {rack}, which never says it")
        # Other messages (a refusal, a challenge) may come over a connection of their own.
        speaker, bare = Member(rack, envelope.incarnation), received.sender is None
        counted = bare and isinstance(envelope.body, StateMessage | Patch)
        if counted and not self._owners.admits(speaker, rank, received.route, self._now_ns()):
            raise WireError(f"rack {rack} rank {rank} speaks over two connections at once")
        address = _address_in(envelope.body)
        if bare and address and not self._origins.fits(address, received.host()):
            raise WireError(
                f"rack {rack} speaks from {received.host()} and is to be answered at {address!r}, "
                "which is another machine as far as can be seen. Give all racks and the witness a "
                "key (mend keys new FILE, MEND_KEY_FILE), or correct that rack's advertise_host"
            )
        return envelope

    def refuse(self, error: MendError) -> None:
        """Count a refused frame, and note the first ones. A process of another job is noted once,
        by `OtherJobs`."""
        self.refused += 1
        if self.refused <= REFUSED_NOTES_MAX and not isinstance(error, OtherJob):
            self._note(FrameRefused(str(error), self.refused))

    def note_strangers(self, count: int) -> None:
        """Note handshakes without the job's key, of a rack with another key or of an outsider.
        `count`: of all so far."""
        if count > self._strangers:
            self._strangers = count
            self._note(StrangersRefused(count))


def _address_in(body: object) -> str | None:
    """The address at which the sender wants to be answered."""
    match body:
        case Hello(seat=seat):
            return seat.address
        case Prepare(address=address):
            return address
        case _:
            return None


def _check_key(sender: Peer | None, rack: int, rank: int) -> None:
    """In a job with keys the connection proves the sender; raise WireError for a frame that names
    another one."""
    if sender is not None and sender.rack == READER_RACK:
        raise WireError("a message with a reader's key, which only reads")
    if sender is not None and sender != (rack, rank):
        owner = f"rack {sender.rack} rank {sender.rank}"
        raise WireError(f"a frame of rack {rack} rank {rank}, sent with the key of {owner}")
