"""The meeting of the doctors: sockets, timers and pulls. `MeetingState` decides who pulls when."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from mend.config.keyfile import secrets_of
from mend.config.settings import MendConfig
from mend.errors import MendError
from mend.tools.doctor.meeting_messages import FRAME_BYTES_MAX, About, Pull, Turn, clean
from mend.tools.doctor.meeting_state import FAREWELL_NS, LATE_NS, TURN_SPARE_NS, MeetingState, Rules
from mend.transport.bulk_client import BulkLane
from mend.transport.probe import Knock, host_and_port, knock
from mend.transport.security import Secrets
from mend.transport.zmq import ZmqSideband
from mend.types import KEY_BYTES, MS, SECOND, Address, Peer

BEAT_S = 0.1
PING_S = 0.02
CROWD = 8
"""Most racks at the full rate of beats and pings; more racks send as many in all, more slowly."""

TICK_S = 0.02
KNOCK_S = 2.0
"""Longest wait of a knock for an answer."""

KNOCKS_APART_S = 0.5
STALL_NS = 5 * SECOND

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 256 << 10, 64 << 20
"""A pull begins with a small payload and goes on with larger ones, while they come quickly."""

PIECE_GROWTH = 4
OVERTIME_S = 8.0
"""The first payload may take so much longer than the turn, on a link that slow."""

SPENT_PCT = 25
"""A payload that took more than this share of the turn is not followed by a larger one."""

PATTERN_BYTES = 1 << 20


@dataclass
class MeetingResult:
    """The result of a meeting. `knocks`: by rack that did not meet us; None: the witness."""

    state: MeetingState
    ended_ns: int
    address: Address
    knocks: dict[int | None, Knock] = field(default_factory=dict)
    ever_open: set[int | None] = field(default_factory=set)
    ever_speaks: set[int | None] = field(default_factory=set)


def meet(
    rules: Rules, config: MendConfig, about: About, say: Callable[[str], None]
) -> MeetingResult:
    """Meet the other doctors at the addresses of the job. Blocks until all is measured.

    `about.lane` is filled in here. `say` is told of progress. Raises AddressInUse, ConfigError,
    TransportError when this rack cannot listen; KeyboardInterrupt leaves nothing behind.
    """
    return asyncio.run(_Meeting(rules, config, say).run(about))


class _Meeting:
    def __init__(self, rules: Rules, config: MendConfig, say: Callable[[str], None]) -> None:
        self._rules, self._config, self._say = rules, config, say
        self._peers = {r: at for r, at in config.peer_addresses.items() if r != rules.rack}
        self._slower = max(1.0, (rules.racks - 1) / CROWD)

    async def run(self, about: About) -> MeetingResult:
        with contextlib.ExitStack() as opened:
            config, bind = self._config, self._config.bind_address
            token = hashlib.sha256(b"mend doctor " + self._rules.job.encode()).digest()[:16]
            secret = secrets_of(config, bind)
            keys = Secrets(secret, Peer(self._rules.rack, 0)) if secret else None
            lane = BulkLane(
                host_and_port(bind)[0],
                config.data_port_range,
                token=token,
                advertise=config.advertise_host,
                stall_ns=STALL_NS,
                secrets=keys,
                socks_proxy=config.socks_proxy,
            )
            opened.callback(lane.close)
            sideband = ZmqSideband(
                bind,
                frame_bytes_max=FRAME_BYTES_MAX,
                secrets=keys,
                socks_proxy=config.socks_proxy,
            )
            opened.callback(sideband.close)
            self._lane, self._sideband = lane, sideband
            serves = self._rules.pull_ns > 0
            self._served = _pattern() if serves else bytearray()
            self._room = memoryview(bytearray(len(self._served)))
            for size in _sizes():
                if serves:
                    lane.serve(_key(size), memoryview(self._served)[:size])
            nonce = int.from_bytes(secrets.token_bytes(7), "big")
            self._state = MeetingState(
                self._rules,
                replace(about, lane=lane.address, serves=serves),
                nonce,
                time.monotonic_ns(),
            )
            self._result = MeetingResult(self._state, 0, lane.address)
            for rack, address in self._peers.items():
                sideband.connect(Peer(rack, 0), address)
            await self._run_parts()
            self._result.ended_ns = time.monotonic_ns()
        return self._result

    async def _run_parts(self) -> None:
        """Until it is over; an error of any part ends the whole."""
        parts = {
            asyncio.create_task(part)
            for part in (self._listen(), self._beat(), self._ping(), self._look(), self._pull())
        }
        done: set[asyncio.Task[None]] = set()
        try:
            while not self._state.over(time.monotonic_ns()) and not done:
                self._state.step(time.monotonic_ns())
                done, _ = await asyncio.wait(
                    parts, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
            self._tell(self._state.here(time.monotonic_ns()))
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        for part in done:
            part.result()

    def _tell(self, frame: bytes) -> None:
        for rack in self._peers:
            self._sideband.send(Peer(rack, 0), frame)

    async def _listen(self) -> None:
        while True:
            frame = await self._sideband.receive()
            answer = self._state.hear(frame, time.monotonic_ns(), time.time_ns())
            if answer is not None:
                self._sideband.send(Peer(answer[0], 0), answer[1])

    async def _beat(self) -> None:
        heard: list[int] | None = None
        while True:
            now_ns = time.monotonic_ns()
            self._tell(self._state.here(now_ns))
            if self._state.live(now_ns) != heard:
                heard = self._state.live(now_ns)
                racks = ", ".join(map(str, heard)) or "nobody"
                self._say(f"rack {self._rules.rack} hears {racks} of {self._rules.racks - 1}")
            await asyncio.sleep(BEAT_S * self._slower)

    async def _ping(self) -> None:
        while True:
            for rack in tuple(self._state.others):
                frame = self._state.ping(rack, time.monotonic_ns(), time.time_ns())
                if frame is not None:
                    self._sideband.send(Peer(rack, 0), frame)
            await asyncio.sleep(PING_S * self._slower)

    async def _look(self) -> None:
        """Knock where nobody answers; the last word counts, and whether it was ever open."""
        await asyncio.sleep(TICK_S)
        while True:
            live = self._state.live(time.monotonic_ns())
            doors: dict[int | None, str] = {
                rack: address
                for rack, address in self._peers.items()
                if not (rack in live and self._state.hears_us(rack))
            }
            if self._config.witness_addr:
                doors[None] = self._config.witness_addr
            if self._state.turn is None:
                await asyncio.gather(*(self._knock(who, doors[who]) for who in doors))
            await asyncio.sleep(KNOCKS_APART_S * self._slower)

    async def _knock(self, who: int | None, address: str) -> None:
        found = await knock(*host_and_port(address), KNOCK_S)
        self._result.knocks[who] = found
        if found.answer == "open":
            self._result.ever_open.add(who)
        if found.speaks:
            self._result.ever_speaks.add(who)

    async def _pull(self) -> None:
        while True:
            wanted = self._state.wanted()
            if wanted is not None:
                turn, holders = wanted
                whom = "everybody at once" if turn.together else f"rack {holders[0]}"
                self._say(f"rack {self._rules.rack} pulls from {whom}")
                self._state.pulled(turn, await self._measure(turn, holders))
                self._tell(self._state.here(time.monotonic_ns()))
            await asyncio.sleep(TICK_S)

    async def _measure(self, turn: Turn, holders: Sequence[int]) -> list[Pull]:
        """Pull from all holders at once, each into its own part of the room."""
        share = len(self._room) // len(holders)
        most = max(size for size in _sizes() if size <= max(share, PIECE_BYTES_MIN))
        parts: list[Coroutine[Any, Any, Pull]] = []
        for place, holder in enumerate(holders):
            into = self._room[place * share :][:most]
            parts.append(self._pull_from(turn, holder, into))
        return list(await asyncio.gather(*parts))

    async def _pull_from(self, turn: Turn, holder: int, into: memoryview) -> Pull:
        """Alone: the largest payload counts, which the time lets be up to 64 MiB. Together: all
        that came within the time, as there is something on the way all the while."""
        other = self._state.others.get(holder)
        if other is None or other.here is None:
            return Pull(turn.number, holder, turn.together, 0, 0, "it is not heard here")
        limit_ns, begun_ns = turn.ms * MS, time.monotonic_ns()
        size, last, total = PIECE_BYTES_MIN, (0, 0), 0
        try:
            async with asyncio.timeout(limit_ns / SECOND + OVERTIME_S):
                while True:
                    started_ns = time.monotonic_ns()
                    where = Address(*other.here.about.lane)
                    await self._lane.fetch([where], _key(size), "", into[:size])
                    last = size, time.monotonic_ns() - started_ns
                    total += size
                    left_ns = begun_ns + limit_ns - time.monotonic_ns()
                    may_grow = size * PIECE_GROWTH <= len(into)
                    if left_ns <= 0 or (not turn.together and not may_grow):
                        break
                    if may_grow and last[1] < limit_ns * SPENT_PCT // 100:
                        size *= PIECE_GROWTH
                    elif not turn.together:
                        break
        except TimeoutError:
            if not total:
                slow = f"not even {PIECE_BYTES_MIN >> 10} KiB came in {OVERTIME_S:g} s and more"
                return Pull(turn.number, holder, turn.together, 0, 0, slow)
        except MendError as error:
            return Pull(turn.number, holder, turn.together, 0, 0, _shorten(error))
        got, took_ns = (total, time.monotonic_ns() - begun_ns) if turn.together else last
        return Pull(turn.number, holder, turn.together, got, max(1, took_ns), "")


def _shorten(error: MendError) -> str:
    """Return the error without its advice, which the findings give."""
    text = str(error)
    return clean((text.partition(" failed: ")[2] or text).partition(". ")[0])


def _sizes() -> list[int]:
    steps = itertools.count()
    sizes = (PIECE_BYTES_MIN * PIECE_GROWTH**step for step in steps)
    return list(itertools.takewhile(lambda size: size <= PIECE_BYTES_MAX, sizes))


def _pattern() -> bytearray:
    """Bytes that no link can make smaller on the way."""
    piece = secrets.token_bytes(PATTERN_BYTES)
    return bytearray(piece * (PIECE_BYTES_MAX // PATTERN_BYTES))


def _key(size: int) -> bytes:
    """Return the key of the payload of that many bytes; no key of a job's lane is like it."""
    return (b"d" + size.to_bytes(8, "big")).ljust(KEY_BYTES, b"\0")


def longest_s(rules: Rules) -> float:
    """Return the longest that a meeting takes, however slow or silent the others are."""
    turns = 2 * rules.racks + 1 if rules.pull_ns and rules.racks > 1 else 0
    turn_ns = rules.pull_ns + TURN_SPARE_NS
    return (rules.wait_ns + 2 * LATE_NS + turns * turn_ns + FAREWELL_NS) / SECOND
