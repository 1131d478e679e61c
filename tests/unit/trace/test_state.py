"""The state of machines: everything they keep comes back, what they share stays one, and nothing
that is no part of a machine is ever made of bytes."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest

from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.events import Machine, StepReached, Tick
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.machines import (
    COORDINATOR,
    LEADER,
    CoordinatorSpec,
    ProcessSpec,
    RankSpec,
    machines_of,
)
from mend.coordination.machines import RANK_MACHINE as RANK
from mend.coordination.round import Phase
from mend.errors import TapeError
from mend.trace.state import _enum, _struct, decode_state, encode_state
from mend.types import MS, WITNESS, Peer
from tests.unit.coordination.nouns import digest, member

PARTS = ProcessSpec(Peer(0, 1), member(0), RankSpec(RankOptions(100 * MS, ranks=2), (digest(1),)))
OPTIONS = CoordinatorOptions(2, 100 * MS, 2000 * MS)
WITNESS_PARTS = ProcessSpec(
    Peer(WITNESS, 0), member(WITNESS), coordinator=CoordinatorSpec("job", OPTIONS)
)


def keeping(**more: object) -> dict[str, Machine]:
    """A machine that keeps these as well."""
    machines = machines_of(PARTS).named()
    vars(machines[RANK]).update(more)
    return machines


def kept(**more: object) -> dict[str, object]:
    return vars(decode_state(encode_state(keeping(**more)))[RANK])


def test_every_kind_of_value_comes_back_as_it_was() -> None:
    values = {
        "nothing": None, "yes": True, "number": -7, "long": 1 << 200, "share": 0.1,
        "text": "\u00e9",
        "bytes": b"\0\xff", "pair": (1, (2.5, "x")), "many": [1, [2]], "named": {(1, 2): {3}},
        "some": {3, 1, 2}, "fixed": frozenset({"b", "a"}), "newest": deque([1, 2], maxlen=2),
        "phase": Phase.OPEN, "peer": Peer(3, 4),
    }  # fmt: skip
    found = kept(**values)
    for name, value in values.items():
        assert found[name] == value, name
        assert type(found[name]) is type(value), name
    newest = found["newest"]
    assert isinstance(newest, deque)
    assert newest.maxlen == 2


def test_object_shared_by_two_fields_is_shared_after_decoding() -> None:
    shared = [1]
    found = kept(one=shared, other=shared, equal=[1])
    one = found["one"]
    assert one is found["other"]
    assert one is not found["equal"]
    witness = decode_state(encode_state(machines_of(WITNESS_PARTS).named()))
    coordinator, follower = witness[COORDINATOR], witness["follower"]
    assert coordinator.acceptor is follower.follower.acceptor
    assert LEADER not in witness


def test_a_machine_goes_on_where_it_was() -> None:
    machines = keeping()
    machines[RANK].handle(StepReached(8, MS), 60 * MS)
    again = decode_state(encode_state(machines))
    assert again[RANK].handle(Tick(), 200 * MS) == machines[RANK].handle(Tick(), 200 * MS) != []
    assert encode_state(again) == encode_state(machines)


def test_equal_states_are_equal_bytes_whatever_the_order_of_a_set() -> None:
    ways = [set(), set()]
    for way, numbers in zip(ways, ([8, 16, 0], [0, 16, 8]), strict=True):
        for number in numbers:
            way.add(number)
    assert encode_state(keeping(numbers=ways[0])) == encode_state(keeping(numbers=ways[1]))


@pytest.mark.parametrize("strange", [lambda: 1, pytest, MS.bit_length, 1j])
def test_value_that_is_not_plain_is_refused_by_name(strange: object) -> None:
    with pytest.raises(TypeError, match="is not part of a machine's state"):
        encode_state(keeping(strange=strange))


NAME = b"mend.coordination.rank:RankMachine"


@pytest.mark.parametrize(
    "name", ["os:system", "mend.api:Runtime", "mend.trace.state:_class", "mend.types:re", "mend"]
)
def test_no_other_class_is_made_of_bytes(name: str) -> None:
    before, after = encode_state(keeping()).split(NAME)
    assert before[-2:] == bytes([0xD9, len(NAME)]), "its length in msgpack"
    with pytest.raises(TapeError):
        decode_state(before[:-2] + bytes([0xD9, len(name)]) + name.encode() + after)


@pytest.mark.parametrize(
    "written", [1, ["l"], ["x"], ["r", 5], ["d", "rank", 1], ["d", "rank", ["q", -1]], ["i", "x"]]
)
def test_bytes_that_are_not_a_state_raise_a_tape_error(written: object) -> None:
    with pytest.raises(TapeError):
        decode_state(msgspec.msgpack.encode(written))
    with pytest.raises(TapeError):
        decode_state(b"")


def test_class_is_not_found_where_it_is_only_imported() -> None:
    """Whatever a machine's module imports would be open to a file."""
    with pytest.raises(TapeError, match="not a class of this version of mend"):
        _struct("mend.coordination.messages:Struct", b"")
    with pytest.raises(TapeError, match="not a class of this version of mend"):
        _enum("mend.consensus.quorum:quorum", "x")


def test_everything_on_a_tape_is_a_machine() -> None:
    state = encode_state({**keeping(), "more": 5})
    with pytest.raises(TapeError, match="is a dict"):
        decode_state(state)


def test_class_of_another_kind_on_a_tape_is_a_tape_error() -> None:
    """They were asserts, which `python -O` leaves out: a file then chose what is called."""
    with pytest.raises(TapeError, match="not an enumeration"):
        _enum("mend.types:Peer", "rack")
    with pytest.raises(TapeError, match="not a record"):
        _struct("mend.types:Peer", b"")
