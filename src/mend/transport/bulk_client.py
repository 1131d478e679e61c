"""The bulk lane: pulls payloads over TCP. Threads move the bytes; the event loop supervises them.

A fetch asks one holder after another. It uses several connections at once, because one TCP stream
cannot fill a link with a long delay. The event loop never touches payload bytes: it starts the
threads, and shuts their sockets down when no verified bytes arrive, when the fetch is cancelled, or
when the lane closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager

from mend.errors import (
    ChecksumMismatch,
    ConfigError,
    PayloadGone,
    PeerUnreachable,
    TransferStalled,
    TransportError,
    ensure,
)
from mend.transport.asking import Asked, Ends, ask_around, most_telling, no_holder
from mend.transport.bulk_link import ReaderEnd
from mend.transport.bulk_server import CARRIED_MAX, PayloadServer, advertised
from mend.transport.bulk_transfer import LENGTH_MIN, LENGTH_SWIFT, Incoming, TransferAttempt
from mend.transport.bulk_wire import LENGTH_MAX, checksum_of, is_quiet, tune
from mend.transport.growth import Growth
from mend.transport.kept_threads import KeptThreads
from mend.transport.probe import host_and_port
from mend.transport.security import Secrets
from mend.transport.socks import connect_through
from mend.types import KEY_BYTES, SECOND, Address, Extent, Meter

__all__ = ["BulkLane", "checksum_of"]

STREAMS = 4
"""Connections per transfer."""
STREAM_BYTES_MIN = 1 << 20
"""A transfer gets one more connection for each multiple of this size."""
WIDE_MAX = 8
"""Limit of concurrent transfers with several connections each; further ones use one."""
FETCHES_MAX = 32
"""Limit of concurrent transfers; further ones wait. In a sharded round of 17 racks, a rack pulls a
payload and a merged slice from each of the 16 others at the same time. If these took turns, slow
racks would delay the others."""
THIN_MAX = 4
"""Limit of concurrent transfers from a holder that has not answered quickly yet."""
WATCHES_PER_STALL = 8
"""How often progress is checked within one stall time-out."""
CONNECT_NS_MAX = 5 * SECOND
CLOSE_S = 5.0
"""Longest wait of `close` for threads. They end at once, because it wakes them."""

_AddrInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]


class BulkLane:
    """Serves payloads to connections that send the job's token, and fetches payloads from others.

    `host`, `ports`: where to listen; an inclusive range of ports to try, None for any.
    `advertise`: the host in `address`, which others connect to. `token`: 16 bytes that identify the
    job; a connection with another token is closed. That protects against mistakes; against
    attackers, all connections are encrypted and authenticated with `secrets`. `job`: see
    `PayloadServer`.
    `socks_proxy`: `tcp://host:port` of the proxy to the holders, or empty. `stall_ns`: a fetch goes
    on to the next holder if one delivers no verified byte for this long.

    Raises AddressInUse if no port of the range is free, ConfigError for a value that cannot work.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int] | None,
        *,
        token: bytes,
        advertise: str = "",
        stall_ns: int = 10 * SECOND,
        chunk_bytes: int = 4 << 20,
        secrets: Secrets | None = None,
        socks_proxy: str = "",
        job: bytes = b"",
    ) -> None:
        if not 0 < chunk_bytes <= LENGTH_MAX:
            rule = f"must be 1..{LENGTH_MAX}"
            raise ConfigError("chunk_bytes", chunk_bytes, rule, "4 MiB suits most links.")
        if stall_ns <= 0:
            raise ConfigError(
                "stall_ns", stall_ns, "must be positive", "Ten seconds suit most links."
            )
        self._token, self._secret = token, secrets.own if secrets else None
        self._chunk_bytes, self._stall_ns = chunk_bytes, stall_ns
        self._proxy = Address(*host_and_port(socks_proxy)) if socks_proxy else None
        advertised(host, advertise, 0)  # before anything is open
        self._holder = PayloadServer(host, ports, token, stall_ns, secrets, job)
        self.address: Address = advertised(host, advertise, self._holder.port)
        self.bytes_received = 0
        self._lock = threading.Lock()
        self._idle: dict[Address, list[ReaderEnd]] = {}
        self._attempts: set[TransferAttempt] = set()
        self._quick: dict[Address, int] = {}
        """Size of the first request to each holder that has answered quickly. Loop thread only."""
        self._thin: dict[Address, asyncio.Semaphore] = {}
        self._turns = asyncio.Semaphore(FETCHES_MAX)
        self._threads = KeptThreads(f"mend-lane-fetch-{self._holder.port}")
        self._closed = False

    @property
    def bytes_sent(self) -> int:
        """Bytes of all replies with their headers; a reply is counted when it begins."""
        return self._holder.bytes_sent

    @property
    def rejected(self) -> int:
        """Connections that were closed because they were foreign, malformed, or one too many."""
        return self._holder.rejected

    @property
    def bytes_relayed(self) -> int:
        """Bytes that this process has relayed for other ranks of its rack, in both directions."""
        return self._holder.bytes_relayed

    def relay(self, lanes: Mapping[bytes, Address]) -> None:
        """See `PayloadServer.relay`."""
        self._holder.relay(lanes)

    def relay_sideband(self, port: int, ranks: int) -> None:
        """Relay connections that greet as ZeroMQ to this port of the loopback interface. `ranks`:
        number of ranks of the rack, each of which has one connection."""
        self._holder.relay_sideband(Address("127.0.0.1", port), CARRIED_MAX + ranks)

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        """Serve `view` (C-contiguous) until `drop(key)`. Its bytes must not change meanwhile; with
        `growth`, only those that are there must not. Any thread."""
        self._holder.serve(key, view, growth)

    def find_by(self, find: Callable[[bytes], bytes | None]) -> None:
        """See `PayloadServer.find_by`."""
        self._holder.find_by(find)

    def drop(self, key: bytes) -> None:
        """Stop serving `key` at the next chunk."""
        self._holder.drop(key)

    async def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str | None,
        into: memoryview,
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Fill `into` with the bytes of `key`.

        `extent`: the place of `into` in the payload; None: it is the whole payload. `checksum`:
        xxh3_128 hex of the bytes of `into`; empty: the caller verifies them; None: it is not known
        yet, and `meter` gets the checksum of what arrived. `meter`: counts the verified bytes.

        Holders are asked in turn, again and again while a turn brings verified bytes. One that
        answers "gone" is not asked again. Verified bytes are kept from holder to holder. The call
        returns, raises or lets a cancellation out only when no thread can write to `into` any more.

        Raises PeerUnreachable, PayloadGone, TransferStalled or ChecksumMismatch if no holder is
        left.
        """
        ensure(len(key) == KEY_BYTES, "no key of a payload", key=key)
        if not into.nbytes:
            return
        if not holders:
            raise no_holder(key)
        async with self._turns, self._turn_of(holders[0]):
            with into.cast("B") as flat:  # released at the end: the caller may resize its buffer
                incoming = Incoming(flat, checksum, extent, meter)
                ends = await self._ask_around(incoming, list(holders), key)
        if ends:
            raise most_telling(ends, key)

    def _turn_of(self, holder: Address) -> AbstractAsyncContextManager[None]:
        if holder in self._quick:
            return contextlib.nullcontext()
        return self._thin.setdefault(holder, asyncio.Semaphore(THIN_MAX))

    async def _ask_around(self, incoming: Incoming, holders: list[Address], key: bytes) -> Ends:
        asking = ask_around(holders)
        try:
            holder = next(asking)
            while True:
                asked = Asked(await self._attempt(incoming, holder, key), incoming.verified)
                if asked.error is None and (wrong := incoming.settle()) is not None:
                    culprit, error = wrong
                    asked = Asked(error, incoming.verified, culprit)
                holder = asking.send(asked)
        except StopIteration as ended:
            ends: Ends = ended.value
            return ends

    async def _attempt(
        self, incoming: Incoming, holder: Address, key: bytes
    ) -> TransportError | None:
        """Pull what is missing from one holder. None: it is complete."""
        loop = asyncio.get_running_loop()
        try:
            where = await self._resolve(self._proxy or holder)
        except (OSError, UnicodeError) as error:
            return _unreachable(holder, error)
        if self._closed:
            return _closed_during_fetch()
        attempt = TransferAttempt(
            incoming,
            holder,
            key,
            chunk_bytes=self._chunk_bytes,
            stall_s=self._stall_ns / SECOND,
            clock_s=loop.time,
            count=self._count,
            first=self._quick.get(holder, 0),
        )
        several = STREAMS if len(self._attempts) < WIDE_MAX else 1
        streams = min(several, 1 + len(incoming.into) // STREAM_BYTES_MIN)
        self._attempts.add(attempt)
        work = functools.partial(self._stream, attempt, where)
        waits = functools.partial(self._stream_later, attempt, where)
        ended = self._in_threads(attempt, [work, *[waits] * (streams - 1)])
        try:
            await self._watch(attempt, ended)
        finally:
            attempt.stop(None)
            self._attempts.discard(attempt)
            self._learn(attempt)
            await _settled(ended)
        ended.result()  # a bug in a stream must not look like a fault of the network
        if incoming.complete:
            return None
        return attempt.error or _unreachable(holder, attempt.broken)

    def _learn(self, attempt: TransferAttempt) -> None:
        """Remember how to begin the next pull from this holder."""
        if attempt.quick is False or isinstance(attempt.error, TransferStalled):
            self._quick.pop(attempt.holder, None)
        elif attempt.quick:
            known = self._quick.get(attempt.holder, LENGTH_MIN)
            if attempt.swift is not None:
                known = LENGTH_SWIFT if attempt.swift else LENGTH_MIN
            self._quick[attempt.holder] = known

    async def _watch(self, attempt: TransferAttempt, ended: asyncio.Future[None]) -> None:
        """Wait for the streams; stop them if no verified byte arrives for the stall time-out.

        It counts checks, not differences of a clock, so a process that was frozen itself does not
        blame the holder.
        """
        seen, quiet = attempt.incoming.verified, 0
        interval_s = self._stall_ns / SECOND / WATCHES_PER_STALL
        while not ended.done():
            await asyncio.wait((ended,), timeout=interval_s)
            moved = attempt.incoming.verified > seen
            seen, quiet = attempt.incoming.verified, 0 if moved else quiet + 1
            if quiet >= WATCHES_PER_STALL and not attempt.stopped:
                self._forget(attempt.holder)
                attempt.stop(
                    TransferStalled(
                        f"holder {attempt.holder.host}:{attempt.holder.port}: no verified byte for "
                        f"{self._stall_ns / SECOND:g} s at {seen} of "
                        f"{len(attempt.incoming.into)} bytes. If small messages pass and payloads "
                        "do not, look at the path MTU; if it is only slow, raise "
                        "transfer_stall_s."
                    )
                )

    async def _resolve(self, holder: Address) -> _AddrInfo:
        """Resolve a holder. Numeric addresses need no resolver; names are looked up in a separate
        thread, because the resolver may be slow."""
        kind = socket.SOCK_STREAM
        if not 0 < holder.port <= 0xFFFF:
            raise OSError(f"{holder.port} is not a port")
        try:
            numeric = socket.AI_NUMERICHOST
            return socket.getaddrinfo(holder.host, holder.port, type=kind, flags=numeric)[0]
        except socket.gaierror:
            looking = _looked_up(holder, kind)
            return await asyncio.wait_for(looking, CONNECT_NS_MAX / SECOND)

    def _in_threads(
        self, attempt: TransferAttempt, jobs: Sequence[Callable[[], None]]
    ) -> asyncio.Future[None]:
        """Run the jobs of an attempt concurrently. The future is done when all have ended, so the
        loop wakes up once."""
        future, failed, order = Future[None](), list[BaseException](), itertools.count(1)
        future.set_running_or_notify_cancel()

        def run(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException as error:
                failed.append(error)
            if next(order) < len(jobs):
                return
            if not failed:
                future.set_result(None)
            elif isinstance(failed[0], Exception):
                future.set_exception(failed[0])
            else:  # would end the event loop
                future.set_exception(RuntimeError(f"a pull was ended by {failed[0]!r}"))

        for number, job in enumerate(jobs):
            try:
                self._threads.run(functools.partial(run, job))
            except RuntimeError as error:  # no more threads now; the others may do all the work
                attempt.broken = error
                # The other connections wait for the first one.
                run(attempt.widens.set if number == 0 else lambda: None)
        return asyncio.wrap_future(future)

    def _stream_later(self, attempt: TransferAttempt, where: _AddrInfo) -> None:
        """A further connection, which begins once the first has had a quick reply or has ended."""
        attempt.widens.wait()
        if not attempt.stopped and not attempt.incoming.all_taken:
            self._share(attempt, where)

    def _stream(self, attempt: TransferAttempt, where: _AddrInfo) -> None:
        """The first connection."""
        try:
            self._share(attempt, where)
        finally:
            attempt.widens.set()

    def _share(self, attempt: TransferAttempt, where: _AddrInfo) -> None:
        """One connection's share of an attempt, in a thread.

        Tries an idle connection first. It may have died unnoticed, so if it fails, a new one is
        opened.
        """
        borrowed = self._borrow(attempt.holder)
        for link in (borrowed, None) if borrowed else (None,):
            keep, pooled = False, link is not None
            try:
                sock = link.sock if link is not None else socket.socket(*where[:3])
            except OSError as error:  # the limit of open files
                attempt.broken = error
                return
            try:
                if not attempt.adopt(sock):
                    return
                if link is None:
                    link = self._connect(sock, where, attempt.holder)
                attempt.pull(link)
                keep = True
                return
            except (PayloadGone, ChecksumMismatch) as error:
                attempt.stop(error)  # replies are in flight, so the connection is not kept
                return
            except (OSError, EOFError) as error:
                if not pooled:
                    attempt.broken = error
            finally:
                if attempt.release(sock) and keep and link is not None:
                    self._give(attempt.holder, link)
                else:
                    sock.close()

    def _connect(self, sock: socket.socket, where: _AddrInfo, holder: Address) -> ReaderEnd:
        sock.settimeout(min(self._stall_ns // 2, CONNECT_NS_MAX) / SECOND)
        sock.connect(where[4])
        if self._proxy is not None:
            connect_through(sock, holder)
        sock.settimeout(None)
        # The loop ends a stalled receive; the kernel's time-out is for the case that it is gone.
        tune(
            sock, receive_ns=2 * self._stall_ns, send_ns=self._stall_ns, dead_ns=self._stall_ns // 2
        )
        return ReaderEnd(sock, self._token, self._secret)

    def _borrow(self, holder: Address) -> ReaderEnd | None:
        """An idle connection that is not known to be dead."""
        while True:
            with self._lock:
                idle = self._idle.get(holder)
                if not idle:
                    return None
                link = idle.pop()
            if is_quiet(link.sock):
                return link
            link.sock.close()

    def _give(self, holder: Address, link: ReaderEnd) -> None:
        with self._lock:
            if holder not in self._idle:
                self._close_dead()
            idle = self._idle.setdefault(holder, [])
            if not self._closed and len(idle) < STREAMS:
                idle.append(link)
                return
        link.sock.close()

    def _close_dead(self) -> None:
        """Close dead idle connections: to a rack that has moved to another address none is ever
        borrowed again. The caller holds the lock."""
        for holder, links in list(self._idle.items()):
            dead = [link for link in links if not is_quiet(link.sock)]
            for link in dead:
                links.remove(link)
                link.sock.close()
            if dead and not links:
                del self._idle[holder]

    def _forget(self, holder: Address) -> None:
        """Close all idle connections to a holder."""
        with self._lock:
            idle = self._idle.pop(holder, [])
        for link in idle:
            link.sock.close()

    def _count(self, received: int) -> None:
        with self._lock:
            self.bytes_received += received

    def close(self) -> None:
        """End transfers and threads and free the port, within seconds, whatever the peers do."""
        if self._closed:
            return
        self._closed = True
        for attempt in tuple(self._attempts):
            attempt.stop(_closed_during_fetch())
        self._holder.close()
        self._threads.close(CLOSE_S)
        for holder in tuple(self._idle):
            self._forget(holder)


def _looked_up(holder: Address, kind: socket.SocketKind) -> asyncio.Future[_AddrInfo]:
    """Look a name up in a thread of its own, which is not joined, because a resolver may hang.
    Raises OSError."""
    future: Future[_AddrInfo] = Future()

    def look_up() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(socket.getaddrinfo(holder.host, holder.port, type=kind)[0])
            except Exception as error:
                future.set_exception(error)

    try:
        threading.Thread(target=look_up, name="mend-lane-lookup", daemon=True).start()
    except RuntimeError as error:  # Python 3.12 starts no thread at its end
        raise OSError(f"its name was not looked up: {error}") from error
    return asyncio.wrap_future(future)


async def _settled(ended: asyncio.Future[None]) -> None:
    """Wait for threads that were asked to stop. A cancellation meanwhile is delayed until then."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait((ended,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _closed_during_fetch() -> PeerUnreachable:
    return PeerUnreachable("lane: closed during a fetch. End the users of a lane before it.")


def _unreachable(holder: Address, error: Exception | None) -> PeerUnreachable:
    remedy = (
        "Check that it runs, that the port is open, and that both belong to the same job, with "
        "the same key and encrypt_payloads."
    )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "Raise the limit of open files here (ulimit -n)."
    elif isinstance(error, RuntimeError):  # no thread could be started
        remedy = "Raise the limit of processes and threads here (ulimit -u)."
    cause = error or "the connection broke"
    return PeerUnreachable(f"holder {holder.host}:{holder.port}: {cause}. {remedy}")
