"""A small share of `make fuzz`, and the same questions asked by Hypothesis."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mend.coordination import wire as frames
from mend.types import Peer
from tests.fuzz import harness
from tests.fuzz.config import ARGUMENTS, TOML, Config
from tests.fuzz.harness import Target, fuzz
from tests.fuzz.machines import Machines, Sieges
from tests.fuzz.mutate import damaged, mutated, tree_mutated
from tests.fuzz.shapes import MESSAGES, frame_of, tree_in, tree_of
from tests.fuzz.shots import Shots
from tests.fuzz.sockets import KeyedSideband, Lane, RelayedLane, SealedLane, Sideband
from tests.fuzz.state import State, Sums
from tests.fuzz.tape import MachineState, Tape
from tests.fuzz.wire import Looks, Wire

SHARE: dict[Callable[[int], Target], int] = {
    Wire: 1500, Looks: 200, Machines: 800, Sieges: 3, Shots: 2, Config: 800, Tape: 700,
    MachineState: 700, State: 2000, Sums: 700, Lane: 400, Sideband: 300, SealedLane: 200,
    KeyedSideband: 200, RelayedLane: 100,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Refused frames are reported loudly, and here nearly all are refused."""
    torch.set_num_threads(1)
    logger = logging.getLogger("mend")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("kind", SHARE, ids=lambda kind: kind.name)
def test_nothing_that_comes_from_outside_does_harm(kind: Callable[[int], Target]) -> None:
    target = kind(1)
    try:
        result = fuzz(target, SHARE[kind], seed=1)
    finally:
        target.close()
    assert not result.defects, "\n".join(each.trace for each in result.defects.values())
    assert result.accepted, f"none of {result.inputs} was taken: {result.reasons}"


def test_an_address_that_is_none_stops_nobody() -> None:
    """A hello came with an address that ZeroMQ refuses; the coordinator answers there. That was an
    error on its loop, and the end of its process."""
    target = Sideband(1)
    try:
        refused = target.io_loop.frames_refused
        target.io_loop.call(lambda: target.io_loop.connect(Peer(9, 9), "tcp://a:1tcp://b:2"))
        target._sync()
        assert target.io_loop.frames_refused == refused + 1
        assert not target.io_loop.done.is_set()
    finally:
        target.close()


def test_a_file_without_end_is_no_toml(config: Config) -> None:
    """The parser of the standard library ends in a RecursionError."""
    assert config.take(TOML + b"racks = 2\n" + b"a={" * 2000) == "no TOML"


# ------------------------------------------------------------------ by Hypothesis


@settings(max_examples=60)
@given(data=st.binary(max_size=300), whole=st.booleans())
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes, whole: bool) -> None:
    Wire._decoded(frames.framed(data) if whole else data)


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
leaves = st.none() | st.booleans() | numbers | st.text(max_size=9) | st.binary(max_size=9)


def branches(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3)


plain = st.recursive(leaves, branches, max_leaves=20)


@settings(max_examples=60)
@given(body=plain)
def test_any_msgpack_is_a_message_or_a_wire_error(body: object) -> None:
    Wire._decoded(frames.framed(msgspec.msgpack.encode(body)))


@pytest.fixture(scope="module")
def config() -> Iterator[Config]:
    target = Config(1)
    yield target
    target.close()


@settings(max_examples=60)
@given(text=st.text(max_size=200))
def test_any_file_is_a_configuration_or_a_config_error(config: Config, text: str) -> None:
    config.take(TOML + text.encode())


@settings(max_examples=60)
@given(
    value=plain, name=st.sampled_from(["racks", "rack", "sideband_peers", "job_id", "data_ports"])
)
def test_any_argument_is_a_setting_or_a_config_error(
    config: Config, value: object, name: str
) -> None:
    config.take(ARGUMENTS + msgspec.msgpack.encode({name: value}))


# ------------------------------------------------------------------ what the fuzzer promises


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_values_of_every_message_are_taken_when_they_are_not_wild(kind: type) -> None:
    rng = random.Random(7)
    for _ in range(50):
        assert type(frames.decode(frame_of(tree_of(rng, kind))).body) is kind


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_wild_values_are_mostly_not(kind: type) -> None:
    rng, refused = random.Random(7), 0
    for _ in range(50):
        refused += Wire._decoded(frame_of(tree_of(rng, kind, wild=0.5))) != "accepted"
    assert refused > 25


def test_changes_are_those_of_the_seed_and_leave_what_they_are_given() -> None:
    def made(seed: int) -> list[object]:
        rng = random.Random(seed)
        frame = frame_of(tree_of(rng, MESSAGES[0]))
        tree = tree_in(frame)
        changed = tree_mutated(rng, tree)
        assert tree == tree_in(frame), "the tree that was given has changed"
        return [frame, mutated(rng, frame, frame, 4), damaged(rng, frame), changed]

    assert made(3) == made(3)
    assert made(3) != made(4)
    frame = made(3)[0]
    assert isinstance(frame, bytes)
    assert len(damaged(random.Random(1), frame)) == len(frame)
    assert mutated(random.Random(1), frame, frame, 4)[:4] == frame[:4]


class Sieve(Target):
    """Takes small numbers, refuses greater ones, and cannot bear two of them."""

    name, inputs = "sieve", 100

    def example(self, rng: random.Random) -> bytes:
        return bytes([rng.randrange(10)])

    def take(self, data: bytes) -> str:
        if data[0] == 9:
            raise IndexError("nine")
        if data[0] == 8:
            raise KeyError("eight")
        return "accepted" if data[0] < 5 else "too great"


def test_a_defect_is_counted_once_per_place_and_its_first_input_is_kept(tmp_path: Path) -> None:
    result = fuzz(Sieve(), 500, seed=1, keep=tmp_path)
    assert result.inputs == 500
    assert result.accepted + result.refused + result.crashes == 500
    assert sorted(each.data for each in result.defects.values()) == [b"\x08", b"\x09"]
    for each in result.defects.values():
        assert each.path.read_bytes() == each.data


def test_an_input_that_hangs_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Sieve):
        def take(self, data: bytes) -> str:
            while True:
                pass

    monkeypatch.setattr(harness, "INPUT_SECONDS_MAX", 0.05)
    # pytest-timeout has the alarm; here the harness borrows it, and gives it back.
    result = fuzz(Endless(), 1, seed=1, watch=True)
    assert [name.split()[0] for name in result.defects] == ["Hang"]
