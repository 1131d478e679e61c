"""What observers say and hear: frames of their own, bounded, and nothing in them that could move a
cursor."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mend.coordination import wire
from mend.coordination.messages import Envelope
from mend.errors import WireError
from mend.status.follow_messages import decode_asked
from mend.status.messages import (
    HEAD,
    LOOK_BYTES_MAX,
    SHOWN_MAX,
    TEXT_BYTES_MAX,
    VIEW_BYTES_MAX,
    Look,
    RankSeen,
    RoundSeen,
    decode_view,
    encode_look,
    encode_view,
    short,
)
from tests.unit.coordination.nouns import report
from tests.unit.status.seen import rack_seen, training_seen, view


def test_a_look_and_a_view_come_back_as_they_were() -> None:
    for job in ("", "run7", "j" * 64):
        assert decode_asked(encode_look(Look(job))) == Look(job)
    for each in (
        view(),
        view(training=None),
        view(training=training_seen(recorded=(("loss", 2.5),))),
    ):
        assert decode_view(encode_view(each)) == each


def test_looks_are_no_messages_of_the_job_and_the_job_has_no_looks() -> None:
    for frame in (encode_look(Look("")), encode_view(view())):
        with pytest.raises(WireError, match="do not begin like a mend frame"):
            wire.decode(frame)
    message = wire.encode(Envelope("job", 0, 0, 1, report(1)))
    for read in (decode_asked, decode_view):
        with pytest.raises(WireError, match="do not begin like a mend frame"):
            read(message)
    with pytest.raises(WireError):
        decode_asked(encode_view(view(racks=(), rounds=(), training=None)))
    with pytest.raises(WireError):
        decode_view(encode_look(Look("")))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_look_or_a_wire_error(noise: bytes) -> None:
    for frame in (noise, HEAD + noise, wire.framed(noise, HEAD)):
        for read in (decode_asked, decode_view):
            with contextlib.suppress(WireError):
                read(frame)


@given(st.integers(min_value=0), st.integers(0, 7))
def test_a_flipped_bit_is_found(place: int, bit: int) -> None:
    frame = bytearray(encode_view(view()))
    frame[place % len(frame)] ^= 1 << bit
    with pytest.raises(WireError):
        decode_view(bytes(frame))


def test_another_version_is_named() -> None:
    frame = bytearray(encode_look(Look("")))
    frame[3] += 1
    with pytest.raises(WireError, match="wire version 4, this is version 3"):
        decode_asked(bytes(frame))


def test_a_long_look_is_not_read() -> None:
    with pytest.raises(WireError, match=f"the limit is {LOOK_BYTES_MAX}"):
        decode_asked(wire.framed(bytes(LOOK_BYTES_MAX), HEAD))
    with pytest.raises(WireError, match="length <= 64"):
        decode_asked(encode_look(Look("j" * 65)))


def test_the_largest_view_fits() -> None:
    """64 racks, 64 rounds with long reasons, 64 ranks: as much as a View may hold."""
    most, text = 2**62, "é" * (TEXT_BYTES_MAX // 2)
    address = short("tcp://" + "h" * 300)
    racks = tuple(
        replace(rack_seen(r), address=address, step=most, step_ns=most, behind=most, silent_ms=most)
        for r in range(SHOWN_MAX)
    )
    everybody = tuple(range(1000, 1064))
    rounds = tuple(
        RoundSeen(65_535, most, "merging", everybody, most, text) for _ in range(SHOWN_MAX)
    )
    ranks = tuple(RankSeen(65_535, most, most, most) for _ in range(SHOWN_MAX))
    recorded = tuple((text, 1 / 3) for _ in range(8))
    full = view(
        racks=racks, rounds=rounds, missing=everybody, why=(text,) * 16, versions=(most,) * 64,
        training=training_seen(shown=ranks, recorded=recorded), detail=text, job="j" * 64,
    )  # fmt: skip
    frame = encode_view(full)
    assert len(frame) < VIEW_BYTES_MAX / 2
    assert decode_view(frame) == full


def test_a_view_beyond_its_limit_is_not_sent() -> None:
    racks = tuple(rack_seen(r, address="tcp://" + "h" * 5000) for r in range(64))
    with pytest.raises(WireError, match="exceeds the limit"):
        encode_view(view(racks=racks))


@pytest.mark.parametrize("text", ["\x1b[2J", "two\nlines", "\x9b5m", "\u202eright", "bell\x07"])
def test_text_that_would_move_the_cursor_is_neither_sent_nor_accepted(text: str) -> None:
    assert short(f"a {text} b").isprintable()
    assert decode_view(encode_view(view(detail=short(text))))
    for broken in (view(detail=text), view(job=text), view(training=training_seen(closed_by=text))):
        with pytest.raises(WireError, match="matching regex"):
            decode_view(encode_view(broken))


@pytest.mark.parametrize(
    ("text", "kept"),
    [("", ""), ("plain", "plain"), ("x" * 240, "x" * 240), ("x" * 241, "x" * 237 + "...")],
)
def test_a_long_text_is_cut(text: str, kept: str) -> None:
    assert short(text) == kept


def test_a_text_that_utf8_cannot_spell_is_cut_to_what_it_can() -> None:
    assert short("a\ud800b") == "a?b"
    assert len(short("é" * 400).encode()) <= TEXT_BYTES_MAX


def test_a_state_that_nobody_knows_is_refused() -> None:
    def sent(**wrong: Any) -> bytes:
        return wire.framed(msgspec.msgpack.encode(view(**wrong)), HEAD)

    with pytest.raises(WireError, match="Invalid enum value"):
        decode_view(sent(state="dancing"))
    with pytest.raises(WireError, match=">= 0"):
        decode_view(sent(decided=-1))
    with pytest.raises(WireError, match="length <= 64"):
        decode_view(sent(racks=tuple(rack_seen(r) for r in range(65))))
