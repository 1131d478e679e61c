"""Frames: whatever arrives is a message of this version or a WireError, and nothing runs by it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import schema_components
from msgspec.structs import replace

from mend.consensus.ballots import ballot_of
from mend.consensus.records import (
    RECORDS_FORMAT,
    SUMS_BYTES_MAX,
    Ballot,
    Record,
    Snapshot,
    encode_record,
)
from mend.coordination import messages, wire
from mend.coordination.messages import Envelope, Message, Partial, Prepare, Total, Vote
from mend.coordination.wire import FRAME_BYTES_MAX, MAGIC, VERSION, decode, encode, framed
from mend.errors import OtherVersion, WireError
from tests.unit.coordination.nouns import (
    FIRST,
    acceptor_state,
    commit,
    genesis,
    hello,
    offer,
    orders,
    rank_orders,
    rank_report,
    report,
    roster,
)

HEAD = MAGIC + bytes([VERSION])

MESSAGES = typing.get_args(Message)
RECORDS = typing.get_args(Record)

WIRE, LOG = (9, "3ba0cafbd70107bf"), (9, "6dd78bbdb641da44")
"""(version, digest of the schema)."""
TEXTS = ("title", "description", "default")

HEX_PATTERN = r"^([0-9a-f]{32})*([0-9a-f]{2})*\Z"


def values_of(  # noqa: C901 - one flat table
    annotation: Any, meta: msgspec.Meta | None = None
) -> st.SearchStrategy[Any]:
    """Values that the annotation of a field allows, within its limits."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values_of(arguments[0], arguments[1])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(each) for each in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(each) for each in arguments))
    if annotation in (bool, type(None)):
        return st.booleans() if annotation is bool else st.none()
    if annotation is int:
        low = meta.ge if meta and meta.ge is not None else -(2**63)
        high = meta.le if meta and meta.le is not None else 2**63
        return st.integers(int(low), int(high))
    if annotation is float:
        assert meta is not None, "a float without limits may be NaN"
        return st.floats(meta.ge, meta.lt, exclude_max=True)
    if annotation is bytes:
        return st.binary(max_size=40)
    if annotation is str:
        return texts(meta)
    return struct_of(annotation)


def texts(meta: msgspec.Meta | None) -> st.SearchStrategy[str]:
    pattern = meta.pattern if meta else None
    if pattern == HEX_PATTERN:
        return st.binary(max_size=32).map(bytes.hex)
    if pattern == "^tcp://":
        return st.text(max_size=20).map("tcp://".__add__)
    assert pattern is None, f"say here what a text of {pattern!r} looks like"
    return st.text(max_size=20)


@functools.cache
def struct_of(kind: Any) -> st.SearchStrategy[Any]:
    """A msgspec Struct or a NamedTuple, from the hints of its fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = getattr(kind, "__struct_fields__", None) or kind._fields
    return st.builds(kind, **{name: values_of(hints[name]) for name in fields})


@functools.cache
def envelopes(kind: Any) -> st.SearchStrategy[Envelope]:
    numbers = st.integers(0, 0xFFFF)
    job, life = st.text(max_size=64), st.integers(0, 2**62)
    return st.builds(Envelope, job, numbers, numbers, life, struct_of(kind))


def around(body: Message) -> Envelope:
    return Envelope("job", 1, 0, 7, body)


SAMPLES = [
    rank_report(2, partials=(Partial(0, 1, 1, b"sums"),)),
    rank_orders(3, totals=(Total(0, 1, 1, b"total"), Total(1, 1, 2, b""))),
    hello(1, ranks=2, fragments=3),
    report(5, offers=(offer(1),), got=()),
    orders(3, [genesis(), commit(1, [offer(0), offer(1)])], offers=(offer(0, 2),), live=(0, 1)),
    rank_orders(4, [genesis()], discarded=((0, 3),), failure=("Refused", "why")),
    orders(5, [genesis(witness=True), Ballot(FIRST), roster(1, [0])]),
    Prepare(6, ballot_of(2, 1), "c0ffee", 3),
    Vote(7, "c0ffee", replace(acceptor_state(2, 1), records=(Ballot(FIRST),)), (3,)),
]


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in (*MESSAGES, *RECORDS)]
    assert len(set(tags)) == len(tags)


def schema_of(*kinds: Any) -> str:
    """A digest of all that these put on the wire: tags, types of fields, limits."""

    def bare(of: Any) -> Any:
        if isinstance(of, dict):
            return {key: bare(each) for key, each in of.items() if key not in TEXTS}
        return [*map(bare, of)] if isinstance(of, list | tuple) else of

    return hashlib.sha256(msgspec.json.encode(bare(schema_components(kinds)))).hexdigest()[:16]


@pytest.mark.parametrize(
    ("version", "pinned", "kinds"),
    [
        ((VERSION, "VERSION of coordination/wire.py"), WIRE, (Envelope,)),
        ((RECORDS_FORMAT, "RECORDS_FORMAT of consensus/records.py"), LOG, (*RECORDS, Snapshot)),
    ],
)
def test_changed_message_or_record_raises_its_version(
    version: tuple[int, str], pinned: tuple[int, str], kinds: tuple[Any, ...]
) -> None:
    number, name = version
    found = number, schema_of(*kinds)
    assert found == pinned, f"raise {name}, unless this branch has; then pin {found}"


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    envelope = data.draw(envelopes(kind))
    back = decode(encode(envelope))
    assert back == envelope
    assert type(back.body) is kind


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(noise: bytes) -> None:
    for frame in (noise, HEAD + noise, framed(noise)):
        with contextlib.suppress(WireError):  # anything else comes through
            assert isinstance(decode(frame), Envelope)


@given(st.sampled_from(SAMPLES), st.data())
def test_a_damaged_frame_is_a_message_or_a_wire_error(body: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(around(body)))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        assert isinstance(decode(bytes(frame)), Envelope)


@pytest.mark.parametrize("body", SAMPLES, ids=lambda body: type(body).__name__)
def test_a_frame_is_whole_and_has_nothing_behind_it(body: Message) -> None:
    frame = encode(around(body))
    for cut in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:cut])
    with pytest.raises(WireError):
        decode(frame + b"\0")


def of_version(number: int, envelope: Envelope) -> bytes:
    return framed(msgspec.msgpack.encode(envelope), MAGIC + bytes([number]))


def test_frame_of_another_version_is_identified_by_its_common_fields() -> None:
    """Such frames were only counted, and both sides waited for the start until it timed out."""
    said = hello(3, racks=4)
    with pytest.raises(OtherVersion) as caught:
        decode(of_version(VERSION + 1, Envelope("job", 3, 0, 7, said)))
    assert (caught.value.job, caught.value.rack) == ("job", 3)
    assert caught.value.address == said.seat.address
    versions = f"rack 3 speaks wire version {VERSION + 1}, this is version {VERSION}"
    assert str(caught.value) == f"{versions}; run the same mend on all racks and the witness"
    with pytest.raises(OtherVersion, match="the witness speaks") as caught:
        decode(of_version(1, Envelope("job", 0xFFFF, 0, 7, report(1))))
    assert caught.value.address == ""


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode(["job", -1]), msgspec.msgpack.encode({"a": 1})]
)
def test_malformed_frame_of_another_version_is_a_plain_wire_error(body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(framed(body, MAGIC + bytes([VERSION + 1])))
    assert not isinstance(caught.value, OtherVersion)


def test_sums_over_their_limit_are_not_read() -> None:
    fits, too_long = (
        encode(around(rank_report(1, partials=(Partial(0, 1, 1, bytes(size)),))))
        for size in (SUMS_BYTES_MAX, SUMS_BYTES_MAX + 1)
    )
    decode(fits)
    with pytest.raises(WireError):
        decode(too_long)


def test_a_frame_over_the_limit_is_neither_sent_nor_read() -> None:
    text = "x" * 4096
    facts = tuple((f"{i} {text[:4000]}", text) for i in range(FRAME_BYTES_MAX // 8000))
    with pytest.raises(WireError, match="exceeds the limit"):
        encode(around(hello(0, facts=facts)))
    with pytest.raises(WireError, match="the limit is"):
        decode(HEAD + bytes(FRAME_BYTES_MAX))
    assert encode(around(hello(0, facts=facts[: len(facts) // 2])))


def refused(body: Any) -> str:
    """What the receiver says to a frame that a sender should never have made."""
    frame = framed(msgspec.msgpack.encode(Envelope("job", 1, 0, 7, body)))
    with pytest.raises(WireError) as caught:
        decode(frame)
    return str(caught.value)


def test_limits_of_fields_are_kept_by_the_receiver() -> None:
    whole = report(1)
    assert ">= 0" in refused(msgspec.structs.replace(whole, step=-1))
    assert ">= -1" in refused(msgspec.structs.replace(whole, versions=(-2,)))
    assert "<= 65535" in refused(report(1, offers=(offer(0, fragment=70_000),)))
    assert ">= 1" in refused(report(1, offers=(offer(0, tokens=0),)))
    assert ">= 1" in refused(report(1, offers=(offer(0, steps=0),)))
    assert "Expected `bool`" in refused(msgspec.structs.replace(whole, leaving=1))
    assert "Expected `str`" in refused(rank_orders(1, why=(3,)))
    spoiled = msgspec.structs.replace(commit(1, []), digests=("no hex",))
    assert "matching regex" in refused(rank_orders(1, [genesis(), spoiled]))
    assert "length <= 16384" in refused(report(1, offers=(
        msgspec.structs.replace(offer(0), checksums=bytes(16_385)),
    )))  # fmt: skip
    assert "length <= 64" in refused(orders(1, chain="a" * 65))
    assert "length <= 4096" in refused(rank_orders(1, failure=("Refused", "x" * 4097)))
    assert "length <= 64" in refused(orders(1, proposals=(), records=(
        msgspec.structs.replace(genesis(), roster=genesis(racks=65).roster),
    )))  # fmt: skip


def test_a_job_name_and_a_rack_number_have_limits() -> None:
    for broken in (
        Envelope("j" * 65, 1, 0, 7, report(1)),
        Envelope("job", 0x10000, 0, 7, report(1)),
        Envelope("job", 1, -1, 7, report(1)),
        Envelope("job", 1, 0, -7, report(1)),
    ):
        with pytest.raises(WireError):
            decode(framed(msgspec.msgpack.encode(broken)))


def test_nesting_without_end_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode(framed(b"\x91" * 1_000_000))


class Trap:
    """Unpickled, it would tell."""

    sprung: typing.ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Trap.sprung.append, (1,)


def test_no_frame_is_ever_unpickled() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        code = pickle.dumps(Trap(), protocol)
        for frame in (code, HEAD + code, framed(code)):
            with pytest.raises(WireError):
                decode(frame)
    assert Trap.sprung == []
    assert not {"pickle", "marshal", "shelve"} & {*vars(wire), *vars(messages)}


def test_records_have_one_spelling() -> None:
    """The chain hash runs over these bytes: equal records, equal bytes, also after a journey."""
    record = commit(1, [offer(0), offer(1)], dropped=[offer(2, 4)])
    sent = orders(1, records=(genesis(3), record), last=2)
    _, back = decode(encode(around(sent))).body.records
    assert encode_record(back) == encode_record(record)
    assert encode_record(commit(2, [offer(0)])) != encode_record(commit(1, [offer(0)]))


def test_every_single_wrong_bit_is_found() -> None:
    """One flipped bit can make a well-formed message of another version, vote or digest."""
    frame = encode(around(report(1)))
    for bit in range(8 * len(frame)):
        wrong = bytearray(frame)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(bytes(wrong))
