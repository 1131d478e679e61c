"""Records how far training has come, for plots and measurements.

The training thread notes each step as one tuple; once a second the loop thread writes the newest
one as the event `progress`. A script adds its own values with `record`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from numbers import Real

from mend.engine.compute.agreement import Agreement
from mend.errors import UsageError
from mend.events.base import Emit
from mend.events.kinds import Progress, RacksApart, ValuesRecorded
from mend.status.wall_clock import wall_ns
from mend.types import MS

PERIOD_S = 1.0
VALUES_MAX = 64
"""Maximum number of values in one `record`."""


class TrainingProgress:
    """The progress of one rank. `note`: takes events. `traffic`: returns bytes (sent, received).
    `agreement`: returns how far the racks agreed in its merges. `warns`: whether it warns of racks
    that undo each other's steps."""

    def __init__(
        self,
        note: Emit,
        traffic: Callable[[], tuple[int, int]],
        agreement: Callable[[], Agreement] = Agreement,
        *,
        warns: bool = True,
    ) -> None:
        self._note, self._traffic, self._agreement = note, traffic, agreement
        self.latest = (0, 0, wall_ns(), 0)
        """(step, tokens, wall ns of the step's end, ns stalled until then), noted together."""
        self.recorded: dict[str, float | str] = {}
        """The values of the last `record`."""
        self._stepped = self._ended = self._warned = False
        self._warns = warns

    # -------------------------------------------------------------- training thread

    def begin(self, step: int, tokens: int) -> None:
        """mend_init is over. Values recorded before the next step then belong to this moment, not
        to one before the wait for the other racks, and to the step that the rack resumes or joins
        at."""
        self.latest = (step, tokens, wall_ns(), 0)

    def stepped(self, step: int, tokens: int, stall_ns: int) -> None:
        """`step` is over, with all work of mend after it. The first step starts the clock."""
        self.latest, self._stepped = (step, tokens, wall_ns(), stall_ns), True
        if step == 1:
            self.write()

    def record(self, values: Mapping[str, float]) -> None:
        """Write the event `recorded`. Raises UsageError for a value that is not a plain number.
        After the end it only warns, once: the script still has a model to save."""
        if self._ended:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "record() after mend_shutdown records nothing, as the files of the run are "
                    "closed. Call it before",
                    stacklevel=4,
                )
            return
        self.recorded = plain_values(values)
        step, tokens, at_ns, _ = self.latest
        self._note(ValuesRecorded(step, tokens, at_ns, self.recorded))

    # -------------------------------------------------------------- loop thread

    def write(self, *, last: bool = False) -> None:
        """Write the event `progress`, once there is a first step."""
        if not self._stepped:
            return
        step, tokens, at_ns, stall_ns = self.latest
        (sent, received), seen = self._traffic(), self._agreement()
        of_merges = seen.merges, seen.cosine
        self._note(Progress(step, tokens, at_ns, stall_ns / MS, sent, received, last, *of_merges))
        if self._warns and seen.apart and seen.cosine is not None:
            self._warns = False
            self._note(RacksApart(seen.compared, seen.cosine))

    def end(self) -> None:
        """Write the last event `progress`; idempotent. Call it after the loop has stopped."""
        if not self._ended:
            self._ended = True
            self.write(last=True)


def plain_values(values: Mapping[str, float]) -> dict[str, float | str]:
    """The values as `ValuesRecorded` has them. Raises UsageError for a value that is not a plain
    number."""
    if len(values) > VALUES_MAX:
        raise UsageError(f"record() of {len(values)} values; at most {VALUES_MAX} at once")
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: object) -> float | str:
    """A float with all its bits. JSON has no NaN and no infinity: those become the words that
    `float()` reads."""
    if not isinstance(value, Real):
        raise UsageError(
            f"record({name}={type(value).__name__}): give a plain number, such as {name}.item(); "
            "that waits for the GPU, so call it only as often as you need"
        )
    number = float(value)
    return number if math.isfinite(number) else str(number)
