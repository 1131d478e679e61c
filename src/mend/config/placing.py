"""Finds out which rack this is and how others reach it, from the peers and this machine.

It examines the machine only if the settings leave something open. It infers nothing from RANK,
GROUP_RANK or MASTER_ADDR, because each rack's torchrun counts its own nodes from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from mend.config.kinds import numbered
from mend.config.settings import MendConfig
from mend.engine.io.rack import RackGroup
from mend.errors import ConfigError, UsageError, require
from mend.transport.probe import host_and_port
from mend.transport.whereabouts import Whereabouts


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The findings of one rank: the rack, the addresses of all racks, and the entries that are its
    own machine. Or the parts of the ConfigError that prevented them."""

    rack: int = 0
    peers: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    error: tuple[str, str | None, str, str] | None = None


def is_open(config: MendConfig) -> bool:
    """Return whether the peers leave open which rack this is, what its address is, or how others
    reach it. Without peers, all racks are on one machine, and `rack` is enough."""
    if not config.sideband_peers:
        return False
    all_named = list(config.peer_addresses) == list(range(config.racks))
    reachable = bool(config.advertise_host) or not config.listens_everywhere
    return config.rack is None or not all_named or not reachable or _is_plain(config)


def placed(config: MendConfig, members: tuple[int, ...] | None) -> MendConfig:
    """The configuration with rack, racks, all peers and the advertised host filled in.

    If something is open, all ranks of the rack must call it together: the peers name the machine of
    the first rank, so that one decides, and each rank finds its own address. Raises ConfigError on
    all ranks with the one thing that is missing, UsageError if the ranks are on machines of several
    racks.
    """
    if not is_open(config):
        return config
    here = Whereabouts()
    group = RackGroup(members, config.start_timeout_s + config.wait_timeout_s)
    places = group.gather(_found(config, here), Found)
    first = places[0]
    if first.error is not None:
        raise ConfigError(*first.error)
    for rank, other in enumerate(places):
        if other.own and first.own and not set(other.own) & set(first.own):
            raise UsageError(
                f"rank 0 of this process group is at {first.own[0]}, rank {rank} at "
                f"{other.own[0]}, which are different racks; pass mesh=mend.rack_mesh(), or start "
                "one torchrun per rack"
            )
    filled = replace(config, rack=first.rack, racks=len(first.peers), sideband_peers=first.peers)
    return _reachable(filled, here, leads=group.rank == 0)


def place(config: MendConfig, here: Whereabouts) -> MendConfig:
    """`placed` for the first rank of a rack alone. Raises ConfigError."""
    if not is_open(config):
        return config
    rack, addresses, _ = _Search(config, here).result()
    filled = replace(config, rack=rack, racks=len(addresses), sideband_peers=numbered(addresses))
    return _reachable(filled, here, leads=True)


def _found(config: MendConfig, here: Whereabouts) -> Found:
    try:
        rack, addresses, own = _Search(config, here).result()
    except ConfigError as error:
        value = None if error.value is None else str(error.value)
        return Found(error=(error.field, value, error.rule, error.remedy))
    return Found(rack, numbered(addresses), own)


def _is_plain(config: MendConfig) -> bool:
    return "=" not in str(config.sideband_peers[0])


@dataclass
class _Search:
    """The search for this rack among the peers. `result`: the rack, the address of every rack, and
    the entries that were found to be this machine (none if nothing had to be looked up)."""

    config: MendConfig
    here: Whereabouts

    def __post_init__(self) -> None:
        self.plain = _is_plain(self.config)
        entries = (str(entry).rpartition("=") for entry in self.config.sideband_peers)
        self.entries = [(int(rack) if rack else None, address) for rack, _, address in entries]
        self.unknown: list[str] = []

    def result(self) -> tuple[int, dict[int, str], tuple[str, ...]]:
        config = self.config
        complete = not self.plain and list(config.peer_addresses) == list(range(config.racks))
        if complete and config.rack is not None:
            return config.rack, config.peer_addresses, ()
        own = self._own()
        names = tuple(self.entries[place][1] for place in own)
        if complete or own:
            addresses = {
                place if number is None else number: address
                for place, (number, address) in enumerate(self.entries)
            }
            if list(addresses) != list(range(max(config.racks, len(addresses)))):
                rule = f"names this machine ({names[0]}) and leaves out another one of the racks"
                remedy = "List all racks, or all but this one."
                raise ConfigError("sideband_peers", config.sideband_peers, rule, remedy)
            return self._one_of(own), addresses, names
        return *self._besides(), ()

    def _own(self) -> list[int]:
        """The positions of the entries that are this machine, with the port of this rack."""
        hosts = [host_and_port(address) for _, address in self.entries]
        bind = self.config.sideband_addr
        at, port = host_and_port(bind) if bind else ("", 0)
        here = "" if self.config.listens_everywhere else at
        numbers = self.here.look_up([host for host, _ in hosts] + ([here] if here else []))
        names = {self.here.name(), self.config.advertise_host} - {""}

        def is_own(host: str) -> bool:
            if here:
                return host == here or bool(set(numbers[host]) & set(numbers[here]))
            return host in names or any(map(self.here.is_here, numbers[host]))

        own = []
        for place, (host, its_port) in enumerate(hosts):
            if bind and its_port != port:
                continue
            if is_own(host):
                own.append(place)
            elif not numbers[host]:
                self.unknown.append(host)
        return own

    def _one_of(self, own: list[int]) -> int:
        """The number of this rack, if the list has all racks."""
        number = self.config.rack
        if number is not None:
            if own and number not in own:
                named = self.entries[own[0]][1]
                rule = f"sideband_peers has this machine ({named}) as rack {own[0]}"
                raise ConfigError("rack", number, rule, f"Set MEND_RACK={own[0]}, or leave it out.")
            return number
        if len(own) == 1:
            return own[0]
        if own:
            several = " and ".join(self.entries[place][1] for place in own)
            raise _missing_rack(f"{several} of sideband_peers are both this machine")
        raise _missing_rack(f"no entry of sideband_peers is this machine{self._doubt()}")

    def _besides(self) -> tuple[int, dict[int, str]]:
        """The rack and all addresses, if the list has only the other racks."""
        config, count = self.config, len(self.entries)
        if len(self.entries) == config.racks and self.unknown:
            if config.rack is None:
                raise _missing_rack(f"no entry of sideband_peers is this machine{self._doubt()}")
            rule = f"sideband_peers may be all racks, or all but this one{self._doubt()}"
            raise ConfigError("racks", None, rule, f"Set MEND_RACKS to {count} or {count + 1}.")
        racks = max(config.racks, count + 1)
        if self.plain and config.rack is None:
            raise _missing_rack(
                "sideband_peers has the other racks only, each rack another list, so nothing says "
                f"which of the {racks} racks this one is{self._doubt()}"
            )
        numbers = [number for number, _ in self.entries]
        own = config.rack if self.plain else next(r for r in range(racks) if r not in numbers)
        own = require(own, "this rack has no number")
        others = [rack for rack in range(racks) if rack != own]
        addresses = dict(zip(others, (address for _, address in self.entries), strict=True))
        return own, {**addresses, own: self._own_address(own)}

    def _own_address(self, rack: int) -> str:
        """The address of this rack if no entry has it: the port of sideband_addr, and the host at
        which others reach it."""
        host, port = host_and_port(self.config.sideband_addr)
        if not port:
            rule = f"others find rack {rack} at no port, as sideband_peers does not name one"
            remedy = "Set sideband_addr with a port of its own."
            raise ConfigError("sideband_addr", self.config.sideband_addr, rule, remedy)
        if self.config.listens_everywhere:
            addresses = [address for _, address in self.entries]
            host = self.config.advertise_host or _seen_from(addresses, self.here)
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def _doubt(self) -> str:
        if not self.unknown:
            return ""
        return f", as far as names resolve here ({', '.join(self.unknown)} do not)"


def _missing_rack(rule: str) -> ConfigError:
    return ConfigError("rack", None, rule, "Set MEND_RACK (or rack=) to its number, from 0.")


def _reachable(config: MendConfig, here: Whereabouts, *, leads: bool) -> MendConfig:
    """The configuration with the host at which others reach this process. The rack's entry names
    the host of its first rank; another rank may be on another node of the rack."""
    if config.advertise_host or not config.listens_everywhere:
        return config
    addresses = config.peer_addresses
    host, _ = host_and_port(addresses[config.rack_number])
    if not leads and not any(map(here.is_here, here.look_up([host])[host])):
        others = [address for rack, address in addresses.items() if rack != config.rack]
        host = _seen_from(others, here)
    if ":" in host:
        rule = "cannot stand in for an IPv6 number in sideband_peers"
        remedy = f"Listen at one address: sideband_addr={addresses[config.rack_number]}."
        raise ConfigError("advertise_host", host, rule, remedy)
    return replace(config, advertise_host=host)


def _seen_from(addresses: Sequence[str], here: Whereabouts) -> str:
    """The address of this machine on the route to the first peer that has one."""
    hosts = [host_and_port(address)[0] for address in addresses]
    numbers = here.look_up(hosts)
    for host in hosts:
        for number in numbers[host]:
            if source := here.source_to(number):
                return source
    rule = f"is needed: this machine has no route to {', '.join(hosts)}, so its address is unknown"
    remedy = "Set MEND_ADVERTISE_HOST to a name or an IPv4 number of this machine."
    raise ConfigError("advertise_host", None, rule, remedy)
