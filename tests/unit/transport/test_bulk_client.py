"""BulkLane against holders that misbehave, and readers that do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import xxhash

from mend.errors import (
    AddressInUse,
    ChecksumMismatch,
    ConfigError,
    PayloadGone,
    PeerUnreachable,
    TransferStalled,
    TransportError,
)
from mend.transport import bulk_server
from mend.transport.bulk_client import STREAMS, THIN_MAX, WIDE_MAX, BulkLane, checksum_of
from mend.transport.bulk_transfer import AHEAD, LENGTH_FIRST, TransferAttempt
from mend.transport.bulk_wire import (
    GONE,
    HELLO,
    LENGTH_MAX,
    OK,
    REPLY,
    REPLY_MAGIC,
    REQUEST,
    REQUEST_MAGIC,
    hello_bytes,
)
from mend.types import KEY_BYTES, SECOND, Address, Member, offer_key

TOKEN = b"0123456789abcdef"
KEY = offer_key(Member(0, 1), 0, 0, 1)
SHORT_STALL_NS = SECOND // 5

MakeLane = Callable[..., BulkLane]
Send = Callable[[bytes], None]
ReplayScript = Callable[[Send, int, int, int], None]
"""(send, n-th request of the connection, offset, length); raises to hang up."""


class HangUp(Exception):
    """Raised by a script to close the connection."""


def payload(size: int) -> bytes:
    return b"".join((i * 2654435761).to_bytes(8, "big") for i in range(size // 8 + 1))[:size]


def reply(sent: bytes, offset: int, length: int) -> bytes:
    part = sent[offset : offset + length]
    return REPLY.pack(REPLY_MAGIC, OK, len(sent), length, xxhash.xxh3_128_digest(part)) + part


@contextlib.contextmanager
def scripted(script: ReplayScript) -> Iterator[Address]:
    """A holder whose answers the test writes."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_now: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def converse(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, HangUp):
            sock.recv(HELLO.size, socket.MSG_WAITALL)
            number = 0
            while len(request := sock.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
                _, _, offset, length = REQUEST.unpack(request)
                script(sock.sendall, number, offset, length)
                number += 1

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                open_now.append(sock)
                threads.append(threading.Thread(target=converse, args=(sock,)))
                threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield Address(*listener.getsockname())
    finally:
        for sock in (listener, *open_now):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        threads[0].join()
        for thread in threads:
            thread.join()
        listener.close()


@pytest.fixture
async def lane() -> AsyncIterator[MakeLane]:
    made: list[BulkLane] = []

    def make(stall_ns: int = 10 * SECOND, token: bytes = TOKEN, **settings: object) -> BulkLane:
        made.append(BulkLane("127.0.0.1", None, token=token, stall_ns=stall_ns, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def pulled(lane: BulkLane, holders: list[Address], sent: bytes, checksum: str = "") -> bytes:
    into = bytearray(len(sent))
    await lane.fetch(holders, KEY, checksum, memoryview(into))
    return bytes(into)


async def test_a_broken_transfer_goes_on_at_the_next_holder_from_the_last_verified_byte(
    lane: MakeLane,
) -> None:
    sent, reader, good = payload(900_000), lane(), lane()
    good.serve(KEY, memoryview(sent))
    given: list[int] = []

    def breaks(send: Send, number: int, offset: int, length: int) -> None:
        if number == 2:
            send(reply(sent, offset, length)[: length // 2])
            raise HangUp
        given.append(length)
        send(reply(sent, offset, length))

    with scripted(breaks) as broken:
        assert await pulled(reader, [broken, good.address], sent, checksum_of(sent)) == sent
    asked_again = good.bytes_sent - (len(sent) - sum(given))
    assert sum(given) > 0
    assert 0 <= asked_again < 64 * REPLY.size  # headers only: no verified byte is sent twice


async def test_one_holder_that_keeps_breaking_is_asked_while_it_helps(lane: MakeLane) -> None:
    sent = payload(800_000)

    def one_reply_each(send: Send, number: int, offset: int, length: int) -> None:
        if number:
            raise HangUp
        send(reply(sent, offset, length))

    with scripted(one_reply_each) as moody:
        assert await pulled(lane(), [moody], sent, checksum_of(sent)) == sent


async def test_a_silent_holder_is_left_after_the_stall_timeout(
    lane: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, reader, good = payload(300_000), lane(), lane()
    good.serve(KEY, memoryview(sent))
    watch = reader._watch

    async def watches(attempt: TransferAttempt, threads: set[asyncio.Future[None]]) -> None:
        """On a busy machine the good one may be silent for as long."""
        reader._stall_ns = 60 * SECOND if attempt.holder == good.address else SHORT_STALL_NS
        await watch(attempt, threads)

    monkeypatch.setattr(reader, "_watch", watches)

    def then_silent(send: Send, number: int, offset: int, length: int) -> None:
        if number == 0:
            send(reply(sent, offset, length))

    with scripted(then_silent) as silent:
        assert await pulled(reader, [silent, good.address], sent, checksum_of(sent)) == sent
        assert good.bytes_sent < len(sent)


async def test_when_every_holder_is_silent_the_fetch_stalled(lane: MakeLane) -> None:
    with (
        scripted(lambda *_: None) as one,
        scripted(lambda *_: None) as two,
        pytest.raises(TransferStalled, match=r"no verified byte.*transfer_stall_s"),
    ):
        await pulled(lane(SHORT_STALL_NS), [one, two], payload(300_000))


async def test_bytes_that_are_not_verified_do_not_count_as_progress(lane: MakeLane) -> None:
    """A holder that trickles forever must not hold a fetch forever."""
    sent, ended = payload(300_000), threading.Event()

    def trickles(send: Send, number: int, offset: int, length: int) -> None:
        for byte in reply(sent, offset, length):
            if ended.wait(0.01):
                raise HangUp
            send(bytes([byte]))

    with scripted(trickles) as slow:
        try:
            with pytest.raises(TransferStalled):
                await pulled(lane(SHORT_STALL_NS), [slow], sent)
        finally:
            ended.set()


async def test_a_chunk_that_arrives_changed_is_asked_for_again(lane: MakeLane) -> None:
    sent, flips = payload(900_000), iter([True])

    def flips_one_bit(send: Send, number: int, offset: int, length: int) -> None:
        whole = bytearray(reply(sent, offset, length))
        if number == 1 and next(flips, False):
            whole[-1] ^= 1
        send(bytes(whole))

    with scripted(flips_one_bit) as noisy:
        assert await pulled(lane(), [noisy], sent, checksum_of(sent)) == sent


async def test_a_holder_that_always_changes_bytes_is_given_up(lane: MakeLane) -> None:
    sent = payload(100_000)

    def flips(send: Send, number: int, offset: int, length: int) -> None:
        whole = bytearray(reply(sent, offset, length))
        whole[-1] ^= 1
        send(bytes(whole))

    with scripted(flips) as noisy, pytest.raises(ChecksumMismatch, match="did not arrive"):
        await pulled(lane(), [noisy], sent)


async def test_a_payload_dropped_on_its_way_is_gone_not_damaged(lane: MakeLane) -> None:
    """Its buffer was used again while a chunk was sent: a changed chunk, then `gone`."""
    sent, replies = payload(100_000), iter(["changed"])

    def changed_then_gone(send: Send, number: int, offset: int, length: int) -> None:
        if next(replies, "gone") == "changed":
            send(reply(sent, offset, length)[:-1] + b"?")
        else:
            send(REPLY.pack(REPLY_MAGIC, GONE, 0, 0, b""))

    with scripted(changed_then_gone) as holder, pytest.raises(PayloadGone):
        await pulled(lane(), [holder], sent)


async def test_the_first_half_of_a_wrong_payload_does_not_condemn_the_second_holder(
    lane: MakeLane,
) -> None:
    sent, reader, good = payload(500_000), lane(), lane()
    wrong = bytes(len(sent))
    good.serve(KEY, memoryview(sent))

    def wrong_then_breaks(send: Send, number: int, offset: int, length: int) -> None:
        if number == 2:
            raise HangUp
        send(reply(wrong, offset, length))

    with scripted(wrong_then_breaks) as liar:
        assert await pulled(reader, [liar, good.address], sent, checksum_of(sent)) == sent


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n" * 9, REPLY.pack(REPLY_MAGIC, 9, 0, 0, b"")]
)
async def test_a_holder_that_talks_nonsense_is_unreachable(lane: MakeLane, answer: bytes) -> None:
    with scripted(lambda send, *_: send(answer)) as strange, pytest.raises(PeerUnreachable):
        await pulled(lane(), [strange], b"four")


async def test_a_reply_of_another_length_is_not_written(lane: MakeLane) -> None:
    sent = payload(100_000)

    def too_long(send: Send, number: int, offset: int, length: int) -> None:
        send(REPLY.pack(REPLY_MAGIC, OK, len(sent), length + 1, b"") + bytes(length + 1))

    with scripted(too_long) as holder, pytest.raises(PeerUnreachable):
        await pulled(lane(), [holder], sent)


async def test_requests_are_sent_ahead_and_grow(lane: MakeLane) -> None:
    """The holder must know what to send next, or the wire idles for a round trip per chunk."""
    sent, lengths, held = payload(4 << 20), [], []
    answered = threading.Event()

    def answers_late(send: Send, number: int, offset: int, length: int) -> None:
        lengths.append(length)
        held.append(reply(sent, offset, length))
        if number >= AHEAD - 1:  # would wait for ever if requests were not sent ahead
            for late in held:
                send(late)
            held.clear()
            answered.set()

    with scripted(answers_late) as holder:
        reader = lane(chunk_bytes=512 << 10)
        into = bytearray(len(sent))
        fetching = asyncio.create_task(reader.fetch([holder], KEY, "", memoryview(into)[:]))
        await asyncio.to_thread(answered.wait)
        fetching.cancel()
        await asyncio.wait([fetching])
    assert lengths[:AHEAD] == [LENGTH_FIRST] * AHEAD


async def test_pulls_from_a_holder_that_has_not_answered_ask_for_little(lane: MakeLane) -> None:
    """All fragments of a model are pulled at the start. Over 8 Mbit/s their 90 connections asked
    for 18 MB at once, so no chunk was whole within the time-out, and every pull began again."""
    asked, answers, sent = threading.Semaphore(0), threading.Event(), payload(2 << 20)
    lengths: list[int] = []

    def late(send: Send, number: int, offset: int, length: int) -> None:
        if not answers.is_set():
            lengths.append(length)
            asked.release()
        answers.wait()
        send(reply(sent, offset, length))

    with scripted(late) as holder, contextlib.ExitStack() as undo:
        undo.callback(answers.set)
        reader = lane()
        pulls = [asyncio.create_task(pulled(reader, [holder], sent)) for _ in range(3 * THIN_MAX)]
        for _ in range(THIN_MAX):
            await asyncio.to_thread(asked.acquire)
        assert lengths == [LENGTH_FIRST] * THIN_MAX
        answers.set()
        assert await asyncio.gather(*pulls) == [sent] * len(pulls)


async def test_cancelling_stops_a_stuck_fetch_at_once(lane: MakeLane) -> None:
    asked = threading.Event()
    with scripted(lambda *_: asked.set()) as silent:
        into = bytearray(b"before")
        view = memoryview(into)
        fetching = asyncio.create_task(lane().fetch([silent], KEY, "", view))
        await asyncio.to_thread(asked.wait)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):  # pytest's time-out is far below the stall's
            await fetching
        view.release()
        into.extend(b", and free")  # BufferError if a thread still held it


@pytest.mark.parametrize("size", [100_000, 8 << 20])
async def test_pulls_from_slow_holders_keep_no_other_waiting(lane: MakeLane, size: int) -> None:
    """Eight racks that merge a slice each pull from seven others, of each a payload and a merged
    slice. Eight transfers at a time filled up with those of slow racks, and what the quick ones
    served waited behind them while the link was idle. Nor does each take four threads."""
    hang, sent, good, reader = threading.Event(), payload(size), lane(), lane()
    good.serve(KEY, memoryview(sent))

    def silent(send: Send, number: int, offset: int, length: int) -> None:
        hang.wait()

    with scripted(silent) as dead, contextlib.ExitStack() as undo:
        undo.callback(hang.set)
        stuck = [asyncio.create_task(pulled(reader, [dead], sent)) for _ in range(2 * 7 - 1)]
        await asyncio.sleep(0)  # they come before it
        quick = asyncio.create_task(pulled(reader, [good.address], sent))
        first, _ = await asyncio.wait([quick, *stuck], return_when=asyncio.FIRST_COMPLETED)
        names = [thread.name for thread in threading.enumerate()]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert await quick == sent
    assert first == {quick}
    pulling = sum(name.startswith("mend-lane-fetch") for name in names)
    assert pulling <= WIDE_MAX * STREAMS + len(stuck) + 1 - WIDE_MAX


async def test_close_does_not_wait_for_stuck_peers(lane: MakeLane) -> None:
    """One peer does not answer us, another does not read what it asked for; nothing may be left."""
    asked, big = threading.Event(), bytes(64 << 20)
    with scripted(lambda *_: asked.set()) as silent:
        stuck = lane()
        stuck.serve(KEY, memoryview(big))
        fetching = asyncio.create_task(stuck.fetch([silent], KEY, "", memoryview(bytearray(9))))
        with socket.create_connection(stuck.address) as deaf:
            deaf.sendall(hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, 0, len(big)))
            deaf.recv(1)
            await asyncio.to_thread(asked.wait)
            port = str(stuck.address.port)
            assert any(port in thread.name for thread in threading.enumerate())
            stuck.close()
            assert not any(port in thread.name for thread in threading.enumerate())
            with pytest.raises(TransportError):
                await fetching
        BulkLane("127.0.0.1", (int(port), int(port)), token=TOKEN).close()


async def test_a_fetch_after_close_is_refused(lane: MakeLane) -> None:
    closed = lane()
    closed.close()
    with pytest.raises(PeerUnreachable, match="closed"):
        await pulled(closed, [lane().address], b"four")


async def test_another_jobs_connection_is_closed(lane: MakeLane) -> None:
    holder, stranger = lane(), lane(token=b"another-job-here")
    holder.serve(KEY, memoryview(b"ours"))
    with pytest.raises(PeerUnreachable, match="same job"):
        await pulled(stranger, [holder.address], b"ours")
    holder.close()  # its threads have ended: the count is complete
    assert holder.rejected > 0
    assert holder.bytes_sent == 0


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        hello_bytes(TOKEN) + b"x" * REQUEST.size,
        hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, 0, LENGTH_MAX + 1),
        hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, 0, 0),
        hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, 2, 3),
        hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, (1 << 64) - 1, 1),
        hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, 0, 1)[:-1],
        hello_bytes(TOKEN)[:5],
    ],
    ids=[
        "http", "magic", "oversize", "empty", "past-end", "overflow", "half-request", "half-hello",
    ],
)  # fmt: skip
async def test_garbage_closes_its_connection_and_no_other(lane: MakeLane, said: bytes) -> None:
    holder = lane()
    holder.serve(KEY, memoryview(b"four"))
    with socket.create_connection(holder.address) as vandal, contextlib.suppress(OSError):
        vandal.sendall(said)
        vandal.shutdown(socket.SHUT_WR)
        while vandal.recv(4096):
            pass  # until the holder hangs up
    assert await pulled(lane(), [holder.address], b"four") == b"four"
    holder.close()
    assert holder.rejected == 1


async def test_flood_of_connections_is_admitted_at_a_limited_rate(
    lane: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slowness can only make it take less: the count is held against the time that there was.
    Without the limit the flood is rejected at once."""
    admit_ns, connections = SECOND // 20, 4
    holder = lane()  # whose queue is long, so that the flood waits in it
    monkeypatch.setattr(bulk_server, "ADMIT_NS", admit_ns)
    monkeypatch.setattr(bulk_server, "CONNECTIONS_MAX", connections)
    holder.serve(KEY, memoryview(b"four"))
    since_ns = time.monotonic_ns()
    with contextlib.ExitStack() as opened:
        for _ in range(10 * connections):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(holder.address)
        assert await pulled(lane(), [holder.address], b"four") == b"four"
        assert holder.rejected <= connections + (time.monotonic_ns() - since_ns) // admit_ns


async def test_drop_takes_effect_at_the_next_chunk(lane: MakeLane) -> None:
    holder = lane()
    holder.serve(KEY, memoryview(b"abcdef"))
    with socket.create_connection(holder.address) as reader:
        reader.sendall(hello_bytes(TOKEN) + REQUEST.pack(REQUEST_MAGIC, KEY, 0, 3))
        assert reader.recv(REPLY.size + 3, socket.MSG_WAITALL) == reply(b"abcdef", 0, 3)
        holder.drop(KEY)
        reader.sendall(REQUEST.pack(REQUEST_MAGIC, KEY, 3, 3))
        answer = REPLY.unpack(reader.recv(REPLY.size, socket.MSG_WAITALL))
        assert answer[:2] == (REPLY_MAGIC, GONE)


async def test_idle_connections_make_room_for_new_ones(
    lane: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_server, "CONNECTIONS_MAX", 2)
    holder = lane()
    holder.serve(KEY, memoryview(b"four"))
    for _ in range(6):  # each keeps its connection; one refused for lack of an idle place retries
        assert await pulled(lane(), [holder.address], b"four") == b"four"


async def test_a_pooled_connection_that_died_is_replaced(lane: MakeLane) -> None:
    sent, lives = payload(10_000), iter([1, 2])

    def one_fetch_per_life(send: Send, number: int, offset: int, length: int) -> None:
        if number:  # the second fetch comes over the pooled connection and is hung up on
            next(lives)
            raise HangUp
        send(reply(sent, offset, length))

    with scripted(one_fetch_per_life) as holder:
        reader = lane()
        assert await pulled(reader, [holder], sent) == sent
        assert await pulled(reader, [holder], sent) == sent
    assert next(lives) == 2


def test_all_ports_taken_is_said_with_its_remedy() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as owner:
        port = owner.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)):
            bulk_server.listen("127.0.0.1", (port, port))


def test_the_range_of_ports_is_inclusive() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as owner:
        port = owner.getsockname()[1]
        second = BulkLane("127.0.0.1", (port, min(port + 50, 65535)), token=TOKEN, advertise="me")
        second.close()
    assert second.address.host == "me"
    assert port < second.address.port <= port + 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"}, {"token": b"short"}, {"ports": (9, 3)}, {"stall_ns": 0},
        {"chunk_bytes": 0}, {"chunk_bytes": LENGTH_MAX + 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    settings = {"host": "127.0.0.1", "ports": None, "token": TOKEN} | wrong
    with pytest.raises(ConfigError):
        BulkLane(settings.pop("host"), settings.pop("ports"), **settings)


def test_a_host_that_is_not_ours_is_said() -> None:
    with pytest.raises(TransportError, match="interface"):
        BulkLane("192.0.2.1", None, token=TOKEN)


@pytest.mark.parametrize(
    "holder",
    [Address("no-such-host.invalid", 9), Address("127.0.0.1", 70_000), Address("x" * 300, 9)],
)
async def test_an_address_that_cannot_be_is_unreachable(lane: MakeLane, holder: Address) -> None:
    with pytest.raises(PeerUnreachable):
        await pulled(lane(), [holder], b"four")


async def test_without_a_file_left_to_open_a_holder_is_asked_again_later(lane: MakeLane) -> None:
    """The script has opened its last file. The error left the lane as it was, and stopped the loop
    of the rack, though the next pull would have worked."""
    holder, reader = lane(), lane()
    holder.serve(KEY, memoryview(b"four"))
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(next_ := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_, most))
    try:
        with pytest.raises(PeerUnreachable, match=r"Too many open files.*ulimit -n"):
            await pulled(reader, [holder.address], b"four")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert await pulled(reader, [holder.address], b"four") == b"four"


async def test_a_thread_that_cannot_be_started_costs_one_connection(
    lane: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has its limit of threads, which the loaders of a script may reach for a moment.
    The holder accepted nothing any more after it, without a word, for the rest of the job."""
    holder, reader = lane(), lane()
    holder.serve(KEY, memoryview(b"four"))
    start, full = threading.Thread.start, threading.Event()

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("mend-lane-serve") and not full.is_set():
            full.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(PeerUnreachable):
        await pulled(reader, [holder.address], b"four")
    assert full.is_set()
    assert await pulled(reader, [holder.address], b"four") == b"four"


@pytest.mark.parametrize("refused", [1, 99], ids=["one", "all"])
async def test_threads_that_a_pull_cannot_start_are_no_fault_of_the_rack(
    lane: MakeLane, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """The error left the lane as it was, and stopped the loop of the rack; and a first connection
    without a thread kept the others waiting for the stall time-out."""
    holder, reader = lane(), lane()
    sent = payload(3 << 20)
    holder.serve(KEY, memoryview(sent))
    start, left = threading.Thread.start, [refused]

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith("mend-lane-fetch") and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    if refused == 1:
        assert await pulled(reader, [holder.address], sent) == sent
        return
    with pytest.raises(PeerUnreachable, match="ulimit -u"):
        await pulled(reader, [holder.address], sent)
    left[0] = 0
    assert await pulled(reader, [holder.address], sent) == sent


async def test_connections_to_racks_that_have_moved_are_closed(lane: MakeLane) -> None:
    """A rack that was started again listened elsewhere, and the files of its former life stayed
    open for the rest of the job."""
    reader, files = lane(), []
    for _ in range(6):
        holder = lane()
        holder.serve(KEY, memoryview(b"four"))
        assert await pulled(reader, [holder.address], b"four") == b"four"
        holder.close()
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[-1] <= files[1] + 1


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.ECONNABORTED, errno.EPROTO, errno.EMFILE])
async def test_accept_error_of_one_connection_ends_no_other(
    lane: MakeLane, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """accept(2) tells errors of the network, and of a kernel without memory, that pass. After most
    of them the holder accepted nothing any more, without a word, for the rest of the job."""
    accept, told = socket.socket.accept, threading.Event()

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if not told.is_set():
            told.set()
            raise OSError(error, os.strerror(error))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    holder, reader = lane(), lane()
    holder.serve(KEY, memoryview(b"four"))
    assert await pulled(reader, [holder.address], b"four") == b"four"
    assert told.is_set()


async def test_names_are_resolved_and_ipv6_works(lane: MakeLane) -> None:
    holder = BulkLane("::1", None, token=TOKEN)
    holder.serve(KEY, memoryview(b"four"))
    assert await pulled(lane(), [holder.address], b"four") == b"four"
    holder.close()
    named = BulkLane("localhost", None, token=TOKEN)
    named.serve(KEY, memoryview(b"four"))
    assert await pulled(lane(), [named.address], b"four") == b"four"
    named.close()


ENDS_IN_A_PULL = """
import asyncio, socket, sys, threading, weakref
from mend.errors import TransportError
from mend.transport.bulk_client import BulkLane
from mend.types import SECOND, Address

holder = socket.create_server(("127.0.0.1", 0))
lane = BulkLane("127.0.0.1", None, token=b"0123456789abcdef", stall_ns=600 * SECOND)
loop, pulling, ended = asyncio.new_event_loop(), threading.Event(), threading.Event()

async def pull(port):
    try:
        await lane.fetch([Address(sys.argv[1], port)], bytes({key}), "", memoryview(bytearray(8)))
    except TransportError as error:
        print(type(error).__name__)
    ended.set()

async def again():
    await pull(1)  # a new pull, now that the main thread has ended

def end():
    print("under way" if not ended.is_set() else "over")
    loop.call_soon_threadsafe(lane.close)
    ended.wait(60)
    ended.clear()
    asyncio.run_coroutine_threadsafe(again(), loop)
    ended.wait(60)
    print("farewell")

weakref.finalize(lane, end)
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(pull(holder.getsockname()[1]), loop)
connection = holder.accept()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_interpreter_end_during_a_pull_leaves_the_pull_to_the_finalizer(host: str) -> None:
    """The interpreter joined the pull's threads first and refused new ones, so that the finalizer
    came too late and a rack left without a farewell."""
    script = ENDS_IN_A_PULL.replace("{key}", str(KEY_BYTES))
    ended = subprocess.run(
        [sys.executable, "-c", script, host], capture_output=True, text=True, timeout=60
    )
    said = ["under way", "PeerUnreachable", "PeerUnreachable", "farewell"]
    assert ended.stdout.split("\n")[:-1] == said, ended.stderr
