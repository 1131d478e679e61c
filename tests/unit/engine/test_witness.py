"""The witness as a process: it leaves when it has heard that the job is over."""

from __future__ import annotations

from typing import Any

from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.machines import CoordinatorParts, Parts
from mend.engine.witness import build_witness
from mend.types import MS, SECOND, WITNESS, Peer
from tests.unit.coordination.nouns import genesis, member, orders, roster

ME = member(WITNESS)


class Outside:
    """Counts how often the witness says that it has nothing more to do."""

    ends = 0

    def now_ns(self) -> int:
        return SECOND

    def finished(self) -> None:
        self.ends += 1

    def connect(self, *_: Any) -> None: ...
    def send(self, *_: Any) -> None: ...
    def note(self, *_: Any) -> None: ...


def test_a_witness_that_follows_leaves_at_the_last_word_of_whoever_led() -> None:
    """Nobody says anything after it: a witness that waited for more stayed for ever."""
    outside: Any = Outside()
    options = CoordinatorOptions(2, 100 * MS, 2 * SECOND)
    parts = Parts(Peer(WITNESS, 0), ME, coordinator=CoordinatorParts("job", options))
    witness = build_witness(parts, outside, lambda line: None)
    begun = orders(1, [genesis(witness=True)], to=ME.incarnation)
    witness.heard(Peer(0, 0), member(0).incarnation, begun)
    assert outside.ends == 0
    last = [genesis(witness=True), roster(2, [], witness=True)]
    witness.heard(Peer(0, 0), member(0).incarnation, orders(2, last, to=ME.incarnation))
    assert outside.ends == 1
