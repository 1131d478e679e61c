"""Both ends of a lane connection with keys, over a pair of sockets."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from mend.transport.bulk_link import BATCH_PIECES, PIECE_BYTES, HolderEnd, ReaderEnd
from mend.transport.security import TAG_BYTES, BadSeal, Secret, Secrets
from mend.types import Member, offer_key

OURS, TOKEN = b"1" * 32, b"0123456789abcdef"
KEY = offer_key(Member(0, 1), 0, 0, 1)
PAYLOAD = bytes(range(251)) * 20_000
"""Four pieces, which are two batches, and a part of one."""

Change = Callable[[bytearray], None]
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def answered(sock: socket.socket, holder: HolderEnd) -> None:
    """The holder's side of a connection, until it ends."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if holder.greet():
            request = holder.request(sock.recv(1))
            assert request is not None
            key, offset, length = request
            holder.give(len(PAYLOAD), key, offset, memoryview(PAYLOAD)[offset : offset + length])
    sock.shutdown(socket.SHUT_RDWR)


def pulled(pair: Pair, conceal: bool, sock: socket.socket) -> tuple[bool, bytes]:
    """Whether all pieces opened, and what came. `sock`: what the reader reads from."""
    holder = HolderEnd(pair[0], TOKEN, Secrets([OURS], conceal=conceal))
    serving = threading.Thread(target=answered, args=(pair[0], holder))
    serving.start()
    reader = ReaderEnd(sock, TOKEN, Secret(OURS, conceal=conceal))
    reader.ask(KEY, 0, len(PAYLOAD))
    header = reader.header(KEY, 0)
    into = memoryview(bytearray(header.length))
    whole = reader.body(KEY, 0, header.digest, into)
    sock.close()  # what it did not read is of no use to it
    serving.join()
    return whole, bytes(into)


class Wire(socket.socket):
    """A socket whose reader gets the pieces of a reply changed. Keeps what was sent to it."""

    change: Change = staticmethod(lambda piece: None)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        got = super().recv_into(buffer, nbytes, flags)
        if len(buffer) >= PIECE_BYTES:
            self.seen = bytearray(buffer[:got])
            self.change(self.seen)
            buffer[:got] = self.seen
        return got


@pytest.mark.parametrize("conceal", [True, False])
def test_only_concealed_payloads_are_not_to_be_read_on_the_way(pair: Pair, conceal: bool) -> None:
    wire = Wire(fileno=pair[1].detach())
    assert pulled(pair, conceal, wire) == (True, PAYLOAD)
    assert (bytes(wire.seen[:64]) in PAYLOAD) != conceal


def flipped(piece: bytearray) -> None:
    piece[100] ^= 1


def opens(pair: Pair, conceal: bool, change: Change) -> bool:
    wire = Wire(fileno=pair[1].detach())
    wire.change = change
    return pulled(pair, conceal, wire)[0]


@pytest.mark.parametrize("conceal", [True, False])
def test_a_changed_piece_does_not_open(pair: Pair, conceal: bool) -> None:
    assert not opens(pair, conceal, flipped)


@pytest.mark.parametrize("conceal", [True, False])
def test_pieces_do_not_change_places(pair: Pair, conceal: bool) -> None:
    """Each of them was sealed by the holder, for this connection."""
    first: list[bytes] = []
    batch = BATCH_PIECES * (PIECE_BYTES + TAG_BYTES) if conceal else PIECE_BYTES

    def swap(piece: bytearray) -> None:
        first.append(bytes(piece))
        piece[:] = first[0]

    assert not opens(pair, conceal, swap)
    assert len(first[0]) == batch


def test_pieces_of_one_batch_do_not_change_places(pair: Pair) -> None:
    def swap(batch: bytearray) -> None:
        size = PIECE_BYTES + TAG_BYTES
        batch[:] = batch[size : 2 * size] + batch[:size] + batch[2 * size :]

    assert not opens(pair, True, swap)


@pytest.mark.parametrize("conceal", [True, False])
def test_concealing_end_refuses_a_peer_that_does_not_conceal(pair: Pair, conceal: bool) -> None:
    holder = HolderEnd(pair[0], TOKEN, Secrets([OURS], conceal=conceal))
    serving = threading.Thread(target=answered, args=(pair[0], holder))
    serving.start()
    with pytest.raises((EOFError, OSError)):
        ReaderEnd(pair[1], TOKEN, Secret(OURS, conceal=not conceal))
    serving.join()
    assert not holder.greeted


@pytest.mark.parametrize("conceal", [True, False])
@pytest.mark.parametrize("opens", [True, False])
def test_a_piece_that_is_sealed_or_opened_lets_other_threads_run(
    conceal: bool, opens: bool
) -> None:
    """Pieces that held the interpreter's lock made the steps of a GPU a quarter longer, as its
    training thread could not launch kernels."""
    plain, sealed = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray(PIECE_BYTES + 16))
    channel, _ = Secret(OURS, conceal=conceal).lane(TOKEN, bytes(32), bytes(32))
    go, ran = threading.Event(), list[bool]()

    def run() -> None:
        go.wait()
        ran.append(True)

    def work() -> None:
        if opens:
            room = (sealed, b"", plain) if conceal else (sealed[:TAG_BYTES], plain, plain[:0])
            with contextlib.suppress(BadSeal):  # found at the end of the piece
                channel.open(*room)
        else:
            channel.seal(*((plain, b"", sealed) if conceal else (b"", plain, sealed[:TAG_BYTES])))

    other, before = threading.Thread(target=run), sys.getswitchinterval()
    other.start()
    sys.setswitchinterval(1e6)  # so no thread is asked for the lock
    try:
        go.set()
        for _ in range(10_000):
            if not ran:
                work()
        found = bool(ran)
    finally:
        sys.setswitchinterval(before)
        other.join()
    assert found


def test_open_and_concealed_connections_have_other_keys() -> None:
    """So that changing the magic on the way is of no use."""
    seals = []
    for conceal in (True, False):
        channel, _ = Secret(OURS, conceal=conceal).lane(TOKEN, bytes(32), bytes(32))
        seals.append(bytearray(TAG_BYTES))
        channel.seal(b"", b"about", memoryview(seals[-1]))
    assert seals[0] != seals[1]
