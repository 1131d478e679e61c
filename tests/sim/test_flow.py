"""A rack that joins over a slow link while small rounds are decided all the time."""

from __future__ import annotations

from collections import Counter

import pytest

from mend.coordination.flow import UNANSWERED_MAX
from mend.coordination.messages import Envelope, Orders
from mend.types import MS, SECOND, Peer
from mend_lab.sim import World
from mend_lab.sim.scenario import Fault
from tests.noted import pairs

LATE_NS = 600 * MS
"""One way: 24 rounds are decided until an answer is there."""


@pytest.mark.slow
def test_a_slow_joiner_catches_up_and_no_record_is_sent_to_it_over_and_over() -> None:
    """Records went with every state until they were answered: 40 times each here. Who had to read
    that fell behind for ever."""
    back_ns = 2 * SECOND
    faults = (
        Fault("restart", SECOND, back_ns, 2),
        Fault("slow_link", back_ns, 60 * SECOND, 0, 2, amount=LATE_NS),
    )
    world = World(
        racks=3, witness=False, fragments=3, period_steps=3, overlap_steps=1, steps=110,
        step_ns=50 * MS, shutdown_ns=40 * SECOND, faults=faults,
    )  # fmt: skip
    sent: Counter[tuple[int, int]] = Counter()
    most = 0
    send = world.network.send

    def watched(sender: int, address: str, envelope: Envelope, kind: str) -> None:
        nonlocal most
        body = envelope.body
        joiner = world.trainings[Peer(2, 0)].process
        if isinstance(body, Orders) and body.to == joiner.member.incarnation:
            first = body.prev + 1
            sent.update((body.ballot, i) for i in range(first, first + len(body.records)))
            answered = world.trainings[Peer(0, 0)].rank.coordinator
            assert answered is not None
            view = answered.views.get(2)
            most = max(most, len(view.flow.waiting) if view else 0)
        send(sender, address, envelope, kind)

    world.network.send = watched  # type: ignore[method-assign]
    report = world.run()
    assert report.problems == []
    joined = [
        kind for kind, _ in pairs(world.trainings[Peer(2, 0)].process.notes) if kind == "joined"
    ]
    assert joined == ["joined"]
    assert len(sent) > 60, "so much is decided meanwhile"
    assert most <= UNANSWERED_MAX
    again = [count for count in sent.values() if count > 2]
    assert len(again) <= len(sent) // 20, "what it asked for when it knew nothing"
    assert max(sent.values()) <= 4
