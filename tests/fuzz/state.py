"""Blobs of others: the state that a donor sends, and the sums of a rack.

A donor is never trusted: what it sends becomes an anchor only if it has the bits of the log's
digest. Partials and totals of a merge by rda are read strictly, or are a WireError.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from mend.codec import CODECS
from mend.coordination.events import Copied, Copy
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.sums import Tensors, factors_in
from mend.errors import ChecksumMismatch, PayloadGone, WireError
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.types import Address, Extent, Meter
from mend_lab.sim import World
from tests.fuzz.harness import Target
from tests.fuzz.mutate import damaged, joined, mutated, parts_of

T = TypeVar("T")

NUMELS = (0, 1, 7, 64)
"""Sizes of the states; small, so that a change is likely to matter."""

_STATE = struct.Struct("!BBQ")
"""Which state, how it is sent, the version that it is taken for; the blob follows."""

WHOLE, GONE, DAMAGED = 0, 1, 2


class State(Target):
    """What a donor sends, into a rank that has to copy a fragment."""

    name, inputs = "state", 50_000

    def __init__(self, seed: int) -> None:
        world = World(3)
        training = next(iter(world.trainings.values()))
        self.rank = training.rank
        self.rank.store.host = self.rank.jobs._host = Donor(self.rank.host)
        generator = torch.Generator().manual_seed(seed)
        self.numerics = Numerics(
            CODECS["float32"](), MERGES["mean"](), OUTERS["nesterov"](0.7, 0.5)
        )
        self.anchors = [
            self.numerics.adopt(torch.randn(2 * numel, generator=generator), numel, 5)
            for numel in NUMELS
        ]

    def example(self, rng: random.Random) -> bytes:
        which = rng.randrange(len(self.anchors))
        blob = bytes(self.anchors[which].view())
        if blob and rng.random() < 0.9:
            other = bytes(rng.choice(self.anchors).view())
            blob = damaged(rng, blob) if rng.random() < 0.6 else mutated(rng, blob, other)
        version = 5 if rng.random() < 0.9 else rng.choice((0, 4, 6, 2**62))
        return _STATE.pack(which, rng.choice((WHOLE,) * 8 + (GONE, DAMAGED)), version) + blob

    def take(self, data: bytes) -> str:
        which, how, version = _STATE.unpack_from(data)
        wanted, blob = self.anchors[which], data[_STATE.size :]
        self._by_rank(which % len(self.rank.store.rules), blob, how)
        return self._by_hand(wanted, blob, version)

    def _by_hand(self, wanted: Anchor, blob: bytes, version: int) -> str:
        """The digest says whether these are the bits, the version and the size of the log."""
        if len(blob) != len(wanted.view()):
            return "another size"
        room = self.numerics.empty(wanted.numel)
        room.view(torch.uint8).numpy()[:] = memoryview(blob)
        got = self.numerics.adopt(room, wanted.numel, version)
        same = blob == bytes(wanted.view()) and version == wanted.version
        assert (got.digest == wanted.digest) == same, "equal digests of unequal states"
        return "accepted" if same else "other bits than the log says"

    def _by_rank(self, fragment: int, blob: bytes, how: int) -> None:
        """Through a rank's own hands: it keeps what it had, and tells its machine why."""
        rank, before = self.rank, dict(self.rank.store.anchors)
        told: list[Copied] = []
        jobs = rank.jobs
        tell, jobs.tell = jobs.tell, told.append
        donor: Any = rank.store.host
        donor.blob, donor.how = blob, how
        try:
            rank._pipeline.copy(Copy(fragment, 9, "ab" * 32, (Address("donor", 1),)))
        finally:
            jobs.tell = tell
        assert len(told) == 1, told
        assert told[0].error, told
        assert rank.store.anchors == before, "a state that is not the log's was kept"


class Donor:
    """A host whose pulls end at once, as the input says."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.blob, self.how = b"", WHOLE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def fetch(
        self, holders: Sequence[Address], key: bytes, checksum: str, into: memoryview,
        done: Callable[[Exception | None], None],
        extent: Extent | None = None, meter: Meter | None = None,
    ) -> None:  # fmt: skip
        part = self.blob[: len(into)]
        into[: len(part)] = part
        errors = {GONE: PayloadGone("gone"), DAMAGED: ChecksumMismatch("damaged")}
        done(errors.get(self.how))

    def work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = job()
        except Exception as error:
            result = error
        done(result)


MEMBERS = (1, 2, 3, 64)
_TENSORS = Tensors((0, 4, 4, 11), (False, True, False))


class Sums:
    """Partials of ranks into a total, totals into factors. The first byte of an input says of which
    merge they are."""

    name, inputs = "sums", 50_000

    def __init__(self, seed: int) -> None:
        self.numerics = Numerics(CODECS["float32"](), MERGES["rda"](), OUTERS["nesterov"](1.0, 0.0))
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            tuple([1.0 / 2 ** (members - 1).bit_length()] * members) for members in MEMBERS
        ]
        self.partials = [
            [self._partial(members, generator, scale) for scale in (1.0, 1e-30, 0.0, 1e18)]
            for members in MEMBERS
        ]

    def _partial(self, members: int, generator: torch.Generator, scale: float) -> bytes:
        payloads = [
            self.numerics.encode(torch.randn(11, generator=generator) * scale, None).payload
            for _ in range(members)
        ]
        return self.numerics.measure(payloads, self.weights[MEMBERS.index(members)], _TENSORS)

    @cached_property
    def totals(self) -> list[bytes]:
        return [self.numerics.total(partials) for partials in self.partials]

    def example(self, rng: random.Random) -> bytes:
        which = rng.choice((0, 1, 1, 1, 2, 2, 3) if rng.random() < 0.2 else (0, 1, 1, 2))
        if rng.random() < 0.3:
            blobs = [self.totals[which]]
        else:
            blobs = rng.choices(self.partials[which], k=rng.choice((1, 1, 2, 3)))
        at = rng.randrange(len(blobs))
        if rng.random() < 0.9:
            other = rng.choice(rng.choice(self.partials))
            whole = rng.random() < 0.7
            blobs[at] = damaged(rng, blobs[at]) if whole else mutated(rng, blobs[at], other)
        elif rng.random() < 0.5:
            blobs[at] = rng.choice(self.partials[rng.randrange(len(MEMBERS))])
        return bytes([which]) + joined(blobs)

    def take(self, data: bytes) -> str:
        try:
            return self._read(parts_of(data[1:]), data[0])
        except WireError:
            return "no sums"

    def _read(self, blobs: list[bytes], which: int) -> str:
        weights = self.weights[which]
        if len(blobs) == 1 and blobs[0][:4] == self.totals[which][:4]:
            runs = _TENSORS.runs(weights, factors_in(blobs[0], weights, _TENSORS))
            assert runs[-1][0] == _TENSORS.cuts[-1]
            return "accepted"
        total = self.numerics.total(blobs)
        factors_in(total, weights, _TENSORS)  # refused when the partials were of another merge
        return "accepted"

    def close(self) -> None:
        self.numerics.close()
