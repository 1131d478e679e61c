"""The errors that end all ranks of a rack, and the strings that name them between processes."""

from __future__ import annotations

from mend.errors import (
    CheckpointError,
    JobLost,
    MendError,
    PlanMismatch,
    Refused,
    StartTimeout,
    UsageError,
)

JOB_LOST = "JobLost"
REFUSED = "Refused"
START_TIMEOUT = "StartTimeout"
UNEQUAL_RANKS = "UsageError"

ERRORS: dict[str, type[MendError]] = {
    "CheckpointError": CheckpointError,
    JOB_LOST: JobLost,
    "PlanMismatch": PlanMismatch,
    REFUSED: Refused,
    START_TIMEOUT: StartTimeout,
    UNEQUAL_RANKS: UsageError,
}
"""`Orders.failure[0]`, `Fail.kind` -> the error. A string stays if its class is renamed."""

OF_REFUSALS = {"plan": "PlanMismatch", "resume": "CheckpointError", "lost": JOB_LOST}
"""`Refusal.kind` -> the string of its error; for all others REFUSED."""


def error_of(kind: str, detail: str) -> MendError:
    """The error of this name. It may be unknown: it comes from another process."""
    known = ERRORS.get(kind)
    return known(detail) if known is not None else MendError(f"{kind}: {detail}")
