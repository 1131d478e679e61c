"""A rank that hosts several parts, without its parts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from mend.engine.rank_of_parts import RankOfParts
from mend.errors import MendError


def test_freed_model_ends_every_part_and_each_says_why() -> None:
    """Only the first part left: the threads of the others ran on."""
    failures: list[str] = []
    aborted: list[int] = []

    def part(number: int) -> Any:
        def fail(error: MendError) -> None:
            failures.append(str(error))

        published = SimpleNamespace(fail=fail)
        return SimpleNamespace(published=published, abort=lambda: aborted.append(number))

    rank = RankOfParts.__new__(RankOfParts)
    parts: Any = [part(0), part(1)]
    nothing: Any = SimpleNamespace(end=lambda _: None, close=lambda: None)
    rank.parts, rank._executors, rank.of_ranks = parts, [], nothing
    rank._meeting, rank._ending = nothing, threading.RLock()
    rank.abort_freed()
    assert aborted == [1, 0]
    assert len(failures) == 2
    assert all("freed" in failure for failure in failures)
