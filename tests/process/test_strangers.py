"""Anybody may connect. What does not belong to the job is counted and changes nothing.

The run is made in lockstep twice, left alone and under fire, and must be the same to the last bit.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from mend.consensus.ballots import ballot_of
from mend.consensus.records import AcceptorState
from mend.coordination import wire
from mend.coordination.messages import Envelope, Orders, Prepare, RankReport, Report, Vote
from mend.transport.bulk_wire import hello_bytes
from tests.process.conftest import Jobs
from tests.process.racks import Job, Result

CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 2, "sync_period_steps": 6, "overlap_steps": 1,
    "wait_timeout_s": 60,
}  # fmt: skip
STEPS = 24
LOTS = 10
"""Times that each wrong frame is sent: few enough that a rack, which reads a flood slowly, has read
those that it was sent first before it ends."""


def refused_frames(job: Job, rack: int) -> dict[str, bytes]:
    """Everything that is no message of this job, by what is wrong with it."""
    life = job.event(rack, "start")["member"][1]
    real = wire.encode(Envelope(job.name, rack, 0, life, report(1)))
    return {
        "empty": b"", "garbage": bytes(range(256)) * 8, "truncated": real[: len(real) // 2],
        "longer": real + b"\x00", "other wire version": real[:3] + b"\x63" + real[4:],
        "other job": wire.encode(Envelope("another", rack, 0, life, report(9))),
        "not a message": wire.MAGIC + bytes([wire.VERSION]) + b"\x93\x01\x02\x03",
    }  # fmt: skip


def ignored_frames(job: Job) -> list[bytes]:
    """Well-formed messages in the name of a rack of this job, that nobody may act on: of an earlier
    life, long overtaken, or about fragments that do not exist."""
    frames = []
    for rack in range(2):
        life = job.event(rack, "start")["member"][1]
        for incarnation, serial in ((life + 1, 2**60), (life, 0)):
            frames.append(wire.encode(Envelope(job.name, rack, 0, incarnation, report(serial))))
            part = RankReport(serial, 999, 1, 99, (99, 99), (), (), (), (), True, True, True)
            frames.append(wire.encode(Envelope(job.name, rack, 0, incarnation, part)))
        orders = Orders(
            2**60, life, ballot_of(9, 0), "", 0, "", (), 99, 99, (), (), (0, 0), (), (), ()
        )
        frames.append(wire.encode(Envelope(job.name, 0, 0, life + 1, orders)))
        ask = Prepare(2**60, ballot_of(9, 1 - rack), "c0ffee", 1)
        frames.append(wire.encode(Envelope(job.name, 1 - rack, 0, life, ask)))
        acceptor_state = AcceptorState(ballot_of(9, 0), ballot_of(9, 0), 99, 99, 99, "", ())
        vote = Vote(2**60, "c0ffee", acceptor_state, (99, 99))
        frames.append(wire.encode(Envelope(job.name, rack, 0, life, vote)))
        wrong = RankReport(2**60, 999, 1, 99, (99,), (), (), (), (), True, True, True)
        frames.append(wire.encode(Envelope(job.name, rack, 0, life, wrong)))
    return frames


def report(serial: int) -> Report:
    """It claims that its rack is done and gone."""
    acceptor_state = AcceptorState(ballot_of(1, 0), ballot_of(1, 0), 99, 99, 99, "", ())
    return Report(
        serial, 0, acceptor_state, True, 999, 1, (99, 99), (), (), (), (), (),
        leaving=True, hurry=True, idle=True, gone=True,
    )  # fmt: skip


def throw(context: zmq.Context[zmq.Socket[bytes]], address: str, frames: list[bytes]) -> None:
    """All frames, each LOTS of times, and some that are no single frame at all."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 2000)
        dealer.connect(address)
        for _ in range(LOTS):
            for frame in frames:
                dealer.send(frame)
            dealer.send_multipart([b"a", b"message", b"of parts"])
    with context.socket(zmq.DEALER) as oversized:
        oversized.setsockopt(zmq.LINGER, 2000)
        oversized.connect(address)
        oversized.send(bytes(wire.FRAME_BYTES_MAX + 1))
    bytes_at(address.removeprefix("tcp://"), b"GET / HTTP/1.1\r\n\r\n" * 50)


def bytes_at(where: str, data: bytes) -> bytes:
    """Plain bytes to a TCP port; what it answers until it closes."""
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
        except OSError:
            return b""  # cut off in the middle, which is an answer too
    return answer


@contextmanager
def repeater(upstream: str) -> Iterator[str]:
    """Stands between a rack and the coordinator: passes every frame on three times, and every old
    one again at the end of each ten."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listening, sending = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    stop, waker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = listening.bind_to_random_port("tcp://127.0.0.1")
    stop.bind("inproc://stop")
    waker.connect("inproc://stop")
    sending.connect(upstream)

    def pass_on() -> None:
        old: list[bytes] = []
        poller = zmq.Poller()
        poller.register(listening, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        while stop not in dict(poller.poll()):
            _, frame = listening.recv_multipart()
            old.append(frame)
            again = old if len(old) % 10 == 0 else []
            for each in (frame, frame, *again, frame):
                sending.send(each)

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        waker.send(b"")
        thread.join()
        for each in (listening, sending, stop, waker):
            each.close(linger=0)
        context.term()


def left_alone(jobs: Jobs) -> list[Result]:
    return jobs().run(steps=STEPS, config=CONFIG)


def assert_same(ours: list[Result], theirs: list[Result]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == other.losses
        assert one.weights == other.weights
        assert one.merges == other.merges


def test_wrong_frames_and_bytes_change_nothing(
    jobs: Jobs, free_ports: Callable[[int], list[int]]
) -> None:
    job = jobs()
    lanes = free_ports(2)
    for rack, port in enumerate(lanes):
        gates = {"8": [["gate", job.gate()]], "end": [["gate", job.gate("end")]]}
        job.start(rack, steps=STEPS, at=gates, config={**CONFIG, "data_ports": f"{port}-{port}"})
    job.event(0, "commit")
    wrong = list(refused_frames(job, 0).values())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for address in job.addresses[:2]:
        throw(context, address, [*wrong, *ignored_frames(job)])
    other, ours = (
        hello_bytes(hashlib.sha256(b"mend lane " + name.encode()).digest()[:16])
        for name in ("another", job.name)
    )
    for port in lanes:
        for data in (b"", bytes(5000), other, other * 99, ours[:-1], ours * 99, ours + bytes(99)):
            assert bytes_at(f"127.0.0.1:{port}", data) == b"", "a lane answers strangers"
    Path(job.gate()).touch()
    for address in job.addresses[:2]:  # and once more while it trains
        throw(context, address, [*wrong, *ignored_frames(job)])
    context.term()
    Path(job.gate("end")).touch()
    under_fire = job.finished()
    for result in under_fire:
        # What was sent last may still be on its way when the rack ends.
        found = result.status["frames_refused"]
        forged = len(ignored_frames(job))
        assert LOTS * len(wrong) <= found <= 2 * LOTS * (len(wrong) + forged)
        reasons = " ".join(event["reason"] for event in result.kinds("frame-refused"))
        assert "do not begin like a mend frame" in reasons
        assert "wire version 99" in reasons
        (another,) = result.kinds("other-job")
        assert "job 'another'" in another["effect"]
        assert not result.kinds("rack-silent", "differs", "fault", "fetch-failed")
    assert_same(under_fire, left_alone(jobs))


def test_frames_that_come_again_and_again_change_nothing(jobs: Jobs) -> None:
    """Everything that rack 1 says to the coordinator arrives three times and in wrong order."""
    job = jobs()
    with repeater(job.addresses[0]) as address:
        peers = f"0={address},1={job.addresses[1]}"
        job.start(0, steps=STEPS, config=CONFIG)
        job.start(1, steps=STEPS, config=CONFIG, env={"MEND_SIDEBAND_PEERS": peers})
        repeated = job.finished()
    # With the first record rack 1 connects to where rack 0 listens, beside what comes again.
    reasons = {event["reason"] for event in repeated[0].kinds("frame-refused")}
    assert reasons <= {"rack 1 rank 0 speaks over two connections at once"}
    assert_same(repeated, left_alone(jobs))
