"""Whom `mend top` asks: what it was given, and what it hears of; with real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mend.errors import ConfigError
from mend.status.messages import VIEW_BYTES_MAX, encode_view
from mend.tools.top import run
from mend.tools.top.run import DEFAULT, Wanted, Watch, addresses_in_force, top
from mend.transport.status_client import StatusClient
from tests.unit.status.seen import rack_seen, view
from tests.unit.transport.test_status_client import Served, serving


def wanted(*addresses: str, **changes: Any) -> Wanted:
    fields: dict[str, Any] = {
        "addresses": addresses, "job": "", "interval_s": 0.1, "once": True, "as_json": False,
        "wait_s": 5.0,
    }  # fmt: skip
    return Wanted(**{**fields, **changes})


@pytest.fixture
def racks() -> Iterator[list[Served]]:
    """Three that answer whatever they are given to say."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving(None)) for _ in range(3)]


@pytest.fixture
def onlooker() -> Iterator[StatusClient]:
    made = StatusClient(VIEW_BYTES_MAX)
    yield made
    made.close()


def says(racks: list[Served], number: int, names: dict[int, str], **changes: Any) -> None:
    """Rack `number` answers, and says that the racks are at these addresses."""
    members = tuple(rack_seen(rack, address=at) for rack, at in sorted(names.items()))
    racks[number].answer = encode_view(view(number, racks=members, **changes))


def watched(onlooker: StatusClient, *addresses: str, rounds: int = 20) -> Watch:
    watch = Watch(onlooker, wanted(*addresses), list(addresses))
    for _ in range(rounds):
        watch.ask()
        watch.listen(0.2)
        if watch.complete:
            break
    return watch


def test_one_address_leads_to_all(racks: list[Served], onlooker: StatusClient) -> None:
    names = {rack: each.address for rack, each in enumerate(racks)}
    for rack in names:
        says(racks, rack, names)
    watch = watched(onlooker, names[1])
    assert watch.complete
    assert [(r.rack, r.source) for r in watch.picture().racks] == [
        (0, "itself"), (1, "itself"), (2, "itself"),
    ]  # fmt: skip
    assert sorted(watch.asked()) == sorted(names.values())


def test_picture_after_the_end_keeps_racks_that_no_leader_knows_any_more(
    racks: list[Served], onlooker: StatusClient
) -> None:
    """The last table was empty where the answers came after the last good-bye."""
    names = {rack: each.address for rack, each in enumerate(racks)}
    for rack in names:
        says(racks, rack, names)
    watch = watched(onlooker, names[0])
    assert [line.state for line in watch.picture().racks] == ["running"] * 3
    for each in range(3):
        says(racks, each, {}, state="ended", over=True)
    watch.ask()
    watch.listen(1.0)
    last = watch.picture()
    assert last.state == "ended"
    assert [(line.rack, line.state) for line in last.racks] == [(r, "ended") for r in range(3)]


def test_one_process_under_two_addresses_is_asked_once(
    racks: list[Served], onlooker: StatusClient
) -> None:
    """As behind a tunnel, or on a machine of several networks."""
    near = [each.address for each in racks[:2]]
    far = {rack: at.replace("127.0.0.1", "localhost") for rack, at in enumerate(near)}
    for rack in far:
        says(racks, rack, far)
    watch = watched(onlooker, near[0])
    for _ in range(3):
        watch.ask()
        watch.listen(0.1)
    assert watch.asked() == [near[0], far[1]]
    picture = watch.picture()
    assert [line.source for line in picture.racks] == ["itself", "itself"]
    assert picture.silent == ()


def test_an_address_in_a_view_that_is_none_stops_nobody(
    racks: list[Served], onlooker: StatusClient
) -> None:
    says(racks, 0, {0: racks[0].address, 1: "tcp://nowhere", 2: ""})
    watch = watched(onlooker, racks[0].address)
    assert watch.asked() == [racks[0].address]
    assert [line.rack for line in watch.picture().racks] == [0, 1, 2]


def test_invalid_address_gives_its_place_to_the_next_one_of_too_many(
    racks: list[Served], onlooker: StatusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked without a way to it, and top ended with a KeyError."""
    monkeypatch.setattr(run, "WATCHED_MAX", 2)
    says(racks, 0, {0: racks[0].address, 1: "tcp://nowhere", 2: racks[2].address})
    says(racks, 2, {2: racks[2].address})
    watch = watched(onlooker, racks[0].address)
    assert watch.asked() == [racks[0].address, racks[2].address]
    assert watch.complete


def test_a_rack_that_moved_is_followed_and_its_old_address_is_forgotten(
    racks: list[Served], onlooker: StatusClient
) -> None:
    one, old, new = (each.address for each in racks)
    says(racks, 0, {0: one, 1: old})
    watch = watched(onlooker, one, rounds=2)
    assert watch.asked() == [one, old]
    says(racks, 0, {0: one, 1: new})
    racks[2].answer = encode_view(
        view(1, racks=(rack_seen(0, address=one), rack_seen(1, address=new)))
    )
    for _ in range(20):
        watch.ask()
        watch.listen(0.2)
        if old not in watch.asked() and watch.complete:
            break
    assert watch.asked() == [one, new]
    assert watch.picture().silent == ()


def test_answer_that_is_not_a_view_is_ignored(racks: list[Served], onlooker: StatusClient) -> None:
    racks[0].answer = b"mno\x01what"
    watch = watched(onlooker, racks[0].address, rounds=3)
    assert not watch.anybody
    assert watch.picture().state == "nobody"


def test_top_ends_with_the_job(racks: list[Served], capsys: pytest.CaptureFixture[str]) -> None:
    names = {0: racks[0].address}
    says(racks, 0, names, state="ended", over=True)
    assert top(wanted(racks[0].address, once=False)) == 0
    assert capsys.readouterr().out.rstrip().endswith("the job has ended")


def test_invalid_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        top(wanted("rack7:21900"))


def test_addresses_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses_in_force() == [DEFAULT]
    monkeypatch.setenv("MEND_RACKS", "2")
    assert addresses_in_force() == ["tcp://127.0.0.1:21900", "tcp://127.0.0.1:21901"]
    monkeypatch.setenv("MEND_SIDEBAND_PEERS", "tcp://a:1,tcp://b:2")
    monkeypatch.setenv("MEND_WITNESS_ADDR", "tcp://w:3")
    assert addresses_in_force() == ["tcp://w:3", "tcp://a:1", "tcp://b:2"]
