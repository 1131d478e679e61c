"""I11: the work of a unit of data is merged once at most, and the books of the log say so.

The scripts say which units each step took, and the commits which steps were merged. The books are
not asked for either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from mend.consensus.log import LogState
from mend.consensus.records import MergeMember, Record
from mend.types import Member


class UnitChecks:
    """`fragments`: number of fragments of weights."""

    def __init__(self, problem: Callable[[str], None], fragments: int) -> None:
        self._problem, self._fragments = problem, fragments
        self.taken: dict[Member, list[tuple[int, int]]] = {}
        """(step, unit) of each member's first rank, in order."""

    def took(self, member: Member, step: int, units: Iterable[int]) -> None:
        self.taken.setdefault(member, []).extend((step, unit) for unit in units)

    def merged(self, shares: Iterable[tuple[Member, int, MergeMember]]) -> Counter[int]:
        """How often each unit is in merged work. `shares`: (member, fragment, share)."""
        positions: dict[Member, dict[int, int]] = {}
        for member, fragment, share in shares:
            if fragment < self._fragments:
                self._check_share(member, share)
                mine = positions.setdefault(member, {})
                mine[fragment] = max(mine.get(fragment, 0), share.units)
        found = Counter[int]()
        for member, mine in positions.items():
            done = min(mine.get(fragment, 0) for fragment in range(self._fragments))
            found.update(unit for _, unit in self.taken.get(member, [])[:done])
        return found

    def _check_share(self, member: Member, share: MergeMember) -> None:
        """The units that an offer names are those of its steps. With feedback in the weights it
        leaves the last step to the next one."""
        steps = [step for step, _ in self.taken.get(member, [])]
        fits = {sum(step <= share.capture_step - left for step in steps) for left in (0, 1)}
        if share.units not in fits:
            self._problem(f"I11: {member} names {share.units} units at step {share.capture_step}")

    def verdict(
        self, records: Iterable[Record], shares: Iterable[tuple[Member, int, MergeMember]]
    ) -> None:
        """At the end of a run. `records`: the decided ones."""
        state = LogState()
        for record in records:
            state.take(record)
        merged, units = self.merged(shares), state.units
        if twice := sorted(unit for unit, times in merged.items() if times > 1):
            self._problem(f"I11: units {twice} are merged twice")
        if units is None:
            return
        if units.done != len(merged):
            self._problem(f"I11: the log has {units.done} units as done, {len(merged)} are merged")
        free = {unit for first, count in units.free for unit in range(first, first + count)}
        if both := sorted(free & merged.keys()):
            self._problem(f"I11: units {both} are merged and free")
        gone = [b.member for b in units.books if b.member not in state.members and b.given > b.done]
        if gone:
            self._problem(f"I11: units of {gone}, which have no seat, are neither free nor done")
