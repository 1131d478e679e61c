"""The header that checkpoints and state dicts share."""

from __future__ import annotations

import json

import msgspec
import pytest

from mend.engine.compute.safetensors import LENGTH_BYTES, Entry, head_of, length_in, read_head

ENTRIES = {"a": Entry("F32", (2, 3), (0, 24)), "b": Entry("BOOL", (), (24, 25))}


def test_head_is_read_back_and_has_the_format_of_the_library() -> None:
    head = head_of({"step": 7}, ENTRIES)
    assert length_in(head) == len(head) - LENGTH_BYTES
    assert len(head) % 8 == 0, "the tensors begin where wide elements may lie"
    about, entries = read_head(head[LENGTH_BYTES:])
    assert (json.loads(about), entries) == ({"step": 7}, ENTRIES)
    plain = json.loads(head[LENGTH_BYTES:])
    assert plain.pop("__metadata__") == {"mend": '{"step":7}'}, "strings only, as the format has it"
    assert plain["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize("head", [b"", b"[]", b'{"a":{}}', b'{"__metadata__":{"other":"1"}}'])
def test_another_header_is_refused(head: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, KeyError)):
        read_head(head)
