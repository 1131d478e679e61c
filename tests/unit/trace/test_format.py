"""The tape as bytes: everything comes back as it was, what came otherwise is not believed."""

from __future__ import annotations

import contextlib
import random
import zlib

import pytest

from mend.coordination.events import Captured, Finished, Heard, Note, Send, Tick
from mend.coordination.machines import RANK_MACHINE
from mend.errors import TapeError
from mend.events.kinds import RoundDropped
from mend.trace import format as form
from mend.trace.format import Entry, Gap, Packer, Unpacker
from mend.types import Peer
from tests.unit.coordination.nouns import member, rank_report

RECORD = form.record_of_entry(RANK_MACHINE, 7, Captured(0, 1, 0, 8, 64, 8), [Finished()])


def unpacked(data: bytes, number: int = 0) -> list[bytes]:
    """One chunk alone, as a reader takes it."""
    head = form.read_head(data[: form.HEAD_BYTES], number)
    deflated = data[form.HEAD_BYTES :]
    form.check_chunk(head, deflated)
    return list(Unpacker().records(head, deflated))


def test_an_entry_comes_back_as_it_was() -> None:
    heard = Heard(Peer(1, 0), member(1).incarnation, rank_report(3, 2))
    said = [Send(Peer(1, 0), rank_report(4, 2)), Note(RoundDropped(1, (0, 1), "too old"))]
    entry = form.read_record(form.record_of_entry("leader", 12, heard, said), 5)
    assert isinstance(entry, Entry)
    assert (entry.number, entry.machine, entry.now_ns, entry.error) == (5, "leader", 12, "")
    assert entry.event == heard
    assert list(entry.effects) == said
    assert [form.answer_of(effect) for effect in said] == list(entry.answers)


def test_an_exception_and_a_gap_come_back_too() -> None:
    entry = form.read_record(form.record_of_entry(RANK_MACHINE, 1, Tick(), (), "ValueError: no"), 1)
    assert isinstance(entry, Entry)
    assert entry.error == "ValueError: no"
    assert form.read_record(form.record_of(Gap(3, "slow")), 2) == Gap(3, "slow")


def test_chunks_are_one_stream_so_that_what_is_said_again_costs_little() -> None:
    packer, unpacker, sizes = Packer(), Unpacker(), []
    for number in range(50):
        chunk = packer.chunk([RECORD])
        head = form.read_head(chunk[: form.HEAD_BYTES], number)
        assert list(unpacker.records(head, chunk[form.HEAD_BYTES :])) == [RECORD]
        sizes.append(head.deflated)
    assert max(sizes[1:]) < sizes[0] / 2


def test_an_event_of_a_mend_that_is_not_this_one_is_named() -> None:
    strange = RECORD.replace(b"\xa8Captured", b"\xa8Kaptured")
    with pytest.raises(TapeError, match=r"event 4 of machine rank: 'Kaptured' is unknown"):
        form.read_record(strange, 4)


def test_every_flipped_bit_of_a_chunk_is_found() -> None:
    chunk = Packer().chunk([RECORD])
    for place in range(8 * len(chunk)):
        spoiled = bytearray(chunk)
        spoiled[place // 8] ^= 1 << place % 8
        with pytest.raises(TapeError, match="checksum"):
            unpacked(bytes(spoiled))


def test_chunks_of_another_place_are_refused() -> None:
    packer = Packer()
    packer.chunk([RECORD])
    with pytest.raises(TapeError, match="chunk 1 is where chunk 0 should be"):
        unpacked(packer.chunk([RECORD]))


def test_a_chunk_that_inflates_to_more_than_it_says_stops_there() -> None:
    """A bomb: 64 MiB of zeros that call themselves 100 bytes."""
    packer = Packer()
    deflate = zlib.compressobj()
    bomb = b"".join(deflate.compress(bytes(1 << 20)) for _ in range(64)) + deflate.flush()
    chunk = packer._head(0, 100, bomb) + bomb
    with pytest.raises(TapeError, match="inflates to other than its 100 bytes"):
        unpacked(chunk)


def test_a_head_cannot_ask_for_more_than_the_limit() -> None:
    head = Packer()._head(0, form.CHUNK_BYTES_MAX + 1, b"")
    with pytest.raises(TapeError, match="longer than"):
        form.read_head(head, 0)


def test_garbage_is_an_error_of_its_own_kind_whatever_it_is() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        noise = rng.randbytes(rng.randrange(200))
        with pytest.raises(TapeError):
            form.check_begin(noise)
        with pytest.raises(TapeError):
            form.read_record(noise, 1)
    for place in range(len(RECORD)):
        for value in (0, 0xC1, 0xFF):
            broken = RECORD[:place] + bytes([value]) + RECORD[place + 1 :]
            with contextlib.suppress(TapeError):
                form.read_record(broken, 1)


def test_a_length_beyond_its_chunk_is_refused() -> None:
    raw = (1 << 31).to_bytes(4, "big") + b"abc"
    deflated = zlib.compress(raw)
    with pytest.raises(TapeError, match="goes beyond its end"):
        unpacked(Packer()._head(0, len(raw), deflated) + deflated)


def test_a_chunk_that_is_no_deflate_stream_is_told() -> None:
    with pytest.raises(TapeError, match="chunk 3 does not inflate"):
        list(Unpacker().records(form.Head(3, 7, 10, 0, True), b"garbage"))
