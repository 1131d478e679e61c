"""Asks the processes of a job and draws their answers, until the job or the user ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

from rich.console import Console
from rich.live import Live

from mend.config.keyfile import secrets_in_force
from mend.config.sources import socks_proxy_in_force
from mend.errors import ConfigError, TransportError, WireError
from mend.status.messages import VIEW_BYTES_MAX, JobStatus, Look, decode_view, encode_look
from mend.tools.top.picture import (
    LATE_S,
    Answer,
    Picture,
    RackLine,
    addresses_of,
    is_over,
    picture_of,
    with_former_racks,
)
from mend.tools.top.table import screen_of
from mend.transport.status_client import StatusClient

DEFAULT = "tcp://127.0.0.1:21900"
WATCHED_MAX = 80
"""Addresses in all: 64 racks, a witness, and some that are wrong."""

STRAGGLER_S = 1.0
"""Longest wait of `gather` for the other addresses, once one has answered."""

FIRST_S = 0.25
"""Longest wait for the first answers before anything is shown."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments. No address: those of the environment."""

    addresses: tuple[str, ...]
    job: str
    interval_s: float
    once: bool
    as_json: bool
    wait_s: float


class Watch:
    """The answers so far, by address. Addresses that they name are asked as well."""

    def __init__(self, client: StatusClient, wanted: Wanted, addresses: list[str]) -> None:
        self.client, self._wanted, self._given = client, wanted, addresses
        self._question = encode_look(Look(wanted.job))
        self._heard: dict[str, tuple[JobStatus, float]] = {}
        self._named: dict[str, tuple[str, ...]] = {}
        """Address that answers -> the addresses of other racks that it names."""
        self._at: dict[tuple[int, int], str] = {}
        """(rack, life) -> the address that it is asked at; it may have several."""
        self._aliases: set[str] = set()
        self._racks: tuple[RackLine, ...] = ()
        """Of the newest picture of a job that runs."""
        self._met = set(addresses)
        for address in addresses:
            client.watch(address)

    def asked(self) -> list[str]:
        """Return the given addresses, and those of the racks in the newest rosters."""
        named = [address for each in self._named.values() for address in each]
        addresses = dict.fromkeys((*self._given, *named))
        return [each for each in addresses if each not in self._aliases][:WATCHED_MAX]

    def ask(self) -> None:
        for address in self.asked():
            self.client.ask(address, self._question)

    def listen(self, limit_s: float) -> None:
        """Take in what comes until the limit, or the job is over; with --once until all are in."""
        end = time.monotonic() + limit_s
        while (left_s := end - time.monotonic()) > 0 and not self.over:
            for address, frame in self.client.collect(left_s):
                self._take(address, frame)
            if self._wanted.once and self.complete:
                return

    def gather(self, wait_s: float, every_s: float) -> None:
        """Ask every `every_s` until one has answered, at most `wait_s`; then the others."""
        self._ask_until(lambda: self.anybody, wait_s, every_s)
        if self.anybody:
            self._ask_until(lambda: self.complete, STRAGGLER_S, every_s)

    def _ask_until(self, done: Callable[[], bool], limit_s: float, every_s: float) -> None:
        end = time.monotonic() + limit_s
        while not done() and (left_s := end - time.monotonic()) > 0:
            self.ask()
            self.listen(min(every_s, left_s))

    def _take(self, address: str, frame: bytes) -> None:
        try:
            view = decode_view(frame)
        except WireError:
            return  # not an answer to this question
        own = next((rack.address for rack in view.racks if rack.rack == view.rack), address)
        at = self._at.setdefault((view.rack, view.life), address)
        if at != address:
            self._aliases.add(address)
        else:
            if own != address:
                self._aliases.add(own)
            self._heard[address] = view, time.monotonic()
            self._named[address] = tuple(addresses_of(view))
        while new := set(self.asked()) - self._met:  # an alias leaves its place to another one
            for other in new:
                self._meet(other)

    def _meet(self, address: str) -> None:
        """An address that a View named; one that is none is not the user's mistake."""
        self._met.add(address)
        try:
            self.client.watch(address)
        except (ConfigError, TransportError):
            self._aliases.add(address)
            return
        self.client.ask(address, self._question)

    @property
    def complete(self) -> bool:
        return all(address in self._heard for address in self.asked())

    @property
    def anybody(self) -> bool:
        return bool(self._heard)

    @property
    def over(self) -> bool:
        return is_over(self.answers())

    def picture(self) -> Picture:
        late_s = max(LATE_S, 3 * self._wanted.interval_s)
        picture = picture_of(self.answers(), late_s, self._wanted.job)
        if picture.state == "ended":
            return with_former_racks(picture, self._racks)
        self._racks = picture.racks or self._racks
        return picture

    def answers(self) -> list[Answer]:
        """Return the answers of all that are asked, and the last ones of those that have ended."""
        now, asked = time.monotonic(), self.asked()
        gone = [a for a, (view, _) in self._heard.items() if view.state == "ended"]
        found = []
        for address in dict.fromkeys((*asked, *gone)):
            view, at = self._heard.get(address, (None, now))
            found.append(Answer(address, view, now - at, self.client.way(address).value))
        return found


def top(wanted: Wanted) -> int:
    """Returns the exit status. Raises ConfigError for what is not an address."""
    with watching(wanted) as watch:
        try:
            return _once(watch, wanted) if wanted.once else _forever(watch, wanted)
        except KeyboardInterrupt:
            return 0
        except BrokenPipeError:  # `mend top | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


@contextmanager
def watching(wanted: Wanted) -> Iterator[Watch]:
    """A watch of the wanted addresses, closed at the end of the `with`; SIGTERM ends it as Ctrl-C
    does. Raises ConfigError for what is not an address."""
    client = StatusClient(VIEW_BYTES_MAX, secrets_in_force(), socks_proxy_in_force())
    with closing(client), sigterm_exits():
        yield Watch(client, wanted, addresses_in_force(wanted.addresses))


def addresses_in_force(given: Sequence[str] = ()) -> list[str]:
    """Return the given addresses, each once; without one those in the environment and the file that
    MEND_CONFIG names."""
    from mend.config.origins import in_force

    if given:
        return list(dict.fromkeys(given))
    config, named = in_force()
    if not {each.field for each in named} & {"sideband_peers", "witness_addr", "racks"}:
        return [DEFAULT]
    witness = [config.witness_addr] if config.witness_addr else []
    return [*witness, *config.peer_addresses.values()]


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that the terminal is left as it was."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _once(watch: Watch, wanted: Wanted) -> int:
    watch.gather(wanted.wait_s, min(wanted.interval_s, STRAGGLER_S))
    _print(watch.picture(), Console(highlight=False), wanted)
    return 0 if watch.anybody else 1


def _forever(watch: Watch, wanted: Wanted) -> int:
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or wanted.as_json:
        while not watch.over:
            watch.ask()
            watch.listen(wanted.interval_s)
            _print(watch.picture(), console, wanted)
    else:
        with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
            watch.ask()
            watch.listen(min(wanted.interval_s, FIRST_S))
            while not watch.over:
                size = console.size
                live.update(screen_of(watch.picture(), size.width, size.height), refresh=True)
                watch.ask()
                watch.listen(wanted.interval_s)
        _print(watch.picture(), console, wanted)
    if not wanted.as_json:
        console.print("the job has ended")
    return 0


def _print(picture: Picture, console: Console, wanted: Wanted) -> None:
    if wanted.as_json:
        print(json.dumps(asdict(picture)), flush=True)
        return
    console.print(screen_of(picture, console.width))
    if not wanted.once:
        console.print()
