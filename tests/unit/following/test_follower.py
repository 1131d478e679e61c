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
