"""How far training has come, for plots and measurements.

The training thread notes each step as one tuple; the loop thread writes the newest one down as the
event `progress` once a second. What the script wants beside it, it gives to `record`.
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
"""Most values of one `record`."""


class TrainingProgress:
    """One rank's. `note` is the recorder's; `traffic` says what was (sent, received), in bytes;
    `agreement` says what its merges were like; `warns` of racks that point apart."""

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
        """What `record` was given last."""
        self._stepped = self._ended = self._warned = False
        self._warns = warns

    # -------------------------------------------------------------- training thread

    def begin(self, step: int, tokens: int) -> None:
        """mend_init is over: what is recorded before the next step is of now, not of a time before
        the wait for the other racks, and of the step that the rack resumes or joins at."""
        self.latest = (step, tokens, wall_ns(), 0)

    def stepped(self, step: int, tokens: int, stall_ns: int) -> None:
        """`step` is over, with all work of mend after it. The first step starts the clock."""
        self.latest, self._stepped = (step, tokens, wall_ns(), stall_ns), True
        if step == 1:
            self.write()

    def record(self, values: Mapping[str, float]) -> None:
        """The event `recorded`. Raises UsageError for what is no plain number. After the end it
        warns once, as the script has a model to save."""
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
        """The event `progress`, from the first step on."""
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
        """Write the last one; idempotent. After the loop has stopped."""
        if not self._ended:
            self._ended = True
            self.write(last=True)


def plain_values(values: Mapping[str, float]) -> dict[str, float | str]:
    """As `ValuesRecorded` has them. Raises UsageError for what is no plain number."""
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
