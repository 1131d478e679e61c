"""The records that a script passes to a round and gets from it. mend itself merges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from mend.compat.absent import absent

__all__ = ["LearnerFragment", "MergeResult"]


@dataclass
class LearnerFragment:
    """What a fragment provider would return. mend does not call it."""

    learner_id: str
    round_id: int
    params_delta: list[Tensor]
    tokens_consumed: int
    arrival_time_s: float = 0.0


@dataclass
class MergeResult:
    """A merge of one of mend's fragments, as `Runtime.outer_step_collect` reports it."""

    round_id: int
    """The round number of outer_step_begin."""
    merged_delta: list[Tensor]
    """Empty: mend applies the merge itself. If the script added it again, it would count twice."""
    learners_merged: list[str]
    learners_excluded: list[str]
    """Empty: mend leaves slow racks out of a round by the grace window; see learners_absent."""
    elapsed_grace_ms: float
    """NaN: mend does not report it here. `mend report` has the waits of each round."""
    reason: str
    """As `status().closed_by`."""
    learners_absent: list[str] = field(default_factory=list)
    roster_fallback: bool = False


def __getattr__(name: str) -> NoReturn:
    """Its merges and its synchronization are done by mend."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise absent(f"{__name__}.{name}", "reducer")
