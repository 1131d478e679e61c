"""Whatever happens to frames, a state that is read is the state that was sent."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from mend.consensus.records import Absent
from mend.coordination import wire
from mend.coordination.messages import (
    SLICES_EACH,
    Ack,
    Envelope,
    MergeProposal,
    Message,
    Orders,
    Patch,
    Reason,
)
from mend.coordination.streams import (
    ENCODED_MAX,
    PEERS_MAX,
    STATES_MAX,
    Encodings,
    Streams,
    Unread,
    apply_patch,
    make_patch,
)
from mend.errors import WireError
from mend.types import Member, Peer
from tests.unit.coordination.nouns import hello, member, offer, orders, report

RANKS = 16
LEFT, RIGHT = Peer(0, 0), Peer(1, 0)


def drawn(chance: random.Random, known: Orders) -> Orders:
    """The next state of a coordinator: some fields differ, items come, go and change places."""
    offers = [each for each in known.offers if chance.random() < 0.8]
    if chance.random() < 0.5:
        offers.append(offer(chance.randrange(3), chance.randrange(99), ranks=RANKS))
    chance.shuffle(offers)
    if offers and chance.random() < 0.2:
        offers[0] = replace(offers[0], applied=offers[0].applied + 1)
    said: dict[str, Any] = {"serial": known.serial + 1, "offers": tuple(offers)}
    if offers and chance.random() < 0.3:
        members = tuple(chance.sample(offers, chance.randint(1, len(offers))))
        gone = (offer(7, ranks=RANKS),) * chance.randrange(2)  # is open no more
        said["proposals"] = (*known.proposals, MergeProposal(0, known.serial, 1, members + gone))[
            -2:
        ]
    if chance.random() < 0.3:
        said["live"] = tuple(sorted(chance.sample(range(8), 3)))
    if chance.random() < 0.3:
        said["why"] = (Reason(f"because of {chance.randrange(3)}"),)
    return replace(known, **said)


class Ends:
    """Two processes, and frames between them that a test may lose."""

    def __init__(self) -> None:
        self.left, self.right = Streams(member(0)), Streams(member(1))
        self.life = 0

    def to_right(self, body: Any) -> bytes:
        return wire.encode(self.left.envelope("job", LEFT, RIGHT, body))

    def to_left(self, body: Any) -> bytes:
        return wire.encode(self.right.envelope("job", RIGHT, LEFT, body))

    def restart_right(self) -> None:
        self.life += 1
        self.right = Streams(member(1, self.life))

    def settle(self, said: Orders) -> None:
        """One state that is read, and confirmed: after a start in the third way to and fro."""
        for _ in range(3):
            self.left.read(wire.decode(self.to_left(report(1))))
            if (body := read_or_not(self.right, self.to_right(said))) is not None:
                break
        assert body == said
        self.left.read(wire.decode(self.to_left(report(1))))


@pytest.fixture
def ends() -> Ends:
    return Ends()


def arriving(chance: random.Random, way: list[tuple[bool, bytes]]) -> tuple[bool, bytes]:
    """The next frame, or one that overtakes it; some come twice."""
    found = way.pop(0 if chance.random() < 0.8 else chance.randrange(len(way)))
    if chance.random() < 0.1:
        way.append(found)
    return found


def read_or_not(end: Streams, frame: bytes) -> Message | None:
    try:
        return end.read(wire.decode(frame))
    except Unread:
        return None


@pytest.mark.parametrize("seed", range(12))
def test_reader_gets_only_states_that_were_sent_despite_loss_repetition_and_restarts(
    seed: int,
) -> None:
    chance, ends = random.Random(seed), Ends()
    state, said, read = orders(1, ()), {}, 0
    way: list[tuple[bool, bytes]] = []
    for step in range(300):
        state = drawn(chance, state)
        said[state.serial] = state
        way.append((True, ends.to_right(state)))
        if chance.random() < 0.7:
            way.append((False, ends.to_left(replace(report(1), serial=step))))
        if chance.random() < 0.03:
            ends.restart_right()
        while way and chance.random() < 0.6:
            rightwards, frame = arriving(chance, way)
            if chance.random() < 0.1:
                continue  # lost
            body = read_or_not(ends.right if rightwards else ends.left, frame)
            if rightwards and body is not None:
                assert isinstance(body, Orders)
                assert body == said[body.serial], "whole, and of no other moment"
                read += 1
    assert read > 100, "most of them are read"
    way.clear()
    for _ in range(3):  # once the way is free, a state and an answer are enough
        state = drawn(chance, state)
        last = read_or_not(ends.right, ends.to_right(state))
        ends.left.read(wire.decode(ends.to_left(report(1))))
    assert last == state, "the streams come together again"


def test_a_state_that_changes_little_takes_few_bytes(ends: Ends) -> None:
    large = orders(1, (), offers=tuple(offer(0, seq, ranks=500) for seq in range(1, 20)))
    ends.settle(large)
    whole = len(wire.encode(Envelope("job", 0, 0, 7, large)))
    frame = ends.to_right(replace(large, serial=2))
    assert len(frame) < 100 < whole / 1000
    assert isinstance(wire.decode(frame).body, Patch)
    ends.right.read(wire.decode(frame))
    more = replace(large, serial=3, offers=(*large.offers, offer(1, 1, ranks=500)))
    assert len(ends.to_right(more)) < whole / 10, "one offer of twenty"


def test_a_gather_names_the_open_offers_that_it_asks_for() -> None:
    """Of 64 racks it had their checksums once more, for each reader."""
    ends, offers = Ends(), tuple(offer(rack, ranks=500) for rack in range(20))
    ends.settle(orders(1, (), offers=offers))
    asks = orders(2, (), offers=offers, proposals=(MergeProposal(0, 1, 1, offers[3:]),))
    frame = ends.to_right(asks)
    assert len(frame) < 200
    assert ends.right.read(wire.decode(frame)) == asks


def test_all_of_a_gather_comes_through_a_patch() -> None:
    """What a patch left out was as if it had never been said: the rank made a mesh of a slice."""
    offers = tuple(offer(rack) for rack in range(3))
    asked = MergeProposal(0, 1, 7, offers[:2], (Absent(2, 64, 8),), sharded=True, merged=(0,))
    usual = MergeProposal(0, 1, 1, ())
    names = MergeProposal.__struct_fields__[1:]
    assert all(getattr(asked, name) != getattr(usual, name) for name in names if name != "version")
    ends = Ends()
    ends.settle(orders(1, (), offers=offers))
    asks = orders(2, (), offers=offers, proposals=(asked,))
    assert ends.right.read(wire.decode(ends.to_right(asks))) == asks


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("proposals", [[0, 1, 1, [1], []]], "out of range"),
        (
            "proposals",
            [[0, 1, 1, [0], [], True, [SLICES_EACH + 1]]],
            f"Expected `int` <= {SLICES_EACH}",
        ),
        ("offers", [-1], "Expected `int` >= 0"),
    ],
)
def test_patch_with_a_value_out_of_bounds_is_refused(field: str, value: object, said: str) -> None:
    base = orders(1, (), offers=(offer(0),))
    raw = msgspec.Raw(msgspec.msgpack.encode(value))
    place = [each.name for each in msgspec.structs.fields(Orders)].index(field)
    with pytest.raises(WireError, match=said):
        apply_patch(base, Patch(13, 1, {place: raw}))


def test_offers_for_many_readers_are_encoded_once() -> None:
    encodings = Encodings()
    first = orders(1, (), offers=tuple(offer(rack, ranks=RANKS) for rack in range(9)))
    later = replace(first, serial=2, offers=(*first.offers, offer(9, ranks=RANKS)))
    made = [make_patch(1, first, replace(later, to=rack), encodings) for rack in range(5)]
    place = [each.name for each in msgspec.structs.fields(Orders)].index("offers")
    assert len({id(patch.fields[place]) for patch in made}) == 1, "the very same bytes"
    assert all(apply_patch(first, patch) == replace(later, to=r) for r, patch in enumerate(made))
    for number in range(2 * ENCODED_MAX):
        make_patch(1, first, replace(later, offers=(offer(0, number + 1),)), encodings)
    assert len(encodings._made) == ENCODED_MAX


def test_nothing_is_patched_before_the_other_side_has_confirmed(ends: Ends) -> None:
    for serial in (1, 2, 3):
        assert isinstance(wire.decode(ends.to_right(orders(serial, ()))).body, Orders)
    ends.settle(orders(4, ()))
    assert isinstance(wire.decode(ends.to_right(orders(5, ()))).body, Patch)
    ends.restart_right()
    assert read_or_not(ends.right, ends.to_right(orders(6, ()))) is None
    ends.left.read(wire.decode(ends.to_left(report(1))))
    assert isinstance(wire.decode(ends.to_right(orders(7, ()))).body, Orders)


def test_reader_that_cannot_apply_a_patch_gets_the_whole_state(ends: Ends) -> None:
    ends.settle(orders(1, ()))
    ends.right = Streams(member(1))  # has forgotten everything, in the same life
    with pytest.raises(WireError, match="a patch of state 1, which this process does not have"):
        ends.right.read(wire.decode(ends.to_right(orders(2, ()))))
    ends.left.read(wire.decode(ends.to_left(report(1))))
    assert isinstance(wire.decode(ends.to_right(orders(3, ()))).body, Orders)


def test_states_that_nobody_confirms_are_not_kept_for_ever(ends: Ends) -> None:
    ends.settle(orders(1, ()))
    for serial in range(2, 4 * STATES_MAX):
        ends.right.read(wire.decode(ends.to_right(orders(serial, ()))))
    (sent,), (read,) = ends.left._sent[RIGHT].values(), ends.right._read[LEFT].values()
    assert len(sent.states) == STATES_MAX
    (stream,) = read.values()
    assert len(stream.states) == STATES_MAX
    assert max(stream.states) == sent.number


def test_restarted_reader_that_cannot_answer_yet_gets_the_whole_state(ends: Ends) -> None:
    """A witness knows nobody's address: it answers the orders that it can read."""
    ends.settle(orders(1, ()))
    ends.restart_right()
    found = [read_or_not(ends.right, ends.to_right(orders(n, ()))) for n in range(2, 40)]
    first = next(place for place, body in enumerate(found) if body is not None)
    assert first < STATES_MAX
    ends.left.read(wire.decode(ends.to_left(report(1))))
    ends.settle(orders(41, ()))


def test_names_of_strangers_take_no_memory_without_end() -> None:
    right = Streams(member(1))
    for name in range(3 * PEERS_MAX):
        at = Peer(name // 1024, name % 1024)
        right.read(Envelope("job", *at, 7, orders(1, ()), 1))
    assert len(right._lives) == PEERS_MAX
    assert not right._read, "nobody of them has heard this process"


def test_frames_with_invented_incarnations_do_not_take_the_place_of_a_rack(ends: Ends) -> None:
    """Nor is it kept from knowing that it is heard."""
    ends.settle(orders(1, ()))
    for life in range(5, 10):
        ends.right.read(Envelope("job", *LEFT, life, orders(1, ()), 1))
    ends.settle(orders(2, ()))
    frame = ends.to_right(orders(3, ()))
    assert isinstance(wire.decode(frame).body, Patch)
    assert ends.right.read(wire.decode(frame)) == orders(3, ())


def test_a_last_word_goes_whole(ends: Ends) -> None:
    ends.settle(orders(1, ()))
    last = replace(report(5), gone=True)
    assert wire.decode(ends.to_left(last)).body == last


def test_messages_that_are_no_states_pass_as_they_are(ends: Ends) -> None:
    envelope = wire.decode(ends.to_right(hello(0)))
    assert envelope.number == 0
    assert ends.right.read(envelope) == hello(0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({99: 1}, "tuple index out of range|list index out of range"),
        ({0: -5}, "Expected `int` >= 0"),
        ({9: [3]}, "out of range"),
        ({9: ["text"]}, "not a patch of a Orders"),
        ({13: "text"}, "not a patch of a Orders"),
    ],
)
def test_a_patch_that_does_not_fit_is_told(fields: dict[int, Any], why: str) -> None:
    """A negative place would mean an item from the end."""
    raw = {place: msgspec.Raw(msgspec.msgpack.encode(value)) for place, value in fields.items()}
    with pytest.raises(WireError, match=why):
        apply_patch(orders(1, ()), Patch(13, 1, raw))


def test_a_numbered_message_that_is_no_state_is_refused() -> None:
    with pytest.raises(WireError, match="which is not a state"):
        Streams(member(1)).read(Envelope("job", 0, 0, 7, hello(0), 3))
    with pytest.raises(WireError, match="which is not a state"):
        Streams(member(1)).read(Envelope("job", 0, 0, 7, Patch(10, 1, {}), 3))


def test_acks_for_another_life_count_nothing() -> None:
    left = Streams(member(0))
    left.envelope("job", LEFT, RIGHT, orders(1, ()))
    said = Envelope("job", 1, 0, 9, report(1), 1, member(0, 5).incarnation, (Ack(13, 1),))
    left.read(said)
    assert isinstance(left.envelope("job", LEFT, RIGHT, orders(2, ())).body, Orders)


def test_a_patch_of_equal_items_names_their_places() -> None:
    """Reports are made anew each time: equal, but other objects."""
    first = replace(report(1), offers=(offer(1, ranks=RANKS),))
    again = replace(report(1), serial=9, offers=(offer(1, ranks=RANKS), offer(1, 2)))
    patch = make_patch(4, first, again)
    assert len(wire.encode(Envelope("job", 1, 0, 7, patch))) < 250
    assert apply_patch(first, patch) == again


def test_frames_of_a_former_life_do_not_stop_the_present_one(ends: Ends) -> None:
    late = ends.to_left(replace(report(1), serial=70))
    ends.settle(orders(1, ()))
    ends.restart_right()
    ends.left.read(wire.decode(ends.to_left(report(1))))
    ends.settle(orders(2, ()))
    ends.left.read(wire.decode(late))
    ends.left.read(wire.decode(ends.to_left(report(1))))
    ends.settle(orders(3, ()))


def test_the_member_of_a_stream_is_its_process() -> None:
    assert Streams(Member(1, 2)).envelope("job", RIGHT, LEFT, report(1)).incarnation == 2
