"""A follower whom nobody answers says so before it gives up."""

from __future__ import annotations

from contextlib import closing

import pytest

from mend.errors import GaveUp
from mend.following import follower as module
from mend.following.follower import Follower
from mend.status.follow_messages import RackLanes
from mend.tools.ports import free_ports


def test_address_that_a_rack_names_wrongly_does_not_end_the_follower() -> None:
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with closing(Follower([address], (), "", "", wait_s=0.1)) as follower:
        follower._log.racks = (RackLanes(0, "tcp://host:99999", ()),)
        with pytest.raises(GaveUp):
            next(iter(follower))


def test_follower_without_an_answer_says_so_once_and_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    address, said = f"tcp://127.0.0.1:{free_ports(1)[0]}", list[str]()
    with closing(Follower([address], (), "", "", wait_s=1.0)) as follower:
        follower.say = said.append
        with pytest.raises(GaveUp, match=r"answered for 1 s\. Look at the job"):
            next(iter(follower))
    assert said == [f"{address}: no process of a running job answers; asking on"]


@pytest.mark.parametrize(
    ("every", "number", "decided", "lost"),
    [(5, 20, 23, 0), (5, 20, 27, 25), (5, 23, 24, 0), (1, 22, 23, 23), (0, 22, 23, 23),
     (1, 23, 22, 0), (5, -1, -1, 0)],
)  # fmt: skip
def test_lost_version_at_the_end_is_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, every: int, number: int, decided: int, lost: int
) -> None:
    """With every fifth version of 23, the last one was said to be lost."""
    monkeypatch.setattr(Follower, "decided", decided)
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with closing(Follower([address], (), "", "", every=every)) as follower:
        follower.number = number
        assert follower.lost == lost
