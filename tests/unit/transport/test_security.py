"""Keys of a job: what follows from its secret, and what a channel opens."""

from __future__ import annotations

import pytest

from mend.errors import ConfigError
from mend.transport.security import (
    PERSON,
    RANDOM_BYTES,
    SECRETS_MAX,
    TAG_BYTES,
    BadSeal,
    Channel,
    Secret,
    Secrets,
)
from mend.types import WITNESS, Peer

ONE, OTHER = Secret(b"1" * 32), Secret(b"2" * 32)
READER, HOLDER = b"r" * RANDOM_BYTES, b"h" * RANDOM_BYTES
JOB = b"j" * 16


def sealed(channel: Channel, plain: bytes, about: bytes = b"") -> memoryview:
    into = memoryview(bytearray(len(plain) + TAG_BYTES))
    channel.seal(plain, about, into)
    return into


def opened(channel: Channel, piece: memoryview, about: bytes = b"") -> bytes:
    into = bytearray(len(piece) - TAG_BYTES)
    channel.open(piece, about, memoryview(into))
    return bytes(into)


def test_every_process_has_a_key_of_its_own_and_all_servers_have_one() -> None:
    peers = [Peer(0, 0), Peer(0, 1), Peer(1, 0), Peer(WITNESS, 0), PERSON]
    keys = {secret.client(peer).public for secret in (ONE, OTHER) for peer in peers}
    keys |= {ONE.server().public, OTHER.server().public}
    assert len(keys) == 2 * len(peers) + 2
    assert Secret(b"1" * 32).client(peers[1]) == ONE.client(peers[1])


def test_a_leader_hears_leaders_people_and_its_own_ranks_and_a_rank_its_leader_alone() -> None:
    leader = Secrets([b"1" * 32], Peer(1, 0)).guests(ranks=2)
    assert leader[ONE.client(Peer(1, 1)).public] == Peer(1, 1)
    assert leader[ONE.client(Peer(63, 0)).public] == Peer(63, 0)
    assert {PERSON, Peer(WITNESS, 0)} < set(leader.values())
    assert Peer(0, 1) not in leader.values()
    rank = Secrets([b"1" * 32], Peer(1, 1)).guests(ranks=2)
    assert set(rank.values()) == {Peer(1, 0)}


def test_while_a_secret_is_replaced_the_keys_of_both_are_let_in() -> None:
    guests = Secrets([b"2" * 32, b"1" * 32], Peer(0, 0)).guests(1)
    assert guests[ONE.client(Peer(1, 0)).public] == Peer(1, 0)
    assert guests[OTHER.client(Peer(1, 0)).public] == Peer(1, 0)


def test_a_channel_opens_what_its_other_end_sealed_in_order_once() -> None:
    ours, _ = ONE.lane(JOB, READER, HOLDER)
    theirs, _ = ONE.lane(JOB, READER, HOLDER)
    first, second = sealed(ours, b"one", b"a"), sealed(ours, b"two", b"b")
    assert opened(theirs, first, b"a") == b"one"
    assert opened(theirs, second, b"b") == b"two"
    with pytest.raises(BadSeal):
        opened(theirs, second, b"b")


@pytest.mark.parametrize("what", ["secret", "job", "reader", "holder", "direction", "about", "bit"])
def test_piece_sealed_for_another_place_does_not_open(what: str) -> None:
    """A recording of one connection is worth nothing on another: either side's random differs."""
    piece = sealed(ONE.lane(JOB, READER, HOLDER)[0], b"plain", b"about")
    made = {
        "secret": OTHER.lane(JOB, READER, HOLDER)[0],
        "job": ONE.lane(b"k" * 16, READER, HOLDER)[0],
        "reader": ONE.lane(JOB, b"x" * RANDOM_BYTES, HOLDER)[0],
        "holder": ONE.lane(JOB, READER, b"x" * RANDOM_BYTES)[0],
        "direction": ONE.lane(JOB, READER, HOLDER)[1],
    }
    channel = made.get(what, ONE.lane(JOB, READER, HOLDER)[0])
    if what == "bit":
        piece[0] ^= 1
    with pytest.raises(BadSeal):
        opened(channel, piece, b"elsewhere" if what == "about" else b"about")


def test_a_secret_of_the_wrong_length_and_too_many_of_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be 32 bytes") as caught:
        Secret(b"hush hush")
    assert "hush" not in str(caught.value)
    for count in (0, SECRETS_MAX + 1):
        with pytest.raises(ConfigError, match="needs 1 to 4 secrets"):
            Secrets([bytes([n]) * 32 for n in range(count)])


def test_a_secret_is_known_by_its_name_alone() -> None:
    both = Secrets([b"1" * 32, b"2" * 32])
    assert both.named(OTHER.name) is both.all[1]
    assert both.named(bytes(8)) is None
