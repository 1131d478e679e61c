"""Which rack a process is, from the peers and what its machine is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mend.config import MendConfig
from mend.config.placing import is_open, place
from mend.errors import ConfigError
from tests import golden

PORT = 51900
EVERYWHERE = f"tcp://0.0.0.0:{PORT}"
NAMES = {"peer1": "10.0.0.1", "peer2": "10.0.0.2", "peer3": "10.0.0.3", "localhost": "127.0.0.1"}


@dataclass
class Site:
    """A machine with these names and addresses of its own."""

    called: str
    own: frozenset[str]
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    asked: list[str] = field(default_factory=list)

    def name(self) -> str:
        return self.called

    def look_up(self, hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        self.asked += hosts
        numbers = {host: self.names.get(host, host if host[0].isdigit() else "") for host in hosts}
        return {host: (number,) if number else () for host, number in numbers.items()}

    def is_here(self, number: str) -> bool:
        return number in self.own or number.startswith("127.")

    def source_to(self, number: str) -> str | None:
        return next((each for each in sorted(self.own) if each[:4] == number[:4]), None)


def machine(number: int, **more: Any) -> Site:
    return Site(f"box{number}", frozenset({f"10.0.0.{number}"}), **more)


def peers(*numbers: int) -> tuple[str, ...]:
    return tuple(f"tcp://peer{number}:{PORT}" for number in numbers)


def config(*numbers: int, **more: Any) -> MendConfig:
    return MendConfig(**{"sideband_addr": EVERYWHERE, "sideband_peers": peers(*numbers), **more})


def told(placed: MendConfig) -> tuple[int | None, int, dict[int, str], str]:
    return placed.rack, placed.racks, placed.peer_addresses, placed.advertise_host


ALL_TWO = dict(enumerate(peers(1, 2)))
ALL_THREE = dict(enumerate(peers(1, 2, 3)))

# ------------------------------------------------------------------ a list of all racks


@pytest.mark.parametrize("own", [1, 2, 3])
def test_the_entry_that_is_this_machine_says_who_it_is(own: int) -> None:
    placed = place(config(1, 2, 3), machine(own))
    assert told(placed) == (own - 1, 3, ALL_THREE, f"peer{own}")
    assert placed.bind_address == EVERYWHERE
    assert not is_open(placed)


def test_a_machine_knows_its_own_name_without_a_resolver() -> None:
    placed = place(config(1, 2), Site("peer2", frozenset(), names={}))
    assert told(placed) == (1, 2, ALL_TWO, "peer2")


def test_racks_of_one_machine_are_told_apart_by_their_port() -> None:
    both = ("tcp://peer1:6000", "tcp://peer1:6001")
    for rack in (0, 1):
        given = MendConfig(sideband_addr=f"tcp://0.0.0.0:600{rack}", sideband_peers=both)
        assert place(given, machine(1)).rack == rack


def test_racks_of_one_machine_are_told_apart_by_the_address_they_listen_at() -> None:
    both = ("tcp://127.0.0.2:6000", "tcp://127.0.0.3:6000")
    for rack in (0, 1):
        given = MendConfig(sideband_addr=f"tcp://127.0.0.{2 + rack}:6000", sideband_peers=both)
        placed = place(given, machine(1))
        assert (placed.rack, placed.advertise_host) == (rack, "")


def test_without_an_address_of_its_own_a_rack_listens_at_its_entry() -> None:
    given = MendConfig(sideband_peers=peers(1, 2))
    placed = place(given, machine(2))
    assert (placed.rack, placed.bind_address) == (1, f"tcp://peer2:{PORT}")


def test_a_rack_that_is_told_its_number_looks_nothing_up() -> None:
    site = machine(1)
    given = config(1, 2, racks=2, rack=1)
    assert told(place(given, site)) == (1, 2, ALL_TWO, "peer2")
    numbered = config(rack=1, sideband_peers=ALL_TWO)
    assert told(place(numbered, site)) == (1, 2, ALL_TWO, "peer2")
    assert site.asked == []
    complete = config(rack=1, sideband_peers=ALL_TWO, advertise_host="me")
    assert place(complete, site) is complete
    assert place(default := MendConfig(rack=1), site) is default


def test_a_number_that_is_another_machines_is_refused() -> None:
    with golden.raises(ConfigError):
        place(config(1, 2, rack=0), machine(2))


# ------------------------------------------------------------------ the others only


@pytest.mark.parametrize("own", [1, 2, 3])
def test_the_others_take_the_remaining_numbers_in_order(own: int) -> None:
    others = [number for number in (1, 2, 3) if number != own]
    placed = place(config(*others, rack=own - 1), machine(own))
    expected = ALL_THREE | {own - 1: f"tcp://10.0.0.{own}:{PORT}"}
    assert told(placed) == (own - 1, 3, expected, f"10.0.0.{own}")


def test_numbered_others_leave_one_number_which_is_this_rack() -> None:
    for own in (0, 1, 2):
        others = {rack: at for rack, at in ALL_THREE.items() if rack != own}
        placed = place(config(sideband_peers=others, racks=3), machine(own + 1))
        assert placed.rack == own
        assert placed.peer_addresses[own] == f"tcp://10.0.0.{own + 1}:{PORT}"


def test_an_advertised_host_needs_no_way_to_the_others() -> None:
    placed = place(config(2, rack=0, racks=2, advertise_host="me"), machine(1, names={}))
    assert placed.peer_addresses == {0: f"tcp://me:{PORT}", 1: f"tcp://peer2:{PORT}"}


def test_others_only_without_a_number_lack_the_number_and_nothing_else() -> None:
    """Each rack's list is another one: no order of them would come out equal on all racks."""
    for given in (config(2), config(2, 3), config(2, 3, racks=3), config(2, 3, 1, racks=4)):
        site = Site("box9", frozenset({"10.0.0.9"}))
        with golden.raises(ConfigError):
            place(given, site)
        assert place(replace(given, rack=0), site).rack == 0


# ------------------------------------------------------------------ what is missing


def test_names_that_do_not_resolve_are_told_where_they_matter() -> None:
    site = machine(1, names={"peer2": "10.0.0.2"})
    with golden.raises(ConfigError):
        place(config(1, 2), site)
    with golden.raises(ConfigError):
        place(config(1, 2, rack=0), site)
    assert place(config(1, 2, rack=0, racks=2), site).advertise_host == "peer1"
    assert place(config(1, 2, rack=0, racks=3), site).racks == 3


def test_without_a_way_to_any_peer_the_host_is_missing() -> None:
    with golden.raises(ConfigError):
        place(config(2, rack=0), machine(1, names={}))


def test_several_entries_of_this_machine_are_ambiguous() -> None:
    given = MendConfig(
        sideband_addr=EVERYWHERE,
        sideband_peers=(f"tcp://127.0.0.2:{PORT}", f"tcp://127.0.0.3:{PORT}"),
    )
    with golden.raises(ConfigError):
        place(given, machine(1))
    assert place(replace(given, rack=1), machine(1)).advertise_host == "127.0.0.3"


def test_a_list_that_has_this_machine_and_not_all_racks_is_refused() -> None:
    with golden.raises(ConfigError):
        place(config(1), machine(1))
    with golden.raises(ConfigError):
        place(config(1, 2, merge_min_racks=3), machine(1))


def test_a_port_that_nobody_knows_is_refused() -> None:
    given = config(2, rack=0, sideband_addr="tcp://0.0.0.0:0")
    with golden.raises(ConfigError):
        place(given, machine(1))


def test_an_ipv6_number_cannot_be_advertised() -> None:
    given = MendConfig(
        sideband_addr=f"tcp://[::]:{PORT}", sideband_peers=(f"tcp://[fd00::1]:{PORT}", *peers(2))
    )
    site = Site("box1", frozenset({"fd00::1"}), names={"fd00::1": "fd00::1", **NAMES})
    with golden.raises(ConfigError):
        place(given, site)


def test_racks_with_equal_peer_lists_infer_equal_addresses_or_are_refused() -> None:
    """Every rack of every job of up to four, with each list that it may have, finds its number or
    is refused; no two of them find another number for the same address."""
    for racks in (2, 3, 4):
        names = {f"peer{number}": f"10.0.0.{number}" for number in range(1, racks + 1)}
        everybody = {rack: f"10.0.0.{rack + 1}" for rack in range(racks)}
        for own, others_only, says_rack, says_racks in itertools.product(
            range(racks), (False, True), (False, True), (False, True)
        ):
            listed = [rack + 1 for rack in range(racks) if not (others_only and rack == own)]
            more = {"rack": own} if says_rack else {}
            more |= {"racks": racks} if says_racks else {}
            site = machine(own + 1, names=names)
            given = config(*listed, **more)
            if others_only and not says_rack:
                with golden.raises(ConfigError):
                    place(given, site)
                continue
            placed = place(given, site)
            assert (placed.rack, placed.racks) == (own, racks)
            hosts = {r: at.split("/")[-1].split(":")[0] for r, at in placed.peer_addresses.items()}
            assert {rack: names.get(host, host) for rack, host in hosts.items()} == everybody
