"""Messages as frames. Decoding is strict: a whole message of this version, or a WireError.

A frame is magic, version, checksum, body. Every later version keeps these, the first two fields of
the body (job and rack) and the address in a hello, so that two versions that meet can report the
mismatch to each other. The version changes with every change of a message or of a record.

The checksum (crc32) finds every single wrong bit, and more: the 16 bits of TCP sometimes let a bit
through that a bad card or switch has flipped, and one bit can turn a version, a vote or a digest
into another well-formed one.
"""

from __future__ import annotations

import zlib

import msgspec

from mend.coordination.messages import Envelope
from mend.errors import OtherVersion, WireError

MAGIC = b"mnd"
VERSION = 9
FRAME_BYTES_MAX = 8 << 20

_HEAD = MAGIC + bytes([VERSION])
_BODY_AT = len(_HEAD) + 4
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Encode a frame. Raises WireError for one over the limit; the receiver checks the limits of
    fields."""
    frame = framed(_encoder.encode(envelope))
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"a message of {len(frame)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    return frame


def framed(body: bytes, head: bytes = _HEAD) -> bytes:
    """A frame around any bytes. `head`: three bytes of magic, one of version."""
    return head + zlib.crc32(body).to_bytes(4, "big") + body


def decode(frame: bytes) -> Envelope:
    """Decode a frame. Raises WireError that says what is wrong, and nothing else, for any bytes.
    Raises OtherVersion for an intact frame of another wire version."""
    if frame[:3] == MAGIC and len(frame) > _BODY_AT and frame[3] != VERSION:
        raise _of_other_version(frame)
    body = body_of(frame)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error


def _of_other_version(frame: bytes) -> WireError:
    """The error for a frame of another version, with the fields that all versions share."""
    version = frame[3]
    try:
        envelope = msgspec.msgpack.decode(body_of(frame, MAGIC + bytes([version])))
    except (WireError, msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        return WireError(f"wire version {version}, this is version {VERSION}: {error}")
    match envelope:
        case [str() as job, int() as rack, *_] if 0 <= rack <= 0xFFFF:
            return OtherVersion(version, VERSION, job, rack, _address_in(envelope))
    return WireError(f"wire version {version}, this is version {VERSION}, sender unknown")


def _address_in(envelope: object) -> str:
    """Address of the sender's leader, if the message is a hello; else empty."""
    match envelope:
        case [_, _, _, _, [_, [_, str() as address, *_], *_], *_] if address.startswith("tcp://"):
            return address[:256]
    return ""


def body_of(frame: bytes, head: bytes = _HEAD, bytes_max: int = FRAME_BYTES_MAX) -> memoryview:
    """The body of a frame of this kind, verified by its checksum. Raises WireError."""
    if len(frame) > bytes_max:
        raise WireError(f"frame of {len(frame)} bytes, the limit is {bytes_max}")
    if frame[:3] != head[:3] or len(frame) <= _BODY_AT:
        raise WireError(f"{len(frame)} bytes that do not begin like a mend frame")
    if frame[3] != head[3]:
        raise WireError(
            f"wire version {frame[3]}, this is version {head[3]}; run the same mend on all racks"
        )
    body = memoryview(frame)[_BODY_AT:]
    if zlib.crc32(body) != int.from_bytes(frame[_BODY_AT - 4 : _BODY_AT], "big"):
        raise WireError(f"a frame of {len(frame)} bytes whose bits changed on the way")
    return body
