"""Measures how long a step of training takes, without the work and the waits of mend between two
steps. Training thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mend.types import MS

SAMPLE_NS_MIN = 50 * MS
"""A sample of the step time covers steps at least this long: the work for a sample, and its
place on the tape, are bounded however short the steps are."""


class StepClock:
    """The step times of one rank, by the clock `now_ns`; all in ns."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self.step_ns = 0
        """Time of a step, smoothed; 0: not known yet."""
        self.measured_step = 0
        """The step at which that was measured last."""
        self.begun_ns = 0
        """When the current step began; 0: not known."""
        self.batch = 0
        """Micro-batches per step that the script has announced since the last sample; 0: none."""
        self._since_ns = now_ns()
        self._sample_ns = self._sample_tokens = 0

    def stepped(self, tokens: int) -> tuple[int, int, int] | None:
        """A step is over. Returns (ns, tokens, micro-batches) of a sample once that is long
        enough; else None."""
        now_ns = self._now_ns()
        if self.begun_ns:
            self._sample_ns += now_ns - self.begun_ns
            self._sample_tokens += tokens
        self.begun_ns = now_ns
        if self._sample_ns < SAMPLE_NS_MIN:
            return None
        sample = self._sample_ns, self._sample_tokens, self.batch
        self._sample_ns = self._sample_tokens = self.batch = 0
        return sample

    def measure(self, step: int) -> None:
        """Take the steps since the last measurement into `step_ns`, for the adaptive grace
        window."""
        steps = step - self.measured_step
        if steps > 0:
            sample_ns = (self._now_ns() - self._since_ns) // steps
            before_ns = self.step_ns or sample_ns  # the first sample is taken as it is
            self.step_ns = before_ns + (sample_ns - before_ns) // 10
        self.measured_step = step

    def worked(self, step: int, begun_ns: int) -> None:
        """The work of mend after a step, which began at `begun_ns`, is over. Its time is left out
        of the next measurement, also where this step was not measured (a poll without news)."""
        now_ns = self._now_ns()
        self._since_ns = (
            now_ns if self.measured_step == step else self._since_ns + now_ns - begun_ns
        )
        self.begun_ns = now_ns

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time inside out of the step: a checkpoint of a minute makes no rack slow, and
        must not widen the grace windows after it."""
        begun_ns = self._now_ns()
        try:
            yield
        finally:
            self._since_ns += self._now_ns() - begun_ns
            self.begun_ns = self._now_ns() if self.begun_ns else 0
