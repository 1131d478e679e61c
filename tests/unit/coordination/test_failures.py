"""The strings for errors are part of the protocol: ranks of one rack may run two releases."""

from __future__ import annotations

import pytest

from mend import errors
from mend.coordination.failures import ERRORS, OF_REFUSALS, error_of

PINNED = {
    "CheckpointError": errors.CheckpointError,
    "JobLost": errors.JobLost,
    "PlanMismatch": errors.PlanMismatch,
    "Refused": errors.Refused,
    "StartTimeout": errors.StartTimeout,
    "UsageError": errors.UsageError,
}


def test_strings_of_errors_are_pinned() -> None:
    assert ERRORS == PINNED
    assert OF_REFUSALS == {"plan": "PlanMismatch", "resume": "CheckpointError", "lost": "JobLost"}


@pytest.mark.parametrize("kind", PINNED)
def test_every_string_makes_its_error_with_the_detail(kind: str) -> None:
    error = error_of(kind, "rack 3")
    assert (type(error), str(error)) == (PINNED[kind], "rack 3")


def test_unknown_string_is_an_error_that_shows_it() -> None:
    error = error_of("InvariantError", "rack 3")
    assert (type(error), str(error)) == (errors.MendError, "InvariantError: rack 3")
