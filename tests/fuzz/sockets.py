"""Bytes into real sockets: the bulk lane from both sides, and the sideband of a witness."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading

import xxhash
import zmq

from mend.coordination import wire
from mend.coordination.acceptor_host import Follower, WitnessFollower
from mend.coordination.coordinator import Coordinator
from mend.coordination.messages import Envelope, Message, Refusal
from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.engine.witness import Witness
from mend.errors import MendError, OtherVersion, TransportError
from mend.status.event_log import EventLog
from mend.transport.bulk_client import BulkLane
from mend.transport.bulk_link import SEALED_MAGIC
from mend.transport.bulk_wire import (
    GONE,
    HELLO,
    OK,
    REPLY,
    REPLY_MAGIC,
    REQUEST,
    REQUEST_MAGIC,
    WIRE_VERSION,
    checksum_of,
    hello_bytes,
)
from mend.transport.security import NAME_BYTES, RANDOM_BYTES, TAG_BYTES, Secret, Secrets
from mend.transport.zap import pin
from mend.types import KEY_BYTES, SECOND, WITNESS, Address, Member, Peer
from tests.fuzz.jobs import snapshots
from tests.fuzz.machines import lie, strange
from tests.fuzz.mutate import EDGES, damaged, joined, mutated, parts_of
from tests.fuzz.shapes import frame_of, tree_of

ANSWER_SECONDS_MAX = 10.0
"""A side that says nothing and does not close for so long hangs."""

ASK, ANSWER, PLACE = b"Q", b"A", b"P"

KEY, TOKEN = b"k" * KEY_BYTES, b"t" * 16
PAYLOAD = bytes(range(256)) * 16

HOSTS = (
    "", "\0", "127.0.0.1\0", "a\0b", "\udcff", "a" * 300, "." * 70, "..", "é" * 80, "[::1]",
    "::1%nope",
    "256.1.1.1", "127.1", "0x7f.1", " 127.0.0.1", "127.0.0.1:80", "tcp://127.0.0.1", "-", "\n",
)  # fmt: skip
"""Hosts that no name server is asked for."""


SECRET = b"fuzz" * 8


class Lane:
    """What a stranger asks of a holder, what a holder answers, and where it is said to be."""

    name, inputs = "lane", 10_000
    secrets: Secrets | None = None
    read_first = HELLO.size + REQUEST.size

    def __init__(self, seed: int) -> None:
        self.lane = BulkLane(
            "127.0.0.1", None, token=TOKEN, stall_ns=SECOND, chunk_bytes=1024, secrets=self.secrets
        )
        self.lane.serve(KEY, memoryview(PAYLOAD))
        self.door = self.lane.address
        self.loop = asyncio.new_event_loop()
        self.holder = FakeHolder(self.read_first)
        self._taken = 0

    def example(self, rng: random.Random) -> bytes:
        kind = rng.choice((ASK, ASK, ANSWER, ANSWER, PLACE))
        if kind == PLACE:
            port = rng.choice((0, 1, -1, 65_535, 65_536, 2**63))
            return (
                kind
                + struct.pack("!q", port % 2**62)
                + rng.choice(HOSTS).encode(errors="surrogateescape")
            )
        good = self._asked(rng) if kind == ASK else self._answered(rng)
        whole = rng.random() < 0.5
        return kind + (damaged(rng, good) if whole else mutated(rng, good, good))

    def take(self, data: bytes) -> str:
        kind, rest = data[:1], data[1:]
        self._taken += 1
        if self._taken % 100 == 0:
            self._still_serves()
        if kind == ASK:
            return self._ask(rest)
        if kind == ANSWER:
            self.holder.answer = rest
            return self._fetch(self.holder.address)
        (port,) = struct.unpack_from("!q", rest)
        return self._fetch(Address(rest[8:].decode(errors="surrogateescape"), port))

    def _ask(self, data: bytes) -> str:
        """The holder answers or closes; it never keeps the connection of one that is done."""
        got = bytearray()
        connected = socket.create_connection(self.door, ANSWER_SECONDS_MAX)
        with connected as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while piece := sock.recv(1 << 16):
                    got += piece
            except TimeoutError:
                raise
            except OSError:
                return "closed"  # in the middle of what was said
        return self._judged(bytes(got)) if got else "closed"

    def _judged(self, got: bytes) -> str:
        assert got[:4] == REPLY_MAGIC, got[:40]
        return "accepted" if got[4] == OK else "gone, or outside of the payload"

    def _asked(self, rng: random.Random) -> bytes:
        """A whole conversation of somebody who pulls."""
        parts = [hello_bytes(TOKEN)]
        for _ in range(rng.choice((1, 1, 2, 5))):
            offset = rng.choice((0, 1, 4095, 4096, *(edge % 2**64 for edge in EDGES)))
            length = rng.choice((1, 100, 4096, 64 << 20, *(edge % 2**32 for edge in EDGES)))
            key = KEY if rng.random() < 0.8 else rng.randbytes(KEY_BYTES)
            parts.append(REQUEST.pack(REQUEST_MAGIC, key, offset, length))
        return b"".join(parts)

    def _answered(self, rng: random.Random) -> bytes:
        """Replies to the requests of a fetch, which begin at 0 and ask for 1024 bytes each."""
        parts = []
        for start in range(0, 1024 * rng.choice((1, 2, 4)), 1024):
            part = PAYLOAD[start : start + 1024]
            if rng.random() < 0.1:
                parts.append(REPLY.pack(REPLY_MAGIC, GONE, 0, 0, b""))
            else:
                digest = xxhash.xxh3_128_digest(part)
                parts.append(REPLY.pack(REPLY_MAGIC, OK, len(PAYLOAD), 1024, digest) + part)
        return b"".join(parts)

    def _fetch(self, holder: Address) -> str:
        room = bytearray(len(PAYLOAD))
        checksum = checksum_of(PAYLOAD)
        try:
            self.loop.run_until_complete(self.lane.fetch([holder], KEY, checksum, memoryview(room)))
        except TransportError as error:
            return type(error).__name__
        assert room == PAYLOAD, "other bytes than announced"
        return "accepted"

    def _still_serves(self) -> None:
        assert self._fetch(self.door) == "accepted", "the holder does not answer any more"

    def close(self) -> None:
        self.lane.close()
        self.holder.close()
        self.loop.close()


class RelayedLane(Lane):
    """The same at the port of the rack's leader, which carries on what names the rank."""

    name = "relayed-lane"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = int(taken.getsockname()[1])
        leads = b"l" * 16
        self.leader = BulkLane("127.0.0.1", (port, port), token=leads, job=leads, stall_ns=SECOND)
        self.leader.relay({TOKEN: self.lane.address})
        self.door = self.leader.address

    def close(self) -> None:
        self.leader.close()
        super().close()


class SealedLane(Lane):
    """The same with keys: a holder answers the greeting of whoever has none and nothing behind it,
    and nothing that is not a holder of the job is believed."""

    name = "sealed-lane"
    secrets = Secrets([SECRET])
    read_first = HELLO.size + NAME_BYTES + RANDOM_BYTES

    def _asked(self, rng: random.Random) -> bytes:
        greeting = HELLO.pack(SEALED_MAGIC, WIRE_VERSION, TOKEN) + Secret(SECRET).name
        return greeting + rng.randbytes(RANDOM_BYTES) + super()._asked(rng)[HELLO.size :]

    def _answered(self, rng: random.Random) -> bytes:
        return SEALED_MAGIC + rng.randbytes(RANDOM_BYTES + TAG_BYTES) + super()._answered(rng)

    def _judged(self, got: bytes) -> str:
        assert got[:4] == SEALED_MAGIC, got[:40]
        assert len(got) == 4 + RANDOM_BYTES + TAG_BYTES, "more than the answer to a greeting"
        return "accepted"


class FakeHolder:
    """Reads so many bytes (a greeting, a request), answers `answer` and closes."""

    def __init__(self, read_first: int) -> None:
        self.answer, self._read_first = b"", read_first
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="fuzz-holder", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(ANSWER_SECONDS_MAX)
                sock.recv(self._read_first, socket.MSG_WAITALL)
                sock.sendall(self.answer)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(ANSWER_SECONDS_MAX)


FRAMES, RAW = b"F", b"R"
MEMBER = Peer(1, 0)

MARKER = "marker"
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL" + b"\0" * 48
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


class Sideband:
    """Frames and raw bytes to a witness in the middle of a job: it goes on listening."""

    name, inputs = "sideband", 10_000
    secrets: tuple[bytes, ...] = ()

    def __init__(self, seed: int) -> None:
        self.snapshots = [each for each in snapshots() if each.kind is Coordinator]
        self._open()

    def _open(self) -> None:
        self.recorder = EventLog({"rack": WITNESS, "rank": 0}, None)
        options = IoLoopOptions(
            "tcp://127.0.0.1:0", "127.0.0.1", "", None, SECOND, secrets=self.secrets
        )
        me = Peer(WITNESS, 0)
        self.io_loop = IoLoop(me, Member(WITNESS, 1), "sim", options, self.recorder)
        self.ear = Ear([self._witness(each.machine()) for each in self.snapshots])
        self.io_loop.attach(self.ear)
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        if self.secrets:
            member = Secret(self.secrets[0])
            pin(self.dealer, member.client(MEMBER), member.server())
        self.dealer.connect(self.io_loop.address)
        host, _, port = self.io_loop.address.removeprefix("tcp://").rpartition(":")
        self.where = (host, int(port))
        self._sync()

    def _witness(self, machine: Coordinator) -> Witness:
        follower = WitnessFollower(Follower(machine.member, machine.acceptor, machine.me, SECOND))
        return Witness(machine, follower, self.io_loop, lambda line: None)

    def example(self, rng: random.Random) -> bytes:
        if rng.random() < 0.05:
            greeting = GREETING + READY + b"\0\x05" + rng.randbytes(5)
            return RAW + mutated(rng, greeting, greeting)
        parts = [self._frame(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 5)))]
        return FRAMES + joined(parts)

    def _frame(self, rng: random.Random) -> bytes:
        draw = rng.random()
        if draw < 0.6:
            return lie(rng, rng.choice(self.snapshots))
        frame = frame_of(tree_of(rng, wild=rng.choice((0.0, 0.05))))
        return frame if draw < 0.8 else mutated(rng, frame, frame)

    def take(self, data: bytes) -> str:
        refused, heard, dropped = self._counts()
        if data[:1] == RAW:
            with socket.create_connection(self.where, ANSWER_SECONDS_MAX) as sock:
                sock.sendall(data[1:])
        else:
            self.dealer.send_multipart(parts_of(data[1:]))
        self._sync()
        after = self._counts()
        if data[:1] == RAW:
            return "raw bytes"
        if after[1] > heard:
            return "accepted"
        if after[0] > refused:
            return "not a message"
        return "several parts" if after[2] > dropped else "too long"

    def _counts(self) -> tuple[int, int, int]:
        sideband = self.io_loop._sideband
        return self.io_loop.frames_refused, self.ear.heard_count, sideband.dropped

    def _sync(self) -> None:
        """Everything before has been heard: one more frame comes through."""
        self.ear.marked.clear()
        marker = Envelope("sim", 1, 0, 0, Refusal(0, MARKER, ""))
        self.dealer.send(wire.encode(marker))
        came = self.ear.marked.wait(ANSWER_SECONDS_MAX)
        failure = self.ear.failure
        if failure is not None:
            self.close()
            self._open()
            raise failure.__cause__ or failure
        assert came, "nothing is heard any more"

    def close(self) -> None:
        self.dealer.close()
        self.context.term()
        self.io_loop.close()
        self.recorder.close()


class KeyedSideband(Sideband):
    """The same with keys: frames of a member that says anything, and raw bytes of a stranger."""

    name = "keyed-sideband"
    secrets = (SECRET,)


class Ear:
    """Host of several witnesses, each in another job's middle; they hear all from a stranger."""

    def __init__(self, witnesses: list[Witness]) -> None:
        self._witnesses = witnesses
        self.heard_count = 0
        self.marked = threading.Event()
        self.failure: MendError | None = None

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        if isinstance(body, Refusal) and body.kind == MARKER:
            self.marked.set()
            return
        self.heard_count += 1
        for witness in self._witnesses:
            witness.heard(peer, *strange(incarnation, body))

    def tick(self) -> None:
        pass

    def deadline_ns(self) -> int | None:
        return None

    def crashed(self, error: MendError) -> None:
        self.failure = error
        self.marked.set()

    def foreign(self, found: OtherVersion) -> None:
        for witness in self._witnesses:
            witness.foreign(found)
