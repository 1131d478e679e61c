"""A follower takes a part from any rack that has it, and nothing that is not the log's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mend.engine.compute.digest import DIGEST_BLOCK_BYTES, bytes_of, digest_of_proof, proof_of
from mend.engine.features.difference import difference_of
from mend.errors import PayloadGone, TransportError
from mend.following.log_view import Decided
from mend.following.pull import Puller
from mend.status.follow_messages import Part, Parts, Piece, RackLanes, encode_parts
from mend.transport.bulk_server import PayloadServer
from mend.transport.bulk_wire import lane_token
from mend.transport.lane_reader import LaneReader
from mend.types import SECOND, Address, difference_key, layout_key, proof_key, state_key

NUMEL = DIGEST_BLOCK_BYTES // 4 + 1000
"""Two blocks, the second one short."""

STALL_NS = SECOND // 2


def values(version: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(version))


def proof(version: int) -> bytes:
    """With a momentum, which a follower does not pull."""
    return proof_of(torch.cat([values(version), torch.ones(NUMEL)]), NUMEL, version, 1)


def decided(version: int) -> Decided:
    return Decided((version,), ((digest_of_proof(proof(version)),),), 0)


class Rack:
    """A lane that serves one part."""

    def __init__(self) -> None:
        self.server = PayloadServer("127.0.0.1", None, lane_token("run7", 0), STALL_NS)
        piece = Piece("w", "float32", (NUMEL,), (NUMEL,), (0,), 0, NUMEL)
        self.serve(layout_key(0), encode_parts(Parts(0, 1, (Part(0, (piece,)),))))

    def serve(self, key: bytes, data: bytes | memoryview) -> None:
        self.server.serve(key, memoryview(data))

    def holds(self, version: int, harm: Callable[[Tensor], object] = lambda _: None) -> None:
        digest = digest_of_proof(proof(version))
        self.serve(proof_key(0, 0, version, digest), proof(version))
        held = torch.cat([values(version), torch.ones(NUMEL)])
        harm(held)
        self.serve(state_key(0, 0, version, digest), bytes_of(held))

    def seat(self, rack: int) -> RackLanes:
        lane = Address("127.0.0.1", self.server.port)
        return RackLanes(rack, "tcp://127.0.0.1:1", (lane,))


Place = tuple[list[Rack], Puller]


@pytest.fixture
def place() -> Iterator[Place]:
    """Two racks."""
    with ExitStack() as undo:
        racks = [Rack(), Rack()]
        for rack in racks:
            undo.callback(rack.server.close)
        puller = Puller(LaneReader("run7", (), "", STALL_NS))
        undo.callback(puller.close)
        puller.racks = tuple(rack.seat(number) for number, rack in enumerate(racks))
        yield racks, puller


def pulled(puller: Puller, version: int) -> bool:
    """Whether all bits are those of the version."""
    found = puller.pull(decided(version))[0][0]
    return bool(torch.equal(found.view(torch.int32), values(version).view(torch.int32)))


def test_part_comes_from_the_rack_that_has_it(place: Place) -> None:
    racks, puller = place
    racks[1].holds(1)
    assert pulled(puller, 1)
    assert puller.first == 1, "it is asked first from now on"
    assert puller.pull(decided(1)) == {}, "nothing is new"


@pytest.mark.parametrize("at", [0, DIGEST_BLOCK_BYTES // 4 + 5])
def test_bytes_without_the_digest_of_the_log_are_never_given(place: Place, at: int) -> None:
    racks, puller = place

    def harm(held: Tensor) -> None:
        held.view(torch.int32)[at] ^= 1

    racks[0].holds(1, harm)
    with pytest.raises(TransportError, match="without the digest"):
        puller.pull(decided(1))
    racks[1].holds(1)
    assert pulled(puller, 1)


def test_momentum_is_not_read(place: Place) -> None:
    """Its bytes may be what they want: the proof stands for them."""
    racks, puller = place
    racks[0].holds(1, lambda held: held[NUMEL:].zero_())
    assert pulled(puller, 1)
    assert puller.bytes_received < 4 * NUMEL + 10_000


def test_proof_of_something_else_is_refused(place: Place) -> None:
    racks, puller = place
    racks[0].holds(1)
    racks[0].serve(proof_key(0, 0, 1, digest_of_proof(proof(1))), proof(2))
    with pytest.raises(TransportError, match="the log has digest"):
        puller.pull(decided(1))


def test_version_that_nobody_has_is_gone(place: Place) -> None:
    with pytest.raises(PayloadGone):
        place[1].pull(decided(1))


def test_sparse_difference_replaces_the_pull(place: Place) -> None:
    racks, puller = place
    racks[0].holds(1)
    assert pulled(puller, 1)
    new = values(1)
    new[::100] += 1
    known = proof_of(torch.cat([new, torch.ones(NUMEL)]), NUMEL, 2, 1)
    digest = digest_of_proof(known)
    racks[0].serve(proof_key(0, 0, 2, digest), known)
    racks[0].serve(difference_key(0, 0, 2, 1, digest), difference_of(values(1), new))
    before = puller.bytes_received
    found = puller.pull(replace(decided(1), versions=(2,), digests=((digest,),)))[0][0]
    assert torch.equal(found.view(torch.int32), new.view(torch.int32))
    assert puller.bytes_received - before < NUMEL // 2


def test_difference_to_another_base_falls_back_to_the_values(place: Place) -> None:
    """The number of a version is given anew after a lineage."""
    racks, puller = place
    racks[0].holds(1)
    assert pulled(puller, 1)
    racks[0].holds(2)
    wrong = values(2)
    wrong[::100] += 1
    digest = digest_of_proof(proof(2))
    racks[0].serve(difference_key(0, 0, 2, 1, digest), difference_of(values(2), wrong))
    assert pulled(puller, 2)
