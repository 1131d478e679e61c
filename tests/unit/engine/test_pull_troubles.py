"""One line when nothing comes over a lane any more, and one when it does again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mend.engine.io.pull_troubles import FAILURES, SECONDS, PullTroubles
from mend.errors import ChecksumMismatch, PayloadGone, PeerUnreachable, TransferStalled
from mend.events.kinds import PULLS_PAGE
from mend.types import Address
from tests.noted import pair

OWNER, OTHER = Address("hostB", 22000), Address("hostC", 22000)
CLOSED = PeerUnreachable("hostB:22000: timed out")

Pull = Callable[..., list[tuple[str, dict[str, object]]]]


@pytest.fixture
def pull() -> Pull:
    """A pull that ends; returns the events so far."""
    notes: list[tuple[str, dict[str, object]]] = []
    troubles = PullTroubles(lambda event: notes.append(pair(event)))

    def ends(
        at_s: float, error: Exception | None = CLOSED, *holders: Address
    ) -> list[tuple[str, dict[str, object]]]:
        troubles.ended(holders or (OWNER,), error, at_s)
        return notes

    return ends


def test_a_lane_that_gives_nothing_is_named_once_until_it_works(pull: Pull) -> None:
    for at_s in (0.0, 3.0):
        assert pull(at_s, TransferStalled("no verified byte")) == []
    ((kind, fields),) = pull(SECONDS)
    assert (kind, fields["from"], fields["failures"]) == ("pulls-fail", "hostB:22000", FAILURES)
    assert "timed out" in str(fields["error"]), "the newest reason"
    assert len(pull(60.0)) == 1
    assert pull(61.0, None)[1:] == [("pulls-work", {"from": "hostB:22000"})]
    assert len(pull(62.0, None)) == 2


def test_holder_that_failed_to_the_end_is_described_with_the_remedy() -> None:
    """NotMerged said why the work was not merged without the cause that had been warned of."""
    troubles = PullTroubles(lambda event: None)
    for at_s in (0.0, 3.0):
        troubles.ended((OWNER,), CLOSED, at_s)
    assert troubles.describe() == [], "it may be a rack that dies"
    troubles.ended((OWNER,), CLOSED, SECONDS)
    (told,) = troubles.describe()
    assert told == f"no pull from hostB:22000 succeeds ({CLOSED}): see {PULLS_PAGE}"
    troubles.ended((OWNER,), None, 60.0)
    assert troubles.describe() == []


def test_failures_within_seconds_are_not_reported(pull: Pull) -> None:
    """A rack that dies refuses connections at once, and is silent soon."""
    for number in range(10 * FAILURES):
        assert pull(number * SECONDS / (10 * FAILURES)) == []
    assert pull(SECONDS, None) == [], "what was not said is not taken back"


def test_two_failures_far_apart_are_no_line(pull: Pull) -> None:
    for number in range(FAILURES - 1):
        assert pull(100.0 * number) == []


@pytest.mark.parametrize("error", [PayloadGone("dropped"), ChecksumMismatch("one bit")])
def test_error_answered_by_a_holder_is_not_reported_as_a_path_problem(
    pull: Pull, error: Exception
) -> None:
    for number in range(2 * FAILURES):
        assert pull(10.0 * number, error) == []


def test_each_holder_is_counted_for_itself(pull: Pull) -> None:
    for number in range(FAILURES):
        pull(10.0 * number, CLOSED, OWNER, OTHER)
    assert [fields["from"] for _, fields in pull(99.0)] == ["hostB:22000", "hostC:22000"]
    assert [kind for kind, _ in pull(100.0, None, OTHER)][2:] == ["pulls-work"]
