"""One tree of exceptions. Every message names what was wrong, the value, and the remedy."""

from __future__ import annotations

import errno
from typing import TypeVar

T = TypeVar("T")


class MendError(Exception):
    """Root of everything mend raises on purpose."""


class InvariantError(MendError, AssertionError):
    """mend has broken a rule of its own, which is a bug. This rack stops and publishes nothing
    more; the others go on. `broken`: the rule; `state`: what a report of the bug needs."""

    def __init__(self, broken: str, state: dict[str, object]) -> None:
        self.broken, self.state = broken, state
        about = ", ".join(f"{name}={value!r}" for name, value in state.items())
        super().__init__(
            f"{broken}{f' ({about})' if about else ''}. This is a bug of mend: report it with the "
            "tape and the events of this rack (diagnostics_dir)"
        )


def ensure(holds: object, broken: str, **state: object) -> None:
    """Raise InvariantError unless `holds`; unlike an assert also under `python -O`."""
    if not holds:
        raise InvariantError(broken, state)


def require(value: T | None, broken: str, **state: object) -> T:
    """`value`, which cannot be None here. Raises InvariantError if it is."""
    if value is None:
        raise InvariantError(broken, state)
    return value


class ConfigError(MendError, ValueError):
    """A setting cannot be used. Says the field, the value, the rule and the remedy."""

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy
        written = getattr(type(value), "__fspath__", None)  # of a path: as the user wrote it
        try:
            text = repr(value if written is None else written(value))
        except ValueError:  # an integer beyond sys.get_int_max_str_digits()
            text = "a number of too many digits"
        super().__init__(f"{field}={text}: {rule}. {remedy}")


class UsageError(MendError, RuntimeError):
    """The API was called in an order or a place that cannot work."""


class PlanMismatch(MendError):
    """Two racks would not train the same model in the same way; the first difference is named."""


class Refused(MendError):
    """The coordinator refused this rack (another job, version, plan, or a second rack of that
    number)."""


class StartTimeout(MendError):
    """Not every rack said hello within start_timeout_s."""


class JobLost(MendError):
    """The last rack that held the running job's weights died before this rack had copied them."""


class GaveUp(MendError):
    """A wait that was allowed to be long (lockstep, drain, blocking) passed its last limit."""


class NonFinite(MendError):
    """A rack's own delta holds NaN, Inf or a magnitude that fp32 cannot square; it is refused at
    its own rack."""


class Unmergeable(MendError):
    """A merge would give NaN or Inf. `positions`: the members whose payloads are to blame."""

    def __init__(self, text: str, positions: tuple[int, ...]) -> None:
        self.positions = positions
        super().__init__(text)


class Diverged(MendError):
    """This rack's weights hold NaN, Inf or absurd numbers; the others go on without it."""


EVICTED_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: the process should be started again."""


class LeftJob(SystemExit):
    """This rack has left the job in order before its script ended. Not a MendError, so that the
    `except Exception` of a training loop does not swallow it."""


class Evicted(LeftJob):
    """This rack was slow, and was put out of the job to be started again; all its work is merged.
    Uncaught it ends the process with EVICTED_EXIT."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = EVICTED_EXIT


class SeatLost(Evicted):
    """The other racks went on without this one, which was silent for longer than seat_timeout_s,
    or a person has retired it, or another process has taken its place. What it had not merged
    is lost. Uncaught it ends the process with EVICTED_EXIT: started again, the rack joins."""


class NotMerged(MendError):
    """A session ended with work of this rack that no other rack has; the model holds it."""


class CheckpointError(MendError):
    """A checkpoint cannot be written, or not be resumed from: incomplete, damaged, of another
    model, plan or lineage, or the racks do not have the same one."""


class CertificateError(MendError):
    """A certificate of `mend repro` cannot be read, was edited, or was not signed by the key that
    was asked for."""


class StateRefused(UsageError):
    """An optimizer or a registered object holds a value that cannot travel to another rack or into
    a checkpoint, or one of another shape than here. Named by its place."""


class WireError(MendError):
    """A frame from the network is not a message of this protocol."""


class OtherVersion(WireError):
    """A frame of a mend that speaks another version of the wire format."""

    def __init__(self, theirs: int, ours: int, job: str, rack: int, address: str) -> None:
        self.job, self.rack, self.address = job, rack, address
        who = "the witness" if rack == 0xFFFF else f"rack {rack}"
        super().__init__(
            f"{who} speaks wire version {theirs}, this is version {ours}; run the same mend on all "
            "racks and the witness"
        )


class OtherJob(WireError):
    """A frame of another job. `address`: where its sender is to be answered, if it asks to join."""

    def __init__(self, theirs: str, ours: str, rack: int, address: str) -> None:
        self.job, self.rack, self.address = theirs[:64], rack, address
        who = "the witness" if rack == 0xFFFF else f"rack {rack}"
        super().__init__(
            f"{who} is of job {self.job!r}, this is job {ours!r}; set one job_id (MEND_JOB_ID) on "
            "all racks and the witness"
        )


class TransportError(MendError):
    """Root of what a socket may do to us."""


class AddressInUse(TransportError):
    """A port that must be bound is taken. `ports`: each of them would do, and is. `lane`: of the
    data ports."""

    def __init__(self, text: str, ports: tuple[int, ...] = (), *, lane: bool = False) -> None:
        self.ports, self.lane = ports, lane
        super().__init__(text)


class PeerUnreachable(TransportError):
    """No connection to a holder."""


class PayloadGone(TransportError):
    """The holder no longer (or not yet) serves this key."""


class TransferStalled(TransportError):
    """No verified byte arrived within the stall time-out, on any holder."""


class ChecksumMismatch(TransportError):
    """A chunk or a whole payload arrived with other bytes than were sent."""


class WorkerFailed(MendError):
    """A background job raised; the cause is chained."""


class LinkError(MendError, RuntimeError):
    """A shaped link cannot be made on this machine, or is not what was asked for."""


class EventError(MendError):
    """A line of an events file is no event, or of a kind that is not known here, or has other
    fields than events of this kind."""


class TapeError(MendError):
    """A tape cannot be read or replayed: no tape, damaged, of another format, or incomplete."""


class ReplayDiffers(MendError):
    """A replay differs from its tape."""


class NotDeterministic(MendError, RuntimeError):
    """Equal bits were asked for, and something that is in use cannot keep them."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what}; {remedy}")


def diagnostics_remedy(error: Exception) -> str:
    """For files of `diagnostics_dir` that cannot be written."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    return "set diagnostics_dir to a folder that this process may make and write"
