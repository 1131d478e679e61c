"""Pulls one decided version: the new parts of all ranks, each verified by its digest in the log. A
part is pulled from any rack that has it. An interrupted pull continues from another rack."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from mend.engine.compute.digest import DIGEST_BLOCK_BYTES, blocks_in
from mend.engine.features.difference import with_difference
from mend.errors import (
    ChecksumMismatch,
    PayloadGone,
    PeerUnreachable,
    TransportError,
    WireError,
    require,
)
from mend.following.log_view import Decided
from mend.following.puzzle import Puzzle
from mend.status.follow_messages import LAYOUT_BYTES_MAX, RackLanes, decode_parts
from mend.transport.lane_reader import LaneReader
from mend.types import Address, difference_key, layout_key, proof_key, state_key

T = TypeVar("T")

STREAMS = 4
"""Number of parts that are pulled concurrently."""

PROOF_BYTES_MAX = 64 << 20

SHUNNED_S = 30.0
"""For this long, a rack that did not answer is not asked if another one has said that it lacks a
part. If each part waited for a frozen rack, a follower would never catch up."""


@dataclass(slots=True)
class _Part:
    """A rank's part of a fragment while it is pulled. `values_N`: fp32."""

    rank: int
    fragment: int
    version: int
    digest: str
    values_N: Tensor
    base: tuple[int, Tensor] | None = None
    """An older version that this follower has, and its values."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its blocks, from the proof of its digest; empty: the proof has not arrived."""
    done: int = 0
    """Verified blocks."""

    def blocks(self) -> list[tuple[int, memoryview]]:
        data = self.values_N.view(torch.uint8).numpy().data
        starts = range(0, len(data), DIGEST_BLOCK_BYTES)
        return [(start, data[start : start + DIGEST_BLOCK_BYTES]) for start in starts]

    def change(self, data: bytes) -> bool:
        """Apply a difference to the base. Returns whether the result is this version. It is not if
        the base is a version of another lineage with the same number."""
        if self.base is None:
            return False
        try:
            self.values_N = with_difference(self.base[1], data)
            for _, block in self.blocks():
                self.verify(block)
        except (WireError, ChecksumMismatch):
            self.done = 0
        return self.done == len(self.hashes)

    def verify(self, block: memoryview) -> None:
        """Verify the next block. Raises ChecksumMismatch."""
        if xxhash.xxh3_128_digest(block) != self.hashes[self.done]:
            raise ChecksumMismatch(
                f"fragment {self.fragment} of rank {self.rank}: bytes without the digest that the "
                f"log has of version {self.version}"
            )
        self.done += 1


class Puller:
    """`racks`: those of the newest roster; rack `first` is asked first."""

    def __init__(self, reader: LaneReader) -> None:
        self._reader = reader
        self._streams = ThreadPoolExecutor(STREAMS, "mend-follow")
        self._held: dict[tuple[int, int], _Part] = {}
        """By (fragment, rank), the newest part that was pulled."""
        self._puzzle: Puzzle | None = None
        self.racks: tuple[RackLanes, ...] = ()
        self.first = -1
        self._shunned: dict[int, float] = {}
        """By rack, the monotonic time until which it is not waited for."""

    @property
    def bytes_received(self) -> int:
        return self._reader.bytes_received

    def forget(self) -> None:
        """The job has begun anew, perhaps with other ranks."""
        self._puzzle = None
        self._held.clear()

    def puzzle(self) -> Puzzle:
        """The layouts of all ranks of a rack. Raises TransportError, WireError."""
        if self._puzzle is None:
            count = len(self.racks[0].lanes) if self.racks else 0
            parts = [decode_parts(self._from_any(rank, self._layout)) for rank in range(count)]
            self._puzzle = Puzzle(parts)
        return self._puzzle

    def _layout(self, holder: Address, rank: int) -> bytes:
        return self._whole(holder, rank, layout_key(rank), LAYOUT_BYTES_MAX)

    def pull(self, decided: Decided) -> dict[int, dict[int, Tensor]]:
        """The values (fp32) of all fragments that have changed, by fragment and rank. Parts that
        arrived before an error are kept. Raises PayloadGone if no rack has a part (any more), or
        TransportError."""
        puzzle = self.puzzle()
        jobs, changed, ranks = [], set[int](), range(puzzle.ranks)
        for (fragment, rank), numel in puzzle.numels.items():
            digest, version = decided.digests[fragment][rank], decided.versions[fragment]
            if puzzle.fragments[fragment] and not version:
                continue  # running statistics, which are zeros before their first average
            held = self._held.get((fragment, rank))
            if held is None or held.digest != digest:
                changed.add(fragment)
                values_N = torch.empty(numel, dtype=torch.float32, device="cpu")
                base = (held.version, held.values_N) if held is not None else None
                part = _Part(rank, fragment, version, digest, values_N, base)
                jobs.append(partial(self._pull_part, part))
        running = [self._streams.submit(job) for job in jobs]
        errors = [error for each in running if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        return {p: {rank: self._held[p, rank].values_N for rank in ranks} for p in sorted(changed)}

    def _pull_part(self, part: _Part) -> None:
        self._from_any(part.rank, partial(self._pull_from, part))
        part.base = None
        self._held[part.fragment, part.rank] = part

    def _pull_from(self, part: _Part, holder: Address, rank: int) -> None:
        which = part.rank, part.fragment, part.version, part.digest
        if not part.hashes:
            proof = self._whole(holder, rank, proof_key(*which), PROOF_BYTES_MAX)
            numel = part.values_N.numel()
            part.hashes = blocks_in(proof, part.digest, numel, part.version)
        if part.base is not None and not part.done and self._change(part, holder):
            return
        left = part.blocks()[part.done :]
        self._reader.read(holder, rank, state_key(*which), left, part.verify)

    def _change(self, part: _Part, holder: Address) -> bool:
        """Try to pull a difference to the base instead of the whole part. Returns whether that
        worked."""
        base, limit = require(part.base, "no base")[0], 4 * part.values_N.numel()
        key = difference_key(part.rank, part.fragment, part.version, base, part.digest)
        try:
            size = self._reader.size(holder, part.rank, key)
            if size <= 1 or size > limit:
                return False
            return part.change(self._whole(holder, part.rank, key, limit))
        except PayloadGone:
            return False

    def _whole(self, holder: Address, rank: int, key: bytes, limit: int) -> bytes:
        size = self._reader.size(holder, rank, key)
        if size > limit:
            raise ChecksumMismatch(f"{size} bytes about a part of the model; the limit is {limit}")
        data = bytearray(size)
        self._reader.read(holder, rank, key, [(0, memoryview(data))])
        return bytes(data)

    def _from_any(self, rank: int, ask: Callable[[Address, int], T]) -> T:
        """The answer of the first rack that can give it. Raises one error with those of all."""
        errors: list[TransportError | WireError] = []
        for rack in sorted(
            self.racks, key=lambda each: (self._shuns(each), each.rack != self.first)
        ):
            if self._shuns(rack) and any(isinstance(error, PayloadGone) for error in errors):
                break
            try:
                found = ask(rack.lanes[rank], rank)
                self.first = rack.rack
                return found
            except PeerUnreachable as error:
                self._shunned[rack.rack] = time.monotonic() + SHUNNED_S
                errors.append(error)
            except (TransportError, WireError) as error:
                errors.append(error)
        reasons = "; ".join(map(str, errors)) or "the job has no rack"
        gone = bool(errors) and all(isinstance(error, PayloadGone) for error in errors)
        raise (PayloadGone if gone else TransportError)(reasons)

    def _shuns(self, rack: RackLanes) -> bool:
        return time.monotonic() < self._shunned.get(rack.rack, 0.0)

    def close(self) -> None:
        """Idempotent."""
        self._reader.close()
        self._streams.shutdown()
