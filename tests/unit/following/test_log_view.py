"""A follower reads the decided log in order, whichever process tells it."""

from __future__ import annotations

import pytest

from mend.errors import WireError
from mend.following.log_view import LogView
from mend.status.follow_messages import Follow
from tests.unit.status.seen import commit_seen, followed

ASKED = Follow("")


def test_each_commit_gives_one_version_in_order() -> None:
    log = LogView()
    (first,) = log.take(followed(ASKED))
    assert first.versions == (0, 0)
    news = (commit_seen(0, 1), commit_seen(1, 1), commit_seen(0, 2))
    found = log.take(followed(ASKED, index=4, commits=news, versions=(), digests=()))
    assert [each.versions for each in found] == [(1, 0), (1, 1), (2, 1)]
    assert [each.step for each in found] == [8, 8, 16]
    assert len({each.digest for each in (first, *found)}) == 4
    assert log.take(followed(ASKED, index=4, versions=(), digests=())) == []


def test_a_version_that_is_told_again_is_no_news() -> None:
    log = LogView()
    log.take(followed(ASKED))
    assert log.take(followed(ASKED)) == []


def test_commit_out_of_order_is_refused() -> None:
    log = LogView()
    log.take(followed(ASKED))
    with pytest.raises(WireError, match="out of order"):
        log.take(followed(ASKED, commits=(commit_seen(0, 2),), versions=(), digests=()))
    with pytest.raises(WireError, match="out of order"):
        log.take(followed(ASKED, commits=(commit_seen(9, 1),), versions=(), digests=()))


def test_older_lineage_is_taken_only_when_nobody_else_answers() -> None:
    """A rack that was cut off answers, too, and its log has ended."""
    log = LogView()
    log.take(followed(ASKED, index=5))
    other = followed(ASKED, lineage="bb" * 32, knows=False, index=9)
    assert not log.accepts(other, alone=False)
    assert log.accepts(other, alone=True)
    assert log.accepts(followed(ASKED, lineage="bb" * 32, knows=True, index=2), alone=False)
    assert not log.accepts(followed(ASKED, index=4), alone=False), "it lags behind"
    assert not log.accepts(followed(ASKED, lineage=""), alone=True), "it has not begun"


def test_new_lineage_may_go_back() -> None:
    log = LogView()
    log.take(followed(ASKED, versions=(3, 3)))
    (again,) = log.take(followed(ASKED, lineage="bb" * 32, versions=(3, 2)))
    assert again.versions == (3, 2)
