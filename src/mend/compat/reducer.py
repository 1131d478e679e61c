"""The records that a script hands to a round and gets from it. mend itself merges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from mend.compat.absent import absent

__all__ = ["LearnerFragment", "MergeResult"]


@dataclass
class LearnerFragment:
    """What a fragment provider would deliver, which mend does not call."""

    learner_id: str
    round_id: int
    params_delta: list[Tensor]
    tokens_consumed: int
    arrival_time_s: float = 0.0


@dataclass
class MergeResult:
    """A merge of one of mend's fragments, as `Runtime.outer_step_collect` reports it."""

    round_id: int
    """That of outer_step_begin."""
    merged_delta: list[Tensor]
    """Empty: mend applies the merge itself, and a script that added it again would double it."""
    learners_merged: list[str]
    learners_excluded: list[str]
    """Empty: mend leaves a slow rack out of a round by the grace window, see learners_absent."""
    elapsed_grace_ms: float
    """NaN: mend does not say it. `mend report` has the waits of each round."""
    reason: str
    """As `status().closed_by`."""
    learners_absent: list[str] = field(default_factory=list)
    roster_fallback: bool = False


def __getattr__(name: str) -> NoReturn:
    """Its merges and its syncer are what mend does itself."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise absent(f"{__name__}.{name}", "reducer")
