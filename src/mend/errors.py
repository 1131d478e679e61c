"""The exceptions of mend. Every message names what is wrong, the value, and the remedy."""

from __future__ import annotations

import errno
from typing import TypeVar

T = TypeVar("T")


class MendError(Exception):
    """Base of all exceptions that mend raises on purpose."""


class InvariantError(MendError, AssertionError):
    """mend has broken one of its own rules, which is a bug. This rack stops and publishes nothing
    more; the others continue. `broken`: the rule; `state`: values for a bug report."""

    def __init__(self, broken: str, state: dict[str, object]) -> None:
        self.broken, self.state = broken, state
        about = ", ".join(f"{name}={value!r}" for name, value in state.items())
        super().__init__(
            f"{broken}{f' ({about})' if about else ''}. This is a bug of mend: report it with the "
            "tape and the events of this rack (diagnostics_dir)"
        )


def ensure(holds: object, broken: str, **state: object) -> None:
    """Raise InvariantError unless `holds`. Unlike an assert, it also works under `python -O`."""
    if not holds:
        raise InvariantError(broken, state)


def require(value: T | None, broken: str, **state: object) -> T:
    """Return `value`, which cannot be None here. Raises InvariantError if it is."""
    if value is None:
        raise InvariantError(broken, state)
    return value


class ConfigError(MendError, ValueError):
    """A setting cannot be used. The message has the field, the value, the rule and the remedy."""

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy
        written = getattr(type(value), "__fspath__", None)  # of a path: as the user wrote it
        try:
            text = repr(value if written is None else written(value))
        except ValueError:  # an integer beyond sys.get_int_max_str_digits()
            text = "a number of too many digits"
        super().__init__(f"{field}={text}: {rule}. {remedy}")


class UsageError(MendError, RuntimeError):
    """The API was called in an order or from a place that cannot work."""


class PlanMismatch(MendError):
    """Two racks would not train the same model in the same way. The message names the first
    difference."""


class Refused(MendError):
    """The coordinator refused this rack (another job, version, plan, or a second rack of that
    number)."""


class StartTimeout(MendError):
    """Not every rack sent a hello within start_timeout_s."""


class JobLost(MendError):
    """The last rack that held the running job's weights died before this rack had copied them."""


class GaveUp(MendError):
    """A wait that may be long (lockstep, drain, blocking) exceeded its limit."""


class NonFinite(MendError):
    """A rack's own delta contains NaN, Inf or a magnitude that fp32 cannot square. The rack does
    not offer it."""


class Unmergeable(MendError):
    """A merge would result in NaN or Inf. `positions`: the members whose payloads are to blame."""

    def __init__(self, text: str, positions: tuple[int, ...]) -> None:
        self.positions = positions
        super().__init__(text)


class Diverged(MendError):
    """This rack's weights contain NaN, Inf or absurd numbers. The others continue without it."""


EVICTED_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: the process should be started again."""


class LeftJob(SystemExit):
    """This rack has left the job in an orderly way before the end of its script. It is not a
    MendError, so that the `except Exception` of a training loop does not catch it."""


class Evicted(LeftJob):
    """This rack was slow, and was evicted in order to be started again. All its work is merged.
    Uncaught, it ends the process with EVICTED_EXIT."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = EVICTED_EXIT


class SeatLost(Evicted):
    """The other racks continue without this one: it was silent for longer than seat_timeout_s, a
    person has retired it, or another process has taken its place. Its unmerged work is lost.
    Uncaught, it ends the process with EVICTED_EXIT. Started again, the rack joins."""


class NotMerged(MendError):
    """A session ended with work of this rack that no other rack has. The model contains it."""


class CheckpointError(MendError):
    """A checkpoint cannot be written or resumed: it is incomplete, damaged, of another model, plan
    or lineage, or the racks do not have the same one."""


class CertificateError(MendError):
    """A certificate of `mend repro` cannot be read, was edited, or was not signed with the
    requested key."""


class StateRefused(UsageError):
    """An optimizer or a registered object contains a value that cannot be sent to another rack or
    saved in a checkpoint, or whose shape differs from the one here. The message names its
    place."""


class WireError(MendError):
    """A frame from the network is not a valid message of this protocol."""


class OtherVersion(WireError):
    """A frame of another version of the wire format."""

    def __init__(self, theirs: int, ours: int, job: str, rack: int, address: str) -> None:
        self.job, self.rack, self.address = job, rack, address
        who = "the witness" if rack == 0xFFFF else f"rack {rack}"
        super().__init__(
            f"{who} speaks wire version {theirs}, this is version {ours}; run the same mend on all "
            "racks and the witness"
        )


class OtherJob(WireError):
    """A frame of another job. `address`: the address of its sender, if that asks to join."""

    def __init__(self, theirs: str, ours: str, rack: int, address: str) -> None:
        self.job, self.rack, self.address = theirs[:64], rack, address
        who = "the witness" if rack == 0xFFFF else f"rack {rack}"
        super().__init__(
            f"{who} is of job {self.job!r}, this is job {ours!r}; set one job_id (MEND_JOB_ID) on "
            "all racks and the witness"
        )


class TransportError(MendError):
    """Base of the errors of the transport."""


class AddressInUse(TransportError):
    """A port that must be bound is taken. `ports`: the possible ports, all of which are taken.
    `lane`: whether they are data ports."""

    def __init__(self, text: str, ports: tuple[int, ...] = (), *, lane: bool = False) -> None:
        self.ports, self.lane = ports, lane
        super().__init__(text)


class PeerUnreachable(TransportError):
    """A holder cannot be connected to."""


class PayloadGone(TransportError):
    """The holder does not serve this key any more, or not yet."""


class TransferStalled(TransportError):
    """No verified byte arrived within the stall time-out, from any holder."""


class ChecksumMismatch(TransportError):
    """A chunk or a whole payload arrived with other bytes than expected."""


class WorkerFailed(MendError):
    """A background job raised; the cause is chained."""


class LinkError(MendError, RuntimeError):
    """A shaped link cannot be made on this machine, or does not behave as requested."""


class EventError(MendError):
    """A line of an events file is not an event, is of an unknown kind, or has other fields than
    events of its kind."""


class TapeError(MendError):
    """A tape cannot be read or replayed: it is not a tape, damaged, of another format, or
    incomplete."""


class ReplayDiffers(MendError):
    """A replay differs from its tape."""


class NotDeterministic(MendError, RuntimeError):
    """Equal bits were requested, and something in use cannot guarantee them."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what}; {remedy}")


def format_error(error: BaseException | None) -> str:
    """The error in words; empty: there is none."""
    return f"{type(error).__name__}: {error}" if error is not None else ""


def diagnostics_remedy(error: Exception) -> str:
    """The remedy if files of `diagnostics_dir` cannot be written."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    return "set diagnostics_dir to a folder that this process may make and write"
