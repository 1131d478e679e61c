"""Types and constants that all packages share. Plain frozen data."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

VERSION = "0.1.0"
"""Version of mend; racks of different versions refuse each other."""

WITNESS = 0xFFFF
"""Rack number of the witness: votes, holds no tensor, sorts after every rack."""

PERSON = 0xFFFD
"""Rack number of messages from people: `mend retire` and status clients."""

READER_RACK = 0xFFFC
"""Rack number of clients that hold a reader's key; no message has it."""

BUFFERS_MAX = 256
"""Limit of the buffers that a hello lists."""

RACKS_MAX = 64
"""Limit of the racks of a job."""

RANKS_MAX = 1024
"""Limit of the ranks of a rack."""

MOMENT_PERIODS = {1: "momentum_sync_period_steps", 2: "second_moment_sync_period_steps"}
"""Order of an optimizer's moment -> the setting of how often the racks average it."""

OWN_CODECS = ("float32", "bfloat16", "int8", "int4", "e3m0", "topk", "sparse")
"""mend's own codecs besides powersgd-R. They are listed here because mend.codec loads torch."""

CODEC_NAMES = f"{', '.join(OWN_CODECS)}, powersgd-1 to powersgd-64"
"""For help texts."""

MS = 1_000_000
SECOND = 1_000_000_000
MB = 1_000_000


class Peer(NamedTuple):
    """One process: local rank `rank` of rack `rack`. Rank 0 is the rack's leader."""

    rack: int
    rank: int


class Member(NamedTuple):
    """A rack in one life. The incarnation is drawn once per start and shared by all its ranks."""

    rack: int
    incarnation: int


def rack_name(rack: int) -> str:
    return "the witness" if rack == WITNESS else f"rack {rack}"


def rack_names(racks: Collection[int]) -> str:
    """Racks by their numbers, ascending; of at least one."""
    return f"rack{'s' if len(racks) > 1 else ''} {','.join(map(str, sorted(racks)))}"


def visible(text: str) -> str:
    """The text, in quotes if it is blank or begins with a quote: unequal ones stay unequal."""
    return repr(text) if text.lstrip()[:1] in ("", "'", '"') else text


def whole_number(value: object) -> int | None:
    """`value` as an int; None for a bool, and for anything that is not a whole number."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # or else a TypeError
    except TypeError:
        return None


def fp32(value: float | Fraction) -> float:
    """The nearest fp32 number. Raises OverflowError if `value` exceeds the range of fp32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    return rounded


def life_of(member: Member) -> int:
    """A public name for one incarnation of a rack: a one-way hash with the same range. Processes
    that knew the incarnation itself could forge the messages of the rack."""
    name = b"mend life" + member.rack.to_bytes(2) + member.incarnation.to_bytes(8)
    return int.from_bytes(hashlib.sha256(name).digest()[:8]) >> 2


class Extent(NamedTuple):
    """A part of a payload: its offset, and the size of the whole payload in bytes."""

    offset: int
    total: int


@dataclass(slots=True)
class Meter:
    """Progress of one pull: its size, the rack that it is counted for, and the bytes verified so
    far. The thread that pulls writes it. `checksum`: xxh3_128 hex of all bytes, if the checksum was
    not known when the pull began. `first_ns`: monotonic time at which the first bytes were
    verified."""

    size: int
    rack: int
    verified: int = 0
    checksum: str = ""
    first_ns: int = 0


class Address(NamedTuple):
    """The address at which a bulk lane listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor inside a fragment's full flat vector: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A fragment: whole tensors laid end to end, the same on every rack."""

    fragment: int
    slots: tuple[Slot, ...]
    numel: int


class Span(NamedTuple):
    """The elements [start, stop) of a fragment that one rank owns."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of a fragment that one rank owns: a slice of every tensor's local elements, end to
    end.

    `spans[i]` indexes the rank's own copy or shard of the layout's slot i, row-major. It is empty
    if the rank owns nothing of the tensor.
    """

    spans: tuple[Span, ...]
    numel: int
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the copies or shards that the spans count in; empty: each span is a vector."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Slot i lies in [cuts[i], cuts[i + 1]) of the vector."""
        return tuple(accumulate((span.numel for span in self.spans), initial=0))


def owned_span(numel: int, owners: int, position: int) -> Span:
    """The slice of owner number `position`; the slices of all `owners` tile [0, numel)."""
    return Span(numel * position // owners, numel * (position + 1) // owners)


_KEY = struct.Struct("!cHQHHQQ16s")
KEY_BYTES = _KEY.size


def offer_key(member: Member, rank: int, fragment: int, seq: int) -> bytes:
    """Pull key of one rank's part of an offer. Contains everything that the bytes depend on."""
    return _KEY.pack(b"o", member.rack, member.incarnation, rank, fragment, seq, 0, b"")


def growing_key(member: Member, rank: int, fragment: int, base: int) -> bytes:
    """Pull key of one rank's part of the offer that it is making against version `base`. Others
    pull it before they know of the offer, so its bytes count only if their checksum is that of an
    announced offer."""
    return _KEY.pack(b"g", member.rack, member.incarnation, rank, fragment, base, 0, b"")


def is_growing_key(key: bytes) -> bool:
    return key[:1] == b"g"


def slice_key(rank: int, fragment: int, version: int, attempt: int, position: int) -> bytes:
    """Pull key of one merged slice of one rank's part of a fragment. The attempt identifies the
    members, so slices of different attempts have different keys."""
    return _KEY.pack(b"m", position, attempt, rank, fragment, version, 0, b"")


def state_key(rank: int, fragment: int, version: int, digest: str) -> bytes:
    """Pull key of one rank's part of a fragment's state (anchor + outer state) at a version."""
    return _KEY.pack(b"s", 0, 0, rank, fragment, version, 0, bytes.fromhex(digest)[:16])


def proof_key(rank: int, fragment: int, version: int, digest: str) -> bytes:
    """Pull key of the proof of that state's digest, for a reader that pulls its values only."""
    return _KEY.pack(b"h", 0, 0, rank, fragment, version, 0, bytes.fromhex(digest)[:16])


def layout_key(rank: int) -> bytes:
    """Pull key of the places of one rank's parts of the fragments in the model."""
    return _KEY.pack(b"l", 0, 0, rank, 0, 0, 0, b"")


def difference_key(rank: int, fragment: int, version: int, base: int, digest: str) -> bytes:
    """Pull key of the changes of that state's values since version `base`."""
    return _KEY.pack(b"d", 0, 0, rank, fragment, version, base, bytes.fromhex(digest)[:16])


class ReadableKey(NamedTuple):
    """The fields of a key that a reader may pull. `base`: only of a difference."""

    kind: bytes
    rank: int
    fragment: int
    version: int
    base: int


def readable_key(key: bytes) -> ReadableKey:
    kind, _, _, rank, fragment, version, base, _ = _KEY.unpack(key)
    return ReadableKey(kind, rank, fragment, version, base)


READABLE = frozenset({b"s", b"h", b"l", b"d"})
"""Kinds of keys that a reader of the merged model may pull."""


def training_state_key(donor: Member, rank: int, to: Member, step: int, digest: str) -> bytes:
    """Pull key of one donor rank's training state, as it was copied for a joining rack."""
    rest = bytes.fromhex(digest)[:16]
    return _KEY.pack(b"t", donor.rack, donor.incarnation, rank, to.rack, step, to.incarnation, rest)


def rack_state_key(owner: Member, rank: int, step: int, digest: str = "") -> bytes:
    """Pull key of the objects that one rank had registered with scope rack when it captured after
    `step`. Without a digest: of their head, which has their size and digest."""
    rest = bytes.fromhex(digest)[:16]
    return _KEY.pack(b"r", owner.rack, owner.incarnation, rank, 0, step, 0, rest)


def mirrors_key(owner: int, rank: int) -> bytes:
    """Pull key of the list of rack states that a rank keeps for the same rank of rack `owner`."""
    return _KEY.pack(b"k", owner, 0, rank, 0, 0, 0, b"")


def probe_key(rank: int) -> bytes:
    """Pull key of bytes that a rank serves so that others can measure the link."""
    return _KEY.pack(b"p", 0, 0, rank, 0, 0, 0, b"")


def without_incarnation(key: bytes) -> bytes:
    """The key without what changes when the job is started again. Simulated delays are drawn from
    it."""
    kind, rack, _, rank, fragment, seq, _, rest = _KEY.unpack(key)
    return _KEY.pack(kind, rack, 0, rank, fragment, seq, 0, rest)
