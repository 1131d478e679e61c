"""state_giving: the copy of its training state that a rank gives to a rack that joins."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial

from torch import Tensor

from mend.consensus.records import TEXT_MAX
from mend.engine.digest import digest_of_state
from mend.engine.plain_data import Each
from mend.engine.training_state import LikeFirst, Replicas, TrainingState
from mend.errors import StateRefused

Given = Tensor | LikeFirst | str
"""A copy of the training state, or that another rank has the same one, or why there is none."""


class Lacks(IntEnum):
    """What a rank has yet to do for a rack that joins."""

    NOTHING = 0
    COPY = 1
    ROOM = 2
    """And memory for it has to be made ready first."""


def room_of(state: TrainingState, step: int) -> int:
    """Bytes of memory for a copy. 0: the script's own state_dict fails; the copy will say why."""
    try:
        return state.room(step)
    except Exception:
        return 0


def copy_state(
    state: TrainingState, step: int, replicas: Replicas | None, room_B: Tensor | None, each: Each
) -> Given:
    """Of `replicas` only the first makes the copy at once. The others digest what they have where
    it lies, and copy it only if it is not the same everywhere. `room_B`: memory for the copy."""
    take = partial(state.take, room_B=room_B, each=each)
    if replicas is None:
        return _or_why_not(lambda: take(step))
    found = _or_why_not(lambda: (take if replicas.first else state.digest)(step))
    digest = found.digest if isinstance(found, LikeFirst) else ""
    if isinstance(found, Tensor):
        digest = digest_of_state(found)
    if not replicas.alike(digest) and isinstance(found, LikeFirst):
        return _or_why_not(lambda: state.take(step))
    return found


def _or_why_not(take: Callable[[], Given]) -> Given:
    """Of what a script's own objects give."""
    try:
        return take()
    except StateRefused as error:
        return str(error)[:TEXT_MAX]
    except Exception as error:  # of the script's own state_dict; no memory for the copy
        return f"{type(error).__name__}: {error}"[:TEXT_MAX]
