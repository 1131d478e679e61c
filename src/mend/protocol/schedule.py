"""protocol: which fragment is due after which step. Every rank knows it from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Schedule:
    """P fragments, each captured once per H steps, applied tau steps later.

    Steps count from 1. Fragment p is due after step s when s >= o_p and (s - o_p) mod H = 0, with
    o_p = floor((p + 1) H / P). Source: Streaming DiLoCo, 2501.18512.
    """

    fragments: int
    period_steps: int
    overlap_steps: int
    _due: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.fragments >= 1
        assert self.period_steps >= 1
        assert 0 <= self.overlap_steps < self.period_steps
        due: dict[int, list[int]] = {}
        for fragment in range(self.fragments):
            due.setdefault(self.offset(fragment) % self.period_steps, []).append(fragment)
        object.__setattr__(self, "_due", {step: tuple(found) for step, found in due.items()})

    def offset(self, fragment: int) -> int:
        """o_p: the first step after which the fragment is captured."""
        return (fragment + 1) * self.period_steps // self.fragments

    def captures(self, step: int) -> tuple[int, ...]:
        """Fragments captured after this step, ascending."""
        found = self._due.get(step % self.period_steps, ())
        return tuple(fragment for fragment in found if step >= self.offset(fragment))

    def ends(self, step: int) -> tuple[int, ...]:
        """Fragments whose own overlap ends at this step, ascending; non-empty = an apply point."""
        return self.captures(step - self.overlap_steps)

    def busy(self, step: int) -> bool:
        """Whether anything at all happens after this step; the training loop asks every time."""
        residue = step % self.period_steps
        return residue in self._due or (step - self.overlap_steps) % self.period_steps in self._due

    def last_capture(self, fragment: int, step: int) -> int:
        """The newest due step <= step; 0 when there was none yet."""
        offset = self.offset(fragment)
        if step < offset:
            return 0
        return step - (step - offset) % self.period_steps

    def gap_steps(self) -> int:
        """Steps between two rounds, of whatever fragments."""
        return gap_steps(self.fragments, self.period_steps)


def gap_steps(fragments: int, period_steps: int) -> int:
    """Steps between two rounds when P fragments share a period; at least 1."""
    return max(1, period_steps // fragments)
