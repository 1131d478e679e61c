"""What doctors say: whole words come through, and nothing else does."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest

from mend.coordination import wire
from mend.errors import WireError
from mend.tools.doctor import meeting_messages as words
from mend.tools.doctor.meeting_messages import About, Envelope, Here, Ping, Pong, Pull, Trips, Turn
from mend.types import Address

ABOUT = About(
    versions=(("python", "3.11"),), facts=(("tau", "8"),), wishes=(), plan="", host="a",
    boot="", listens="tcp://a:1", lane=Address("a", 2), serves=True,
)  # fmt: skip
HERE = Here(
    serial=7, about=ABOUT, heard=((1, 5),), left_ms=9, trips=(Trips(1, 2, 3, 4, -5),),
    turn=Turn(0, 1, ((0, 1),), 100, False, False), did=((0, 1),),
    pulls=(Pull(1, 1, False, 10, 20, ""),),
)  # fmt: skip


@pytest.mark.parametrize("body", [HERE, Ping(3), Pong(3, 4, 5)])
def test_what_is_said_is_heard(body: Here | Ping | Pong) -> None:
    envelope = Envelope("job", 1, 99, body)
    assert words.decode(words.encode(envelope)) == envelope


def test_any_changed_bit_is_refused() -> None:
    frame, chance = words.encode(Envelope("job", 1, 99, HERE)), random.Random(5)
    for _ in range(200):
        place, bit = chance.randrange(len(frame)), chance.randrange(8)
        spoiled = bytearray(frame)
        spoiled[place] ^= 1 << bit
        with pytest.raises(WireError):
            words.decode(bytes(spoiled))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"mdr",
        b"GET / HTTP/1.1\r\n\r\n",
        wire.framed(b"\x90"),
        b"mdr\x02" + bytes(20),
        b"mdr\x01" + bytes(words.FRAME_BYTES_MAX),
    ],
)
def test_garbage_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        words.decode(frame)


def framed(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return b"mdr\x01" + zlib.crc32(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "value",
    [
        ["job", 1, 99, [9, 1]],
        ["job", 70_000, 99, [2, 1]],
        ["j" * 65, 1, 99, [2, 1]],
        ["job", 1, -1, [2, 1]],
        ["job", 1, 99, [3, 1, "x", 2]],
        ["job", 1, 99],
        [[[[[]]]]],
    ],
)
def test_well_framed_nonsense_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="no word of a doctor"):
        words.decode(framed(value))


def test_nothing_that_a_terminal_would_obey_comes_in() -> None:
    evil = msgspec.structs.replace(ABOUT, host="\x1b[2Jgone")
    frame = words.encode(Envelope("job", 1, 9, msgspec.structs.replace(HERE, about=evil)))
    with pytest.raises(WireError):
        words.decode(frame)
    assert words.clean("\x1b[2Jgone\n") == " [2Jgone "
    assert len(words.clean("x" * 9999)) == words.TEXT_MAX


def test_a_doctor_of_another_version_is_told_apart() -> None:
    frame = bytearray(words.encode(Envelope("job", 1, 99, Ping(1))))
    frame[3] = 9
    with pytest.raises(WireError, match="wire version 9, this is version 1"):
        words.decode(bytes(frame))
