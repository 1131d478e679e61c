"""The exchange plan that a configuration selects: a mesh, or slices (coordination/slices.py)."""

from __future__ import annotations

from mend.coordination.round import SLICED_MIN
from mend.errors import InvariantError

MESH_RACKS = 3
"""Up to this many racks, `auto` selects a mesh, in which racks compare their merges."""

_MANY = 1 << 24
"""Number of elements of a large payload, for which partial blocks of a codec do not matter."""


def is_sharded(plan: str, codec: str, merge: str, racks: int) -> bool:
    """Return whether each rack merges a slice."""
    if plan != "auto":
        return plan == "sharded"
    return racks > MESH_RACKS and not unsharded(codec, merge, racks) and _saves(codec, racks)


def unsharded(codec: str, merge: str, racks: int) -> str:
    """Why a result cannot be merged slice by slice; empty: it can."""
    from mend.codec import codec_named, cut_numel  # loads torch, which a witness has no use for

    if racks < SLICED_MIN:
        return f"needs {SLICED_MIN} racks or more; racks is {racks}"
    if merge != "mean":
        return f"cannot be with merge={merge!r}, which may depend on whole tensors"
    if not cut_numel(codec_named(codec)):
        return f"cannot be with payloads of {codec}, which are read as a whole"
    return ""


def _saves(codec: str, racks: int) -> bool:
    """Return whether slices need fewer bytes: a payload and the result as fp32 are smaller than the
    payloads of all racks. In both cases a rack has 1 / `racks` of the bytes itself."""
    from mend.codec import LayoutCodec, codec_named

    made = codec_named(codec)
    if isinstance(made, LayoutCodec):
        raise InvariantError("payloads of this codec are not cut", {"codec": codec})
    payload = made.payload_bytes(_MANY)
    return payload + 4 * _MANY < racks * payload
