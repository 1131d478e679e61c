"""The header of a file in the format of the safetensors library, without the library.

    length of the header, 8 bytes | header as JSON, padded to 8 bytes | bytes of all tensors

The header's `__metadata__` has mend's description of the tensors, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

LENGTH_BYTES = 8
_ALIGNMENT = 8
_KEY = "mend"


class Entry(msgspec.Struct, frozen=True):
    """A tensor. `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def head_of(about: object, entries: Mapping[str, Entry]) -> bytes:
    """Length and header. `about`: the description, which msgspec encodes. The tensors follow in the
    order of their offsets."""
    metadata = {_KEY: msgspec.json.encode(about).decode()}
    head = msgspec.json.encode({"__metadata__": metadata, **entries})
    head += b" " * (-len(head) % _ALIGNMENT)
    return len(head).to_bytes(LENGTH_BYTES, "little") + head


def length_in(first: bytes | memoryview) -> int:
    """Length of the header after these 8 bytes. The reader checks it against a bound."""
    return int.from_bytes(first[:LENGTH_BYTES], "little")


def read_head(head: bytes | memoryview) -> tuple[str, dict[str, Entry]]:
    """The description of the tensors, as JSON, and their entries. `head`: without its length.
    Raises msgspec.DecodeError, and KeyError for a header without a description by mend."""
    raw = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop("__metadata__"), type=dict[str, str])
    entries = {name: msgspec.json.decode(each, type=Entry) for name, each in raw.items()}
    return metadata[_KEY], entries
