"""What somebody on the network could do to a job: each attack is made against a process without a
key, where it works or is mended, and against one with a key, where nothing of it arrives."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from mend.consensus.ballots import NUMBER_MAX, ballot_of
from mend.consensus.records import AcceptorState
from mend.coordination import wire
from mend.coordination.messages import (
    Challenge,
    Envelope,
    Hello,
    Message,
    Prepare,
    RankOrders,
    RankReport,
    Refusal,
    Report,
    Retire,
    Vote,
)
from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.errors import MendError, OtherVersion, TransportError
from mend.status.event_log import EventLog
from mend.status.messages import JobStatus, Look, decode_view, encode_look, encode_view
from mend.transport import zap
from mend.transport.bulk_server import CONNECTIONS_MAX
from mend.transport.bulk_wire import HELLO, OK, REPLY, REQUEST, REQUEST_MAGIC, hello_bytes
from mend.transport.security import PERSON as PERSON_PEER
from mend.transport.security import Secret
from mend.transport.status_client import StatusClient, Way
from mend.types import PERSON, SECOND, Address, Member, Peer, offer_key
from tests.process.conftest import Jobs
from tests.process.racks import LIMIT_S, START_GATE, until
from tests.unit.coordination.nouns import hello, report
from tests.unit.status.seen import followed, view

JOB, OURS, THEIRS = "run7", b"1" * 32, b"2" * 32
HERE, RACK_1 = Peer(0, 0), Member(1, 77)
KEY = offer_key(RACK_1, 0, 0, 1)
PAYLOAD = bytes(range(256)) * 4096
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
"""Either side may be the first to see that the other speaks without keys."""

GREETING_BYTES = 64
"""Of ZMTP, before which libzmq reads nothing else."""


@dataclass
class Ear:
    """Hears for a process."""

    found: list[tuple[Peer, int, Message]] = field(default_factory=list)

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        self.found.append((peer, incarnation, body))

    def tick(self) -> None: ...

    def deadline_ns(self) -> int | None:
        return None

    def crashed(self, error: MendError) -> None:
        raise error

    def foreign(self, found: OtherVersion) -> None: ...

    def of(self, body: Message) -> bool:
        return any(said == body for _, _, said in self.found)


@dataclass
class Target:
    """A leader's process, as the network sees it."""

    io_loop: IoLoop
    ear: Ear

    @property
    def port(self) -> int:
        return int(self.io_loop.address.rpartition(":")[2])


Targets = Callable[..., Target]


@pytest.fixture
def target() -> Iterator[Targets]:
    made: list[tuple[IoLoop, EventLog]] = []

    def make(me: Peer = HERE, *secrets: bytes) -> Target:
        options = IoLoopOptions(
            "tcp://127.0.0.1:0", "127.0.0.1", "", None, 5 * SECOND, secrets=secrets,
            peers=(CONFIGURED,),
        )  # fmt: skip
        recorder = EventLog({"rack": me.rack, "rank": 0}, None)
        io_loop, ear = IoLoop(me, Member(me.rack, 5), JOB, options, recorder), Ear()
        made.append((io_loop, recorder))
        io_loop.observe(lambda ended: view(me.rack), followed)
        io_loop.attach(ear)
        return Target(io_loop, ear)

    yield make
    for io_loop, recorder in made:
        io_loop.close()
        recorder.close()


@pytest.fixture
def dealer() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    context, made, monitors = zmq.Context(), list[zmq.Socket[bytes]](), list[Any]()

    def connect(address: str, client: Peer | None = None) -> zmq.Socket[bytes]:
        """`client`: with the key of the job, as that process."""
        made.append(context.socket(zmq.DEALER))
        monitors.append(made[-1].get_monitor_socket(REFUSED))
        if client is not None:
            zap.pin(made[-1], Secret(OURS).client(client), Secret(OURS).server())
        made[-1].connect(address)
        return made[-1]

    yield connect
    for each in (*made, *monitors):
        each.close(linger=0)
    context.term()


def framed(body: Message, rack: int = 1, rank: int = 0, life: int = RACK_1.incarnation) -> bytes:
    return wire.encode(Envelope(JOB, rack, rank, life, body))


HUGE, LAST = 2**62, NUMBER_MAX - 1
FORGED: dict[str, tuple[bytes, Message]] = {}


def forged(row: str, body: Message, **who: int) -> None:
    FORGED[row] = framed(body, **who), body


def says_hello(rack: int, address: str) -> Hello:
    said = hello(rack)
    return replace(said, seat=replace(said.seat, address=address))


_ballot = AcceptorState(ballot_of(LAST, 1, 77), 0, 0, 0, 0, "", ())
_gone = replace(report(1, 1), gone=True, hurry=True, leaving=True)
_orders = RankOrders(HUGE, 0, (), (), (), (), (), (), (), (), ("", ""), True)
forged("1 a refusal", Refusal(5, "taken", "forged"))
forged("2 a report with the last serial", replace(report(1, 1), serial=HUGE))
forged("2 a rank's report", RankReport(HUGE, 1, 1, 0, (0,), (), (), (), (), False, False, False))
forged("2 orders of a leader", _orders, rack=0, life=5)
forged("3 a ballot of the last ballot", Vote(HUGE, "", _ballot, ()))
forged("4 gone, hurry and leaving", _gone)
_hello = {rack: says_hello(rack, "tcp://127.0.0.1:1") for rack in range(2)}
forged("5 a hello of rack 0", _hello[0], rack=0)
forged("8 a hello of a silent rack", _hello[1])
forged("a challenge", Challenge(5, 7))
forged("a retirement", Retire(1, 7), rack=PERSON)


@pytest.mark.parametrize("row", FORGED)
def test_forged_frame_is_accepted_without_a_key_and_refused_with_one(
    target: Targets, dealer: Callable[..., zmq.Socket[bytes]], row: str
) -> None:
    frame, body = FORGED[row]
    bare, keyed = target(), target(HERE, OURS)
    dealer(bare.io_loop.address).send(frame)
    until(lambda: bare.ear.of(body), f"{row} is heard where there is no key")
    attacker, friend = dealer(keyed.io_loop.address), dealer(keyed.io_loop.address, Peer(2, 0))
    other = Refusal(5, "a friend", "")
    attacker.send(frame)
    until_refused(attacker)
    friend.send(framed(other, rack=2))
    until(lambda: keyed.ear.of(other), "a friend is heard")
    assert keyed.ear.found == [(Peer(2, 0), 77, other)]
    assert keyed.io_loop.frames_refused == 0, "the loop was not even bothered (row 10)"


def until_refused(attacker: zmq.Socket[bytes]) -> None:
    """Its connection has ended before a handshake, and with it all that it had to say."""
    told = attacker.get_monitor_socket()
    until(lambda: bool(told.poll(100)), "it is refused")


def test_a_member_says_nothing_in_the_name_of_another_process(
    target: Targets, dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    """As far as it uses its own key: whoever has the secret could derive the other's."""
    keyed = target(HERE, OURS)
    member = dealer(keyed.io_loop.address, Peer(2, 0))
    member.send(FORGED["2 a report with the last serial"][0])
    member.send(framed(Retire(1, 7), rack=2))
    member.send(framed(other := Refusal(5, "its own", ""), rack=2))
    until(lambda: keyed.ear.of(other), "what it says itself")
    assert [body for _, _, body in keyed.ear.found] == [other]
    assert keyed.io_loop.frames_refused == 2


def test_without_keys_a_second_connection_does_not_speak_for_a_live_process(
    target: Targets, dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    """Rows 2 to 4: one report with serial 2^62 ended all merging, as serials only grow."""
    bare = target()
    rack, attacker = dealer(bare.io_loop.address), dealer(bare.io_loop.address)
    first = replace(report(1, 1), serial=1)
    rack.send(framed(first))
    until(lambda: bare.ear.of(first), "the rack is heard")
    attacker.send(FORGED["2 a report with the last serial"][0])
    until(lambda: bare.io_loop.frames_refused == 1, "the forged one is refused")
    rack.send(framed(later := replace(first, serial=2)))
    until(lambda: bare.ear.of(later), "the rack is heard on")
    rack.close(linger=0)
    again = dealer(bare.io_loop.address)

    def says() -> bool:
        again.send(framed(replace(first, serial=3)))
        return bare.ear.of(replace(first, serial=3))

    until(says, "a rack that has connected anew is heard at once")


ELSEWHERE, CONFIGURED = "tcp://192.0.2.7:21900", "tcp://192.0.2.8:21900"
"""Of the addresses that are kept for documents: nobody's."""

NOWHERE = "tcp://127.0.0.1:\N{SUPERSCRIPT TWO}"
"""A port of digits that are no number. One such hello stopped the loop of a rack without a key."""


def test_without_keys_nobody_is_answered_elsewhere_than_he_is_or_the_settings_say(
    target: Targets, dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    """Row 9: who coordinates connects to the address in a hello, and a witness that was started
    again to that of a candidate. With keys only a member can name one."""
    bare, keyed = target(), target(HERE, OURS)
    stranger, member = dealer(bare.io_loop.address), dealer(keyed.io_loop.address, Peer(1, 0))
    ask = Prepare(1, ballot_of(2, 1, 77), "c0ffee", 1, ELSEWHERE)
    for body in (says_hello(1, ELSEWHERE), ask):
        stranger.send(framed(body))
        member.send(framed(body))
        until(lambda body=body: keyed.ear.of(body), "a member may have any address")
    own, named = (says_hello(1, f"tcp://{host}:1") for host in ("127.0.0.1", "localhost"))
    stranger.send(framed(says_hello(1, NOWHERE)))
    stranger.send(framed(own))
    stranger.send(framed(settled := says_hello(1, CONFIGURED)))

    def says() -> bool:
        stranger.send(framed(named))  # as a rack does, again and again: the name is looked up
        return bare.ear.of(named)

    until(says, "a name of its own machine is taken once it is known")
    found = [body for _, _, body in bare.ear.found]
    assert found[:2] == [own, settled]
    assert ask not in found
    assert bare.io_loop.frames_refused >= 3


def test_status_view_contains_no_incarnation() -> None:
    assert "incarnation" not in str(JobStatus.__struct_fields__)
    assert str(RACK_1.incarnation).encode() not in encode_view(view(0))


@pytest.mark.parametrize("secrets", [(), (THEIRS,), (OURS,)], ids=["none", "theirs", "ours"])
def test_status_client_without_the_key_gets_no_answer(
    target: Targets, secrets: tuple[bytes, ...]
) -> None:
    keyed, answers = target(HERE, OURS), list[tuple[str, bytes]]()
    address, sideband = keyed.io_loop.address, keyed.io_loop._sideband
    with contextlib.closing(StatusClient(1 << 18, secrets)) as onlooker:
        onlooker.watch(address)

        def looks() -> None:
            onlooker.ask(address, encode_look(Look("")))
            answers.extend(onlooker.collect(0.1))

        def refused() -> bool:
            looks()
            if not secrets:
                return onlooker.way(address) is Way.LOCKED
            # `mend top` said that nobody listens there.
            return sideband.strangers > 0 and onlooker.way(address) is Way.HUNG_UP

        def answered() -> bool:
            looks()
            return bool(answers)

        until(answered if secrets == (OURS,) else refused, "the look is answered, or refused")
    assert {decode_view(each).rack for _, each in answers} == ({0} if secrets == (OURS,) else set())


# ------------------------------------------------------------------ the lane


def fetch(reader: Target, holder: Address) -> bytes:
    into, ends = bytearray(len(PAYLOAD)), list[Exception | None]()
    reader.io_loop.call(
        lambda: reader.io_loop.fetch([holder], KEY, "", memoryview(into), ends.append)
    )
    until(lambda: bool(ends), "the fetch ends")
    if ends[0] is not None:
        raise ends[0]
    return bytes(into)


def serving(target: Targets, *secrets: bytes) -> Target:
    holder, served = target(HERE, *secrets), threading.Event()

    def serve() -> None:
        holder.io_loop.serve(KEY, memoryview(PAYLOAD))
        served.set()

    holder.io_loop.call(serve)
    assert served.wait(LIMIT_S)
    return holder


def token() -> bytes:
    return hashlib.sha256(b"mend lane " + JOB.encode()).digest()[:16]


@pytest.mark.parametrize("secrets", [(), (OURS,)])
@pytest.mark.parametrize("begun", [b"", hello_bytes(token())[:9], hello_bytes(token()) + b"m"])
def test_connections_that_stop_halfway_do_not_stop_the_exchange(
    target: Targets, secrets: tuple[bytes, ...], begun: bytes
) -> None:
    """Row 6: with 64 of them nobody else was let in, and they had all the time in the world."""
    holder, reader = serving(target, *secrets), target(Peer(1, 0), *secrets)
    address = holder.io_loop.lane_address
    with contextlib.ExitStack() as opened:
        for _ in range(2 * CONNECTIONS_MAX):
            sock = opened.enter_context(socket.create_connection(address))
            with contextlib.suppress(OSError):
                sock.sendall(begun)
        assert fetch(reader, address) == PAYLOAD


@pytest.mark.parametrize("secrets", [(), (OURS,)])
def test_half_a_request_is_not_waited_for(target: Targets, secrets: tuple[bytes, ...]) -> None:
    holder = serving(target, *secrets)
    with socket.create_connection(holder.io_loop.lane_address, 30) as sock:
        sock.sendall(hello_bytes(token()) + REQUEST_MAGIC)
        assert is_closed(sock)


def is_closed(sock: socket.socket) -> bool:
    """By the other side, which has sent nothing before."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_offers_are_read_off_the_lane_without_a_key_and_not_with_one(target: Targets) -> None:
    """Row 7: the token is a hash of the job's name, and the numbers of offers can be guessed."""
    asked = hello_bytes(token()) + REQUEST.pack(REQUEST_MAGIC, KEY, 0, 1000)
    with socket.create_connection(serving(target).io_loop.lane_address, 30) as sock:
        sock.sendall(asked)
        answer = sock.recv(REPLY.size + 1000, socket.MSG_WAITALL)
    assert REPLY.unpack(answer[: REPLY.size])[1] == OK
    assert answer[REPLY.size :] == PAYLOAD[:1000]
    keyed = serving(target, OURS)
    with socket.create_connection(keyed.io_loop.lane_address, 30) as sock:
        sock.sendall(asked + bytes(HELLO.size))
        assert is_closed(sock)
    for secrets in ((), (THEIRS,)):
        with pytest.raises(TransportError):
            fetch(target(Peer(1, 0), *secrets), keyed.io_loop.lane_address)
    assert fetch(target(Peer(1, 0), OURS), keyed.io_loop.lane_address) == PAYLOAD


# ------------------------------------------------------------------ recordings


@contextlib.contextmanager
def recorder(upstream: Address) -> Iterator[tuple[Address, bytearray]]:
    """Passes one connection on, and keeps what the one who connects says."""
    said, listener = bytearray(), socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def pass_on(source: socket.socket, sink: socket.socket, *, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if keep:
                    said.extend(chunk)
                sink.sendall(chunk)

    def accept() -> None:
        with contextlib.suppress(OSError):
            ends.append(listener.accept()[0])
            ends.append(socket.create_connection(upstream))
            back = threading.Thread(target=pass_on, args=(ends[1], ends[0]), kwargs={"keep": False})
            back.start()
            pass_on(ends[0], ends[1], keep=True)
            for end in ends:
                end.shutdown(socket.SHUT_RDWR)
            back.join()

    thread = threading.Thread(target=accept)
    thread.start()
    yield Address(*listener.getsockname()), said
    for end in (*ends, listener):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    thread.join()
    for end in (*ends, listener):
        end.close()


@pytest.mark.parametrize("secrets", [(), (OURS,)])
def test_a_recording_of_an_earlier_run_seats_nobody(
    target: Targets, dealer: Callable[..., zmq.Socket[bytes]], secrets: tuple[bytes, ...]
) -> None:
    """Row 13: replayed before the start it put a ghost into Genesis."""
    first, body = target(HERE, *secrets), says_hello(1, "tcp://127.0.0.1:1")
    with recorder(Address("127.0.0.1", first.port)) as (address, said):
        way = dealer(f"tcp://127.0.0.1:{address.port}", Peer(1, 0) if secrets else None)
        way.send(framed(body))
        until(lambda: first.ear.of(body), "the rack itself is heard")
        way.close(linger=0)
    second = target(HERE, *secrets)
    with socket.create_connection(("127.0.0.1", second.port)) as sock:
        sock.sendall(bytes(said[:GREETING_BYTES]))
        sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
        sock.sendall(bytes(said[GREETING_BYTES:]))
        if secrets:
            sock.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass
            assert second.ear.found == []
        else:
            until(lambda: second.ear.of(body), "without keys the ghost is heard")


# ------------------------------------------------------------------ a whole job


def test_a_job_with_a_key_trains_the_same_bits_and_a_rack_with_another_key_is_not_in(
    jobs: Jobs,
) -> None:
    config = {"lockstep": True, "fragments": 2, "sync_period_steps": 6, "overlap_steps": 1}
    bare = jobs(name="run").run(steps=18, config=config)
    job = jobs(name="run", key=True, witness=True)
    keyed = job.run(steps=18, config=config)
    for one, other in zip(bare, keyed, strict=True):
        assert (one.losses, one.weights, one.merges) == (other.losses, other.weights, other.merges)
        assert one.status["protection"] == "loopback"
        assert other.status["protection"] == "keys"
    strange = jobs(name="run", key=True)
    assert strange.key_file is not None
    elsewhere = strange.folder / "other.key"
    elsewhere.write_text(strange.key_file.read_text().replace("AAEC", "BBEC"))
    elsewhere.chmod(0o600)
    gated = {START_GATE: strange.gate()}
    strange.start(0, steps=18, config=config, env=gated)
    strange.start(1, steps=18, config=config, env={**gated, "MEND_KEY_FILE": str(elsewhere)})
    assert strange.event(0, "strangers")["handshakes"] > 0
    strange.event(1, "waiting")
    Path(strange.gate()).touch()
    for rack in range(2):
        assert strange.ended(rack) == 1
    told = strange.result(1).error
    assert told[0] == "StartTimeout"
    assert "is the key the same (key_file)" in told[1]


def test_person_is_one_peer_in_both_halves() -> None:
    assert PERSON_PEER.rack == PERSON
    assert isinstance(FORGED["4 gone, hurry and leaving"][1], Report)
